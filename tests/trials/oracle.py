"""What a program does, told without running it.

The semantics in short. Every collective is a meeting of all ranks of its group, in the order in
which each rank has issued them; if what they brought differs, all get a mismatch. A message of up
to 64 KiB is copied at once; a larger one waits for a receive that asks for it. Asynchronous
operations move by themselves. A rank that raises, or gets stuck, does nothing after that.

No operation chooses between several partners (messages to any source have a tag of their own), so
how far each rank gets does not depend on their speeds: running them in any order tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from trials.programs import (
    COALESCED,
    COLLECTIVES,
    MESSAGES,
    OBJECTS,
    REDUCING,
    ROOTED,
    Program,
    Step,
)

Place = tuple[int, int]  # a rank, and the index of one of its steps


def signatures(program: Program, step: Step) -> list[tuple[Any, ...]]:
    """Return what each meeting of a collective compares, the name of the operation first."""
    group = program.groups[step.group]
    if step.kind == "barrier":
        return [("barrier",)]
    if step.kind in OBJECTS:
        return _object_signatures(step, len(group))
    name = step.kind.removesuffix("_single")
    facts: list[Any] = [name, step.dtype]
    if step.kind in REDUCING:
        facts.append(step.reduce)
    if step.kind in ROOTED:
        facts.append(step.root)
    # Where ranks may bring shapes of their own, the numbers of elements are compared.
    own_shape = name in ("all_gather", "reduce_scatter", "all_to_all")
    facts.append(step.count if own_shape else step.shape)
    if step.kind != COALESCED:
        return [tuple(facts)]
    facts[0] = "all_reduce"
    if step.tensors == 1:
        return [tuple(facts)]
    return [(*facts, step.tensors, number) for number in range(step.tensors)]


def _object_signatures(step: Step, size: int) -> list[tuple[Any, ...]]:
    """Objects take a meeting for their sizes and one for their bytes, which then agree."""
    sizes_of_all = ("all_gather", "int64", 1)
    return {
        "all_gather_object": [sizes_of_all, ("all_gather", "uint8")],
        "gather_object": [sizes_of_all, ("gather", "uint8", step.root)],
        "broadcast_object_list": [
            ("broadcast", "int64", step.root, (2,)),
            ("broadcast", "uint8", step.root),
        ],
        "scatter_object_list": [
            ("broadcast", "int64", step.root, (size,)),
            ("scatter", "uint8", step.root),
        ],
    }[step.kind]


@dataclass
class Posting:
    """One rank's part in a meeting."""

    place: Place
    key: int
    signature: tuple[Any, ...]
    state: str = "open"  # then "done" or "mismatch"
    meeting: tuple[int, int] = (-1, -1)  # group and number


@dataclass
class Delivery:
    """One end of a message."""

    place: Place
    step: Step
    state: str = "open"
    letter: Place = (-1, -1)  # what was sent, once the two ends have met
    other: int = -1  # the rank at the other end, then


@dataclass
class Wait:
    """What a rank waits for: `ready` when it is over, `needs` the ranks that must act for that."""

    what: str
    group: int
    ready: Callable[[], bool]
    needs: Callable[[], set[int]]
    any_of: bool = False  # one of those it needs would do
    later: bool = False  # for something that was started before
    posting: Posting | None = None
    queued: bool = False  # behind another operation, which is given up before it


@dataclass
class End:
    """How a rank's run ends: `kind` is "finished", "stuck", "mismatch" or the kind of a fault."""

    kind: str
    place: int
    wait: Wait | None = None
    # Of a mismatch: its group and meeting, or "message", its sender's place and the other rank.
    cause: tuple[Any, ...] = ()
    later: bool = False  # the mismatch was met by an asynchronous operation
    open_works: bool = False  # something that it has not waited for may be lost with it


class _Mismatch(Exception):
    def __init__(self, cause: tuple[Any, ...], later: bool) -> None:
        self.cause = cause
        self.later = later


LETHAL = ("raise", "exit", "os_exit", "kill", "leave", "stall")


@dataclass
class Prophecy:
    """How each rank ends, and with whom each operation that succeeds was done."""

    program: Program
    ends: list[End]
    # Of a collective: the key with which each rank of its group took part. Of a receive: the
    # sender and its key. Only operations that can succeed are here.
    partners: dict[Place, dict[int, int]]
    # The meetings that mismatch: what each rank of the group brought.
    mismatches: dict[tuple[int, int], dict[int, tuple[Any, ...]]]
    left: list[set[int]]  # per group, ranks that have closed it
    # Receivers that refuse a message of a rank after it was copied, by that rank: it may notice.
    refusals: dict[int, set[int]]


@dataclass
class _Simulation:
    program: Program
    postings: list[dict[int, list[Posting]]] = field(default_factory=list)
    met: list[int] = field(default_factory=list)
    letters: dict[tuple[int, int], list[Delivery]] = field(default_factory=dict)
    asked: dict[tuple[int, int], list[Delivery]] = field(default_factory=dict)
    started: list[dict[int, Posting | Delivery]] = field(default_factory=list)
    partners: dict[Place, dict[int, int]] = field(default_factory=dict)
    mismatches: dict[tuple[int, int], dict[int, tuple[Any, ...]]] = field(default_factory=dict)
    left: list[set[int]] = field(default_factory=list)
    refusals: dict[int, set[int]] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)

    def run(self) -> Prophecy:
        size = self.program.size
        self.postings = [{rank: [] for rank in group} for group in self.program.groups]
        self.met = [0] * len(self.program.groups)
        self.started = [{} for _ in range(size)]
        self.left = [set() for _ in self.program.groups]
        self.at = [0] * size
        ends: list[End | None] = [None] * size
        lives = [self._life(rank) for rank in range(size)]
        waits: list[Wait | None] = [None] * size
        moved = True
        while moved:
            moved = False
            for rank in range(size):
                wait = waits[rank]
                if ends[rank] is not None or (wait is not None and not wait.ready()):
                    continue
                moved = True
                try:
                    waits[rank] = next(lives[rank])
                except StopIteration as end:
                    ends[rank] = End(end.value, self.at[rank])
                except _Mismatch as error:
                    ends[rank] = End("mismatch", self.at[rank], None, error.cause, error.later)
        found = [end or End("stuck", self.at[rank], waits[rank]) for rank, end in enumerate(ends)]
        for rank, end in enumerate(found):
            if end.wait is not None and end.wait.posting is not None:
                group, number = end.wait.posting.meeting
                end.wait.queued = number > self.met[group]
            works = self.started[rank].values()
            end.open_works = any(_may_be_lost(work, end) for work in works)
        return Prophecy(
            self.program, found, self.partners, self.mismatches, self.left, self.refusals
        )

    def _life(self, rank: int) -> Iterator[Wait]:
        steps = self.program.steps[rank]
        for place, step in enumerate(steps):
            self.at[rank] = place
            if step.kind in LETHAL and step.kind != "leave":
                return step.kind
            if step.kind == "leave":
                break
            if step.kind in COLLECTIVES:
                yield from self._collective(rank, place, step)
            elif step.kind in (*MESSAGES, "helper"):
                yield from self._message(rank, place, step)
            elif step.kind == "wait" and step.key in self.started[rank]:
                yield from self._finish(rank, self.started[rank].pop(step.key), later=True)
        else:
            self.at[rank] = len(steps)
        # The newest group is closed first; what was issued on it is brought to its end.
        for group in reversed(range(len(self.program.groups))):
            if rank not in self.program.groups[group]:
                continue
            if self.postings[group][rank]:
                last = self.postings[group][rank][-1]
                wait = self._meeting_wait(group, rank, last, "destroy_process_group")
                if not wait.ready():
                    yield wait
            self.left[group].add(rank)
        return "finished"

    def _finish(self, rank: int, work: Posting | Delivery, later: bool) -> Iterator[Wait]:
        wait = (
            self._meeting_wait(work.meeting[0], rank, work, work.signature[0])
            if isinstance(work, Posting)
            else self._message_wait(work)
        )
        wait.later = later
        if not wait.ready():
            yield wait
        if work.state == "mismatch":
            if isinstance(work, Posting):
                raise _Mismatch(work.meeting, later)
            raise _Mismatch(("message", work.letter, work.other), later)

    def _collective(self, rank: int, place: int, step: Step) -> Iterator[Wait]:
        for signature in signatures(self.program, step):
            queue = self.postings[step.group][rank]
            posting = Posting((rank, place), step.key, signature)
            posting.meeting = (step.group, len(queue))
            queue.append(posting)
            self._meet(step.group)
            if step.later:
                self.started[rank][step.key] = posting
                return
            yield from self._finish(rank, posting, later=False)

    def _meet(self, group: int) -> None:
        queues = self.postings[group]
        while all(len(queue) > self.met[group] for queue in queues.values()):
            meeting = {rank: queue[self.met[group]] for rank, queue in queues.items()}
            brought = {rank: posting.signature for rank, posting in meeting.items()}
            agreed = len(set(brought.values())) == 1
            keys = {rank: posting.key for rank, posting in meeting.items()}
            for posting in meeting.values():
                posting.state = "done" if agreed else "mismatch"
                if agreed and self._is_last(posting):
                    self.partners[posting.place] = keys
            if not agreed:
                self.mismatches[group, self.met[group]] = brought
            self.met[group] += 1

    def _is_last(self, posting: Posting) -> bool:
        rank, place = posting.place
        step = self.program.steps[rank][place]
        return posting.signature == signatures(self.program, step)[-1]

    def _meeting_wait(self, group: int, rank: int, posting: Posting, what: str) -> Wait:
        def needs() -> set[int]:
            # The lane stands at the first meeting that has not come about.
            return {r for r, queue in self.postings[group].items() if len(queue) <= self.met[group]}

        return Wait(what, group, lambda: posting.state != "open", needs, posting=posting)

    def _message(self, rank: int, place: int, step: Step) -> Iterator[Wait]:
        delivery = Delivery((rank, place), step)
        if step.kind in ("recv", "irecv"):
            self._receive(rank, delivery)
        else:
            assert step.peer is not None
            if not step.is_large:
                delivery.state = "done"
            self._arrive(rank, step.peer, delivery)
        if step.kind in ("isend", "irecv"):
            self.started[rank][step.key] = delivery
        elif step.kind != "helper":
            yield from self._finish(rank, delivery, later=False)

    def _receive(self, rank: int, recv: Delivery) -> None:
        letters = self.letters.setdefault((recv.step.group, rank), [])
        for letter in letters:
            if _fits(letter, recv):
                letters.remove(letter)
                self._match(letter, recv)
                return
        self.asked.setdefault((recv.step.group, rank), []).append(recv)

    def _arrive(self, sender: int, receiver: int, letter: Delivery) -> None:
        asked = self.asked.setdefault((letter.step.group, receiver), [])
        for recv in asked:
            if _fits(letter, recv):
                asked.remove(recv)
                self._match(letter, recv)
                return
        self.letters.setdefault((letter.step.group, receiver), []).append(letter)

    def _match(self, letter: Delivery, recv: Delivery) -> None:
        same = (letter.step.dtype, letter.step.count) == (recv.step.dtype, recv.step.count)
        recv.letter = letter.letter = letter.place
        recv.other, letter.other = letter.place[0], recv.place[0]
        recv.state = "done" if same else "mismatch"
        if letter.state == "open":
            letter.state = recv.state
        elif not same:
            self.refusals.setdefault(letter.place[0], set()).add(recv.place[0])
        if same:
            self.partners[recv.place] = {letter.place[0]: letter.step.key}
            self.partners[letter.place] = {recv.place[0]: recv.step.key}

    def _message_wait(self, delivery: Delivery) -> Wait:
        step = delivery.step
        group = self.program.groups[step.group]
        others = {rank for rank in group if rank != delivery.place[0]}
        needs = others if step.peer is None else {step.peer}
        kind = step.kind.removeprefix("i")
        return Wait(
            kind, step.group, lambda: delivery.state != "open", lambda: needs, step.peer is None
        )


def _fits(letter: Delivery, recv: Delivery) -> bool:
    from_right_rank = recv.step.peer is None or recv.step.peer == letter.place[0]
    return from_right_rank and recv.step.tag == letter.step.tag


def _may_be_lost(work: Posting | Delivery, end: End) -> bool:
    """Say whether something that a rank has started depends on the moment at which it ends."""
    if isinstance(work, Posting):  # leaving in peace, it would see to its collectives
        return work.state == "open" or end.kind != "finished"
    return work.step.kind == "irecv" or work.step.is_large


def foretell(program: Program) -> Prophecy:
    """Tell how each rank of a program ends."""
    prophecy = _Simulation(program).run()
    if any(end.kind == "stall" for end in prophecy.ends):
        # A rank that comes too late may still find what was there for it.
        for rank, steps in enumerate(program.steps):
            awake = [replace(s, kind="sleep") if s.kind == "stall" else s for s in steps]
            program = program.with_steps(rank, awake)
        prophecy.partners = _Simulation(program).run().partners
    return prophecy
