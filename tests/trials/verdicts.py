"""Whether a run ended as it must: the right class of error on each rank, naming the right ranks.

What a rank must end with, where the fault is another's:

| the rank waits for                                     | ends with                           |
|--------------------------------------------------------|-------------------------------------|
| a meeting to which somebody brings something else      | CollectiveMismatch, on all of them  |
| a message of another size or dtype                     | CollectiveMismatch; the sender too, |
|                                                        | if it was not copied before; if it  |
|                                                        | was, the sender may notice or not   |
| one that was killed, raised, exited, left, or is done  | PeerFailed                          |
| one that gets one of these errors itself               | PeerFailed, with that error's story |
| one that waits, perhaps through others, for this rank  | Deadlock, on all of them            |
| one that waits for ranks in such a cycle               | Deadlock; PeerFailed if it comes    |
|                                                        | when these have raised it already,  |
|                                                        | or waits behind a call of its own   |
| one that computes beyond the timeout, or has a thread  | DistTimeout, on those who wait      |
| that may act and does not                              | longest; PeerFailed on the others;  |
|                                                        | Deadlock if others give up for that |
| nobody                                                 | no error; but PeerFailed if one of  |
|                                                        | its groups is broken by then        |

A rank that raises breaks all groups that it is in. How soon others meet that is a question of
speed: so wherever some rank raises, the others may end with PeerFailed instead, before they come
to the end that is told here. The first to raise cannot: their class is exact.

What a fault looks like to the others follows from the same table: a skipped or extra or swapped
call is a mismatch if the calls that meet then differ, and otherwise a missing partner: a deadlock
while all are there, PeerFailed once the rank has finished. Another shape, dtype, root or reduction
is a mismatch; another tag or peer a message that never comes.

Buffers: what succeeds is right; what could not come about, because ranks brought different things
or one never came, has written nothing on any rank, whatever error it ended with. Of an operation
that did come about and in the middle of which a rank died, only an error is promised.
"""

from __future__ import annotations

import pickle
import re
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import DistTimeout
from phalanx.testing import run_ranks
from trials.interpreter import Report, run_program
from trials.oracle import End, Prophecy, foretell
from trials.programs import Program

DEADLINE = 45.0  # seconds that a whole run may take; no wait is longer than its group's timeout

_OUTCOMES = {
    "finished": "finished",
    "mismatch": "CollectiveMismatch",
    "raise": "InjectedError",
    "exit": "SystemExit",
    "os_exit": "os_exit",
    "kill": "kill",
}


@dataclass
class Expectation:
    """How one rank may end, and what its error must say."""

    outcomes: set[str]
    one_of: set[int] = field(default_factory=set)  # at least one must be named
    other_ends: set[int] = field(default_factory=set)  # one is named by a message's mismatch
    brought: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # to a mismatch, by rank
    # What each rank of a deadlock waits in, and for whom; and whether the ranks named are one.
    waits: dict[int, tuple[str, set[int]]] = field(default_factory=dict)
    is_deadlock: Callable[[set[int]], bool] = lambda named: True


@dataclass
class Expectations:
    """How a run may end."""

    ranks: list[Expectation]
    somebody: str = ""  # the outcome that at least one rank must have


class _Judge:
    """Reads from a prophecy what errors there must be."""

    def __init__(self, prophecy: Prophecy) -> None:
        self.prophecy = prophecy
        self.program = prophecy.program
        self.ends = prophecy.ends
        self.stuck = {r: end for r, end in enumerate(self.ends) if end.kind == "stuck"}
        self.stalled = {r for r, end in enumerate(self.ends) if end.kind == "stall"}
        self.forsaken = self._forsaken()
        self.locked = self._closed({r for r in self.stuck if not self._is_watched(r)})
        self.slow = set(self.stuck) - self.forsaken - self.locked
        self.cycles = self._cycles()
        self.sources = self._sources()

    def needs(self, rank: int) -> set[int]:
        wait = self.ends[rank].wait
        assert wait is not None
        return wait.needs()

    def _caught(self, rank: int, bad: set[int]) -> bool:
        """Say whether a stuck rank waits for one of these; for any source, for these alone."""
        wait = self.ends[rank].wait
        assert wait is not None
        return wait.needs() <= bad if wait.any_of else bool(wait.needs() & bad)

    def _gone(self, rank: int) -> set[int]:
        """Return the ranks that have ended, as far as the group is concerned that one waits on."""
        wait = self.ends[rank].wait
        assert wait is not None
        ended = {r for r, end in enumerate(self.ends) if end.kind not in ("stuck", "stall")}
        return ended | self.prophecy.left[wait.group]

    def _forsaken(self) -> set[int]:
        """Return the ranks that wait for ranks which have ended or will for this reason."""
        found: set[int] = set()
        while True:
            more = {r for r in self.stuck if self._caught(r, self._gone(r) | found)} - found
            if not more:
                return found
            found |= more

    def _closed(self, ranks: set[int]) -> set[int]:
        """Return those of some stuck ranks that cannot move, whatever all others do."""
        locked = ranks - self.forsaken
        while True:
            free = {r for r in locked if not self._caught(r, self._hopeless(r, locked))}
            if not free:
                return locked
            locked = locked - free

    def _hopeless(self, rank: int, locked: set[int]) -> set[int]:
        wait = self.ends[rank].wait
        return locked | self._gone(rank) if wait is not None and wait.any_of else locked

    def _is_watched(self, rank: int) -> bool:
        """Say whether a rank has a thread that might act, for all that others know."""
        done = self.program.steps[rank][: self.ends[rank].place]
        return any(step.kind == "watcher" for step in done)

    def _cycles(self) -> list[set[int]]:
        """Return the sets of deadlocked ranks of which each waits, in the end, for all others."""
        reach = {r: self._reach(r) for r in self.locked}
        cycles = []
        for rank in sorted(self.locked):
            cycle = {r for r in reach[rank] if rank in reach[r]}
            if cycle and cycle not in cycles:
                cycles.append(cycle)
        return cycles

    def _reach(self, rank: int) -> set[int]:
        found: set[int] = set()
        new = self.needs(rank) & self.locked
        while new - found:
            found |= new
            new = {n for r in found for n in self.needs(r) & self.locked}
        return found

    def _sources(self) -> set[Any]:
        """Return what makes ranks raise independently of one another."""
        sources: set[Any] = set()
        for rank, end in enumerate(self.ends):
            if end.kind == "mismatch":
                sources.add(end.cause[:2])
            elif end.kind in ("raise", "exit", "os_exit", "kill", "stall"):
                sources.add(rank)
            if end.kind not in ("stuck", "mismatch") and end.open_works:
                sources.add(("open", rank))
        for rank in self.forsaken:
            for gone in self.needs(rank) & self._gone(rank):
                if self.ends[gone].kind != "mismatch":
                    sources.add(gone)
        sources |= {("cycle", *sorted(cycle)) for cycle in self.cycles}
        if self.slow:
            sources.add("slow")
        return sources

    def expectations(self, culprit: int | None, death_at_any_time: bool) -> Expectations:
        """Say how each rank may end. `culprit` is the rank to blame, where one is."""
        ranks = []
        for rank, end in enumerate(self.ends):
            expectation = self._expectation(rank, end)
            disturbed = bool(self.sources - {rank, ("open", rank)}) or death_at_any_time
            if disturbed and end.kind not in ("raise", "exit", "os_exit", "kill", "stuck"):
                lone = end.kind == "mismatch" and not end.later and len(self.sources) == 1
                if not lone or death_at_any_time:
                    expectation.outcomes.add("PeerFailed")
            if death_at_any_time and rank == culprit:
                expectation.outcomes.add("kill")
            if refusals := self.prophecy.refusals.get(rank):
                expectation.outcomes.add("CollectiveMismatch")
                expectation.other_ends |= refusals
            expectation.one_of = {culprit} if culprit is not None else self._to_blame()
            ranks.append(expectation)
        somebody = ""
        if self.slow and self.sources <= {"slow", *self.stalled}:
            somebody = "DistTimeout"
        elif self.cycles and all(s[0] == "cycle" for s in self.sources if isinstance(s, tuple)):
            plain = [s for s in self.sources if not isinstance(s, tuple)]
            somebody = "" if plain else "Deadlock"
        return Expectations(ranks, somebody)

    def _to_blame(self) -> set[int]:
        ended = {r for r, end in enumerate(self.ends) if end.kind not in ("stuck", "finished")}
        careless = {r for r, end in enumerate(self.ends) if end.open_works}
        waited_for = {n for r in self.stuck for n in self.needs(r)}
        return ended | careless | waited_for

    def _expectation(self, rank: int, end: End) -> Expectation:
        if end.kind == "stall":
            return Expectation({"finished", "DistTimeout", "PeerFailed"})
        if end.kind != "stuck":
            found = Expectation({_OUTCOMES[end.kind]})
            if end.kind == "mismatch":
                self._describe_mismatch(found, end)
            return found
        assert end.wait is not None
        if end.place == len(self.program.steps[rank]):
            return Expectation({"finished"})  # and destroys its groups, when that can be done
        if rank in self.forsaken:
            return Expectation({"PeerFailed"})
        if rank in self.slow:
            # What ranks in a deadlock give up is given up by all who are in it.
            given_up = {"Deadlock"} if self.locked else set()
            return Expectation({"DistTimeout", "PeerFailed"} | given_up)
        found = Expectation({"Deadlock"})
        alone = any(rank in cycle and self._is_least(cycle) for cycle in self.cycles)
        if not alone or len(self.sources) > 1 or end.wait.queued:
            found.outcomes.add("PeerFailed")
        found.is_deadlock = lambda named: bool(self._closed(named & self.locked))
        found.waits = {
            r: (wait.what, wait.needs())
            for r in self.locked
            if (wait := self.ends[r].wait) and not wait.queued
        }
        return found

    def _is_least(self, cycle: set[int]) -> bool:
        """Say whether these ranks are deadlocked all together and not some of them alone."""
        return not any(self._closed(cycle - {rank}) for rank in cycle)

    def _describe_mismatch(self, found: Expectation, end: End) -> None:
        if end.cause[0] == "message":
            found.other_ends = {end.cause[2]}
        else:
            found.brought = self.prophecy.mismatches[end.cause]


def expect(
    prophecy: Prophecy, culprit: int | None = None, death_at_any_time: bool = False
) -> Expectations:
    """Say how the ranks of a program may end."""
    return _Judge(prophecy).expectations(culprit, death_at_any_time)


_LIST = r"\d+(?:-\d+)?(?:(?:,| and|, and) \d+(?:-\d+)?)*"


def ranks_named(text: str) -> set[int]:
    """Return all ranks that a message names: "rank 3", "ranks 0-2, 5"."""
    found = {int(rank) for rank in re.findall(r"\brank (\d+)", text)}
    for listed in re.findall(rf"\branks ({_LIST})", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _mismatch_complaints(text: str, brought: dict[int, tuple[Any, ...]]) -> list[str]:
    """Compare the table of a mismatch with what each rank brought."""
    lines = re.findall(rf"^ +(ranks? {_LIST}) +(\w+)\(.*interpreter\.py:\d+", text, re.MULTILINE)
    told = [(sorted(ranks_named(ranks)), operation) for ranks, operation in lines]
    if sorted(rank for ranks, _ in told for rank in ranks) != sorted(brought):
        return [f"its table tells of {told}, not of each of {sorted(brought)}"]
    complaints = []
    for ranks, operation in told:
        kinds = {brought[rank] for rank in ranks}
        if len(kinds) > 1 or operation not in {kind[0] for kind in kinds}:
            complaints.append(f"it says {operation} for {ranks}, which brought {kinds}")
    return complaints


def _deadlock_complaints(rank: int, text: str, expected: Expectation) -> list[str]:
    """Compare the lines of a deadlock with what each rank waits for."""
    named = ranks_named(text)
    if "was given up" in text:  # who comes late is told who is missing
        missing = expected.waits[rank][1] if rank in expected.waits else set()
        return [] if missing <= named else [f"it names {sorted(named)}, not {sorted(missing)}"]
    if not expected.is_deadlock(named):
        return [f"it names {sorted(named)}, who are not in a deadlock"]
    complaints = []
    lines = re.findall(
        rf"^ +rank (\d+) +waits for (ranks? {_LIST}) +in (\w+)\(.*interpreter\.py:\d+",
        text,
        re.MULTILINE,
    )
    if not lines:
        complaints.append("it has no line for any rank")
    waiting = {int(number) for number, _, _ in lines}
    for other, (what, needs) in expected.waits.items():
        told = [(op, ranks_named(needed)) for number, needed, op in lines if int(number) == other]
        # There may have been more at that moment, who came later. Whoever destroys its groups waits
        # in what it has started.
        as_told = [
            needs & waiting <= needed
            for op, needed in told
            if what in (op, "destroy_process_group")
        ]
        if told and not any(as_told):
            complaints.append(f"it misstates that rank {other} waits in {what} for {sorted(needs)}")
    return complaints


@dataclass
class Trial:
    """A program, what may come of it, and what came."""

    program: Program
    expectations: Expectations
    reports: list[Report]
    complaints: list[str]

    def __str__(self) -> str:
        lines = [str(self.program)]
        for rank, (report, expected) in enumerate(
            zip(self.reports, self.expectations.ranks, strict=True)
        ):
            lines.append(
                f"rank {rank} ended with {report.outcome} at step {report.place}, "
                f"expected {' or '.join(sorted(expected.outcomes))}"
            )
            lines += [f"    {line}" for line in report.text.splitlines()]
        return "\n".join([*lines, *(f"COMPLAINT: {each}" for each in self.complaints)])


def try_program(
    program: Program, ranks: str, culprit: int | None = None, death_at_any_time: bool = False
) -> Trial:
    """Run a program, on threads or processes, and compare what happened with what must."""
    prophecy = foretell(program)
    expectations = expect(prophecy, culprit, death_at_any_time)
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(
            run_program,
            program.size,
            program,
            prophecy.partners,
            directory,
            ranks=ranks,  # type: ignore[arg-type]
            timeout=DEADLINE,
            group_timeout=program.timeout,
            return_exceptions=True,
        )
        reports = [_report(Path(directory, f"rank{r}"), result) for r, result in enumerate(results)]
    trial = Trial(program, expectations, reports, [])
    for rank, (report, expected) in enumerate(zip(reports, expectations.ranks, strict=True)):
        trial.complaints += _complaints(rank, report, expected)
    if expectations.somebody and expectations.somebody not in {r.outcome for r in reports}:
        trial.complaints.append(f"no rank ended with {expectations.somebody}")
    return trial


def _report(file: Path, result: Any) -> Report:
    """Return a rank's own report, completed by what its launcher saw."""
    report = Report()
    if file.exists():
        report = pickle.loads(file.read_bytes())
    text = str(result)
    if isinstance(result, DistTimeout) and "did not return" in text:
        report.outcome, report.text = "HANG", text
    elif "was killed by" in text and signal.SIGKILL.name not in text and report.outcome != "kill":
        report.outcome, report.text = "CRASH", text
    elif report.outcome == "running":
        killed = signal.SIGKILL.name in text
        report.outcome, report.text = "kill" if killed else type(result).__name__, text
    return report


def _complaints(rank: int, report: Report, expected: Expectation) -> list[str]:
    complaints = [f"rank {rank}: {problem}" for problem in report.problems]
    if report.outcome not in expected.outcomes:
        complaints.append(
            f"rank {rank} ended with {report.outcome}, "
            f"expected {' or '.join(sorted(expected.outcomes))}"
        )
        return complaints
    named = ranks_named(report.text)
    found = []
    if report.outcome == "Deadlock":
        found = _deadlock_complaints(rank, report.text, expected)
    elif report.outcome == "CollectiveMismatch" and "does not match across ranks" in report.text:
        found = _mismatch_complaints(report.text, expected.brought)
    elif report.outcome == "CollectiveMismatch" and not expected.other_ends & named:
        found = [f"it names {sorted(named)}, not {sorted(expected.other_ends)}"]
    elif report.outcome in ("PeerFailed", "DistTimeout") and not expected.one_of & named:
        found = [f"it names {sorted(named)}, not {sorted(expected.one_of)}"]
    return complaints + [f"rank {rank}'s error: {complaint}" for complaint in found]
