"""Programs as data: what each rank does, step by step; and random ones, right and wrong.

A step of a right program has the same `key` on all ranks that take part in it. What a rank puts in
is a function of the rank and the key, so that what must come out is known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

ROOTED = ("broadcast", "reduce", "gather", "scatter")
COALESCED = "all_reduce_coalesced"
REDUCING = ("all_reduce", COALESCED, "reduce", "reduce_scatter", "reduce_scatter_single")
PLAIN = (
    *("all_reduce", COALESCED, "broadcast", "reduce", "all_gather", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
ROOTED_OBJECTS = OBJECTS[1:]
COLLECTIVES = ("barrier", *PLAIN, *OBJECTS)
MESSAGES = ("send", "recv", "isend", "irecv")

DTYPES = ("float32", "float64", "bfloat16", "int32", "int16")
REDUCTIONS = {
    **dict.fromkeys(("float32", "float64", "bfloat16"), ("SUM", "PRODUCT", "MIN", "MAX", "AVG")),
    **dict.fromkeys(("int32", "int16"), ("SUM", "PRODUCT", "MIN", "MAX", "BOR")),
}
SHAPES = ((1,), (7,), (3, 5), (600,), (40, 50), (9000,), (300_000,))
LARGE = (400_000,)  # a message that waits for its receiver, between threads and processes alike
BUFFERED = 64 << 10  # bytes of a message that is copied at once
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int32": 4, "int16": 2}
UNREAD = 7  # messages between two ranks of a group; one more than eight unread ones would wait

PATIENT = 20.0  # seconds; the timeout of programs that need none
IMPATIENT = 3.0


@dataclass(frozen=True)
class Step:
    """One thing that a rank does."""

    kind: str
    key: int = 0
    group: int = 0  # index in the program's groups
    dtype: str = "float32"
    shape: tuple[int, ...] = (1,)
    reduce: str = "SUM"
    tensors: int = 2  # of a coalesced call
    root: int = 0  # ranks here are ranks of the world
    peer: int | None = None  # None: any source
    tag: int = 0
    later: bool = False  # asynchronous: `wait` comes as a step of its own
    seconds: float = 0.0

    @property
    def count(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def is_large(self) -> bool:
        return self.count * SIZES[self.dtype] > BUFFERED

    def __str__(self) -> str:
        facts = []
        if self.kind in (*PLAIN, *MESSAGES, "helper"):
            facts.append(f"{self.dtype}{list(self.shape)}")
        if self.kind in REDUCING:
            facts.append(self.reduce)
        if self.kind == COALESCED:
            facts.append(f"{self.tensors} tensors")
        if self.kind in (*ROOTED, *ROOTED_OBJECTS):
            facts.append(f"root={self.root}")
        if self.kind in (*MESSAGES, "helper"):
            facts.append(f"peer={'any' if self.peer is None else self.peer}, tag={self.tag}")
        if self.kind in (*COLLECTIVES, *MESSAGES, "helper"):
            facts.append(f"group {self.group}")
        if self.seconds:
            facts.append(f"{self.seconds:g} s")
        later = "async " if self.later else ""
        return f"{later}{self.kind}#{self.key}({', '.join(facts)})"


@dataclass(frozen=True)
class Program:
    """What each rank does; `groups[0]` is the world."""

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]
    timeout: float = PATIENT  # of every group

    @property
    def size(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        lines = [f"groups {list(map(list, self.groups))}, timeout {self.timeout:g} s"]
        for rank, steps in enumerate(self.steps):
            lines.append(f"rank {rank}:")
            lines += [f"  [{place}] {step}" for place, step in enumerate(steps)]
        return "\n".join(lines)

    def with_steps(self, rank: int, steps: Sequence[Step]) -> Program:
        """Return the same program with other steps on one rank."""
        return replace(self, steps=(*self.steps[:rank], tuple(steps), *self.steps[rank + 1 :]))


def some_groups(rng: random.Random, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the world and up to two groups of some of its ranks."""
    groups = [tuple(range(size))]
    for _ in range(rng.randrange(3)):
        groups.append(tuple(sorted(rng.sample(range(size), rng.randint(2, size)))))
    return tuple(groups)


def some_data(rng: random.Random, kind: str) -> dict[str, object]:
    """Return a dtype, shape and reduction for a collective."""
    dtype = rng.choice(DTYPES)
    shape = rng.choice(SHAPES)
    return {"dtype": dtype, "shape": shape, "reduce": rng.choice(REDUCTIONS[dtype])}


@dataclass
class _Writer:
    """Builds a right program: events in one order for all, of which each rank does its part.

    A part may be put off where that changes nothing: a wait, or the receiving of a message that
    was copied. In the order of events every program can be done, so none can get stuck.
    """

    rng: random.Random
    groups: tuple[tuple[int, ...], ...]
    size: int
    steps: list[list[Step]] = field(default_factory=list)
    put_off: list[tuple[int, int, Step]] = field(default_factory=list)  # when, rank, step
    messages: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    event: int = 0

    def write(self, events: int) -> Program:
        self.steps = [[] for _ in range(self.size)]
        for self.event in range(1, events + 1):
            self._due(self.event)
            draw = self.rng.random()
            if draw < 0.5:
                self._collective()
            elif draw < 0.85:
                self._message()
            else:
                self._pause()
        self._due(None)
        return Program(self.groups, tuple(map(tuple, self.steps)))

    def _due(self, event: int | None) -> None:
        ready = [entry for entry in self.put_off if event is None or entry[0] <= event]
        self.put_off = [entry for entry in self.put_off if entry not in ready]
        for _, rank, step in sorted(ready, key=lambda entry: entry[:2]):
            self.steps[rank].append(step)

    def _put_off(self, rank: int, step: Step) -> None:
        self.put_off.append((self.event + self.rng.randint(1, 4), rank, step))

    def _collective(self) -> None:
        group = self.rng.randrange(len(self.groups))
        kind = self.rng.choice(COLLECTIVES)
        root = self.rng.choice(self.groups[group])
        step = Step(kind, self.event, group, root=root, **some_data(self.rng, kind))
        may_be_later = kind not in (*OBJECTS, COALESCED) and self.rng.random() < 0.3
        for rank in self.groups[group]:
            # Each rank decides for itself whether it waits at once.
            later = may_be_later and self.rng.random() < 0.7
            self.steps[rank].append(replace(step, later=later))
            if later:
                self._put_off(rank, Step("wait", self.event))

    def _message(self) -> None:
        group = self.rng.randrange(len(self.groups))
        sender, receiver = self.rng.sample(self.groups[group], 2)
        if self.messages[group, sender, receiver] == UNREAD:
            return
        self.messages[group, sender, receiver] += 1
        way = self.rng.choice(["plain", "plain", "any", "late", "helper"])
        large = way != "helper" and self.rng.random() < 0.35
        shape = LARGE if large else self.rng.choice(SHAPES[:5])
        # Messages that may overtake others have a tag of their own.
        tag = 0 if way == "plain" else 100 + self.event
        dtype = self.rng.choice(DTYPES)
        step = Step("send", self.event, group, dtype, shape, tag=tag, peer=receiver)
        if way == "helper":
            seconds = self.rng.choice([0.002, 0.02])
            self.steps[sender].append(replace(step, kind="helper", seconds=seconds))
        elif (way == "late" and large) or self.rng.random() < 0.4:
            self.steps[sender].append(replace(step, kind="isend"))
            self._put_off(sender, Step("wait", self.event))
        else:
            self.steps[sender].append(step)
        step = replace(step, kind="recv", peer=None if way == "any" else sender)
        if self.rng.random() < 0.4:
            self.steps[receiver].append(replace(step, kind="irecv"))
            self._put_off(receiver, Step("wait", self.event))
        elif way == "late" and not (large and self.steps[sender][-1].kind == "isend"):
            self._put_off(receiver, step)
        else:
            self.steps[receiver].append(step)

    def _pause(self) -> None:
        rank = self.rng.randrange(self.size)
        kind = self.rng.choice(["sleep", "spin"])
        seconds = self.rng.choice([0.001, 0.003, 0.01, 0.03])
        self.steps[rank].append(Step(kind, self.event, seconds=seconds))


def right_program(rng: random.Random) -> Program:
    """Return a program of 2 to 5 ranks that does well."""
    size = rng.randint(2, 5)
    groups = some_groups(rng, size)
    return _Writer(rng, groups, size).write(rng.randint(6, 16))


def frosty(rng: random.Random, program: Program) -> Program:
    """Return the program with processes that are stopped for a while, anywhere in what they do."""
    for rank in rng.choices(range(program.size), k=rng.randint(0, 3)):
        steps = list(program.steps[rank])
        steps.insert(rng.randint(0, len(steps)), Step("freeze", seconds=rng.choice([0.1, 0.5])))
        program = program.with_steps(rank, steps)
    return program


def wild_program(rng: random.Random) -> Program:
    """Return a program whose ranks often do not fit together: many get stuck."""
    size = rng.randint(2, 4)
    groups = some_groups(rng, size)
    if rng.random() < 0.6:
        return _crossed_program(rng, groups, size)
    writer = _Writer(rng, groups, size)
    program = writer.write(rng.randint(3, 8))
    for _ in range(rng.randrange(4)):
        rank = rng.randrange(size)
        steps = list(program.steps[rank])
        if not steps:
            continue
        place = rng.randrange(len(steps))
        draw = rng.random()
        if draw < 0.35:
            del steps[place]
        elif draw < 0.7:
            steps.insert(rng.randrange(len(steps)), steps.pop(place))
        elif steps[place].kind in MESSAGES:
            steps[place] = replace(steps[place], tag=steps[place].tag + 1000)
        program = program.with_steps(rank, _waits_after_starts(steps))
    return program


def _crossed_program(rng: random.Random, groups: tuple[tuple[int, ...], ...], size: int) -> Program:
    """Return a program of a few operations, right but for the order in which each rank does them.

    Nothing in it can mismatch: on one group all operations are the same.
    """
    steps: list[list[Step]] = [[] for _ in range(size)]
    for key in range(1, rng.randint(3, 6)):
        group = rng.randrange(len(groups))
        if rng.random() < 0.5:
            for rank in groups[group]:
                steps[rank].append(Step("all_reduce", key, group, later=rng.random() < 0.2))
                if steps[rank][-1].later:
                    steps[rank].append(Step("wait", key))
        else:
            sender, receiver = rng.sample(groups[group], 2)
            shape = rng.choice([(1,), (2000,), LARGE, LARGE])
            step = Step("send", key, group, shape=shape, peer=receiver, tag=key)
            steps[sender].append(step)
            anyone = None if rng.random() < 0.2 else sender
            steps[receiver].append(replace(step, kind="recv", peer=anyone))
    for rank in range(size):
        if rng.random() < 0.5:
            rng.shuffle(steps[rank])
        if rng.random() < 0.2:
            pause = Step(rng.choice(["sleep", "spin"]), 50, seconds=rng.choice([0.05, 0.3]))
            steps[rank].insert(rng.randint(0, len(steps[rank])), pause)
        if rng.random() < 0.04:
            steps[rank].insert(0, Step("watcher", 60))
    ordered = [tuple(_waits_after_starts(each)) for each in steps]
    watched = any(step.kind == "watcher" for each in steps for step in each)
    return Program(groups, tuple(ordered), IMPATIENT if watched else PATIENT)


def _waits_after_starts(steps: list[Step]) -> list[Step]:
    """Move waits that come before what they wait for to the place just after it."""
    result: list[Step] = []
    early: list[Step] = []
    for place, step in enumerate(steps):
        starts_later = any(
            other.key == step.key and other.kind != "wait" for other in steps[place + 1 :]
        )
        if step.kind == "wait" and starts_later:
            early.append(step)
            continue
        result.append(step)
        result += [wait for wait in early if wait.key == step.key]
        early = [wait for wait in early if wait.key != step.key]
    return result
