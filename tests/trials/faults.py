"""One fault in one rank of a right program."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from trials.programs import (
    COALESCED,
    COLLECTIVES,
    DTYPES,
    IMPATIENT,
    MESSAGES,
    PLAIN,
    REDUCING,
    REDUCTIONS,
    ROOTED,
    ROOTED_OBJECTS,
    Program,
    Step,
)

ENDINGS = ("raise", "exit", "leave")
PROCESS_ENDINGS = ("kill", "kill", "os_exit", "kill_later")
CHANGES = (
    "skip",
    "skip",
    "swap",
    "shape",
    "dtype",
    "root",
    "reduce",
    "tensors",
    "extra",
    "tag",
    "peer",
)


@dataclass(frozen=True)
class Fault:
    """What is wrong, with whom, and at which of its steps."""

    kind: str
    rank: int
    place: int

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} at step {self.place}"


def inject(rng: random.Random, program: Program, processes: bool) -> tuple[Program, Fault]:
    """Return the program with one fault in it."""
    kinds = [*CHANGES, *ENDINGS, *(PROCESS_ENDINGS if processes else ())]
    kind = "stall" if rng.random() < 0.02 else rng.choice(kinds)
    places = [(r, p) for r, steps in enumerate(program.steps) for p in range(len(steps))]
    rng.shuffle(places)
    for rank, place in places:
        changed = _changed(rng, program, kind, rank, list(program.steps[rank]), place)
        if changed is not None:
            faulty = program.with_steps(rank, changed)
            if kind == "stall":
                faulty = replace(faulty, timeout=IMPATIENT)
            return faulty, Fault(kind, rank, place)
    return inject(rng, program, processes)  # nothing here can be changed in this way


def _changed(
    rng: random.Random, program: Program, kind: str, rank: int, steps: list[Step], place: int
) -> list[Step] | None:
    """Return the steps with a fault at `place`, None if there can be no such fault there."""
    step = steps[place]
    before, after = steps[:place], steps[place + 1 :]
    talks = step.kind in (*COLLECTIVES, *MESSAGES, "helper")
    if kind in (*ENDINGS, *PROCESS_ENDINGS):
        return [*before, Step(kind, seconds=rng.choice([0.0, 0.002, 0.01, 0.03])), *steps[place:]]
    if kind == "stall":
        return [*before, Step(kind, seconds=IMPATIENT * 2), *steps[place:]] if talks else None
    if kind == "skip":
        return [*before, *after]
    if kind == "swap":
        if not after or after[0] == step or (after[0].kind, after[0].key) == ("wait", step.key):
            return None
        return [*before, after[0], step, *after[1:]]
    if kind == "extra":
        if not talks:
            return None
        again = {"isend": "send", "irecv": "recv", "helper": "send"}.get(step.kind, step.kind)
        extra = replace(step, kind=again, key=900 + step.key, later=False, seconds=0.0)
        return [*before, extra, *steps[place:]]
    other = _other(rng, program, kind, rank, step)
    return None if other is None or other == step else [*before, other, *after]


def _other(rng: random.Random, program: Program, kind: str, rank: int, step: Step) -> Step | None:
    """Return the step with one argument changed."""
    has_data = step.kind in (*PLAIN, *MESSAGES, "helper")
    group = program.groups[step.group]
    if kind == "shape" and has_data:
        longer = (*step.shape[:-1], step.shape[-1] + rng.randint(1, 3))
        turned = step.shape[::-1]
        return replace(step, shape=rng.choice([longer, longer, turned]))
    if kind == "dtype" and has_data:
        fitting = [dtype for dtype in DTYPES if step.reduce in REDUCTIONS[dtype]]
        return replace(step, dtype=rng.choice(fitting))
    if kind == "root" and step.kind in (*ROOTED, *ROOTED_OBJECTS):
        return replace(step, root=rng.choice(group))
    if kind == "reduce" and step.kind in REDUCING:
        return replace(step, reduce=rng.choice(REDUCTIONS[step.dtype]))
    if kind == "tensors" and step.kind == COALESCED:
        return replace(step, tensors=rng.choice([1, 2, 3]))
    if kind == "tag" and step.kind in (*MESSAGES, "helper"):
        return replace(step, tag=step.tag + 1000)
    if kind == "peer" and step.kind in (*MESSAGES, "helper") and step.peer is not None:
        return replace(step, peer=rng.choice([other for other in group if other != rank]))
    return None
