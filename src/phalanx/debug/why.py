"""Say why a job does not move, or that it does."""

from __future__ import annotations

import json
import re
import signal
import textwrap
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from phalanx.debug import outside, stacks, verdict
from phalanx.debug.outside import Job, Rank, Wait
from phalanx.debug.text import duration, printable
from phalanx.debug.verdict import rank_list

if TYPE_CHECKING:
    from rich.console import RenderableType

_PAUSE = 0.3  # seconds between the two looks that tell whether anything moves
_MOST_STACKS = 8


EXAMPLES = [
    ("phalanx why", "the only job of this machine"),
    ("phalanx why 4711", "the job of process 4711"),
    ("phalanx why --json", "the same, for programs"),
]


def configure(parser: ArgumentParser) -> None:
    outside.add_job_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--once", action="store_true", help="look once and end, as it always does")


@dataclass
class Reason:
    """Why a job does not move."""

    job: str
    cause: str  # gone, failed, deadlock, starting, stopped, waiting, idle, or moving
    ranks: list[int]  # that it is about
    text: str
    advice: str
    moves: bool
    stacks: dict[int, list[str]] = field(default_factory=dict)
    no_stacks: list[str] = field(default_factory=list)  # why some or all are missing


def run(arguments: Namespace) -> int:
    from phalanx.debug import looks

    job = outside.find(arguments.job)
    time.sleep(_PAUSE)
    again = outside.look_again(job)
    if again is None:
        raise outside.JobNotFound(f"job {job.name} has ended meanwhile")
    reason = explain(job, again)
    if reason.cause != "moving":
        add_stacks(reason, again)
    if arguments.json:
        print(json.dumps(asdict(reason), indent=2))
    elif (console := looks.terminal()) is not None:
        console.print(shown(reason, console.width))
    else:
        print(_page(reason))
    return 0


def explain(before: Job, now: Job) -> Reason:
    """Find the reason, from two looks at a job."""
    done = _operations(now) - _operations(before)
    meanwhile = duration((now.seen_ns - before.seen_ns) * 1e-9)
    for found in (_gone, _failed, _deadlock, _starting, _waiting, _stopped):
        said = found(before, now)
        if said is not None:
            cause, ranks, text, advice = said
            if done > 0:
                text += f" Meanwhile other operations go on: {done} in {meanwhile}."
            return Reason(now.name, cause, ranks, text, advice, done > 0)
    here = [rank.rank for rank in now.ranks if rank.presence == "here"]
    if done > 0:
        text = f"Nothing is stuck: {done} operations were begun in the last {meanwhile}."
        return Reason(now.name, "moving", [], text, "", True)
    text = f"No rank waits for another. {_each(before, now, here)}"
    advice = "If nothing should take this long, look at the stacks."
    return Reason(now.name, "idle", here, text, advice, False)


_Said = tuple[str, list[int], str, str]


def _gone(before: Job, now: Job) -> _Said | None:
    gone = [rank for rank in now.ranks if rank.gone]
    if not gone:
        return None
    ends = []
    for rank in gone:
        how = (
            f"it was dying of {signal.Signals(rank.signal).name}"
            if rank.signal in set(signal.Signals)
            else "it was killed (SIGKILL, perhaps for lack of memory) or left by os._exit"
        )
        ends.append(f"{_title(rank)} is gone: {how}; {verdict.last_deed(now, rank.rank)}.")
    left = [rank.rank for rank in now.ranks if rank.alive and rank.presence == "here"]
    text = " ".join(ends) + (f" Still there: {_each(before, now, left)}" if left else "")
    advice = (
        "The others raise PeerFailed as soon as they wait for it. Look at its output, and in the "
        "system's log for the out-of-memory killer."
    )
    return "gone", [rank.rank for rank in gone], text, advice


def _failed(before: Job, now: Job) -> _Said | None:
    failed = [rank for rank in now.ranks if rank.presence == "failed"]
    if not failed:
        return None
    first = min(failed, key=lambda rank: rank.ended_ns)
    ago = duration(verdict.seconds_since(now, first.ended_ns))
    left = [rank.rank for rank in now.ranks if rank.alive and rank.presence == "here"]
    text = f"{_title(first)} failed {ago} ago: it {first.why.strip()}"
    text += f"\n{_each(before, now, left)}" if left else ""
    return "failed", [rank.rank for rank in failed], text, "Mend what made it fail."


def _deadlock(before: Job, now: Job) -> _Said | None:
    if not now.deadlock:
        return None
    stuck = [rank.rank for rank in now.ranks if any(wait.blocked for wait in rank.waits)]
    *lines, advice = now.deadlock.splitlines()
    return "deadlock", stuck, "Deadlock: " + "\n".join(lines), advice


def _starting(before: Job, now: Job) -> _Said | None:
    missing = [rank.rank for rank in now.ranks if rank.presence == "absent"]
    if not missing:
        return None
    there = [rank.rank for rank in now.ranks if rank.presence != "absent"]
    came = f"{rank_list(there)} of {len(now.ranks)} came" if there else "nobody came"
    text = (
        f"The job is starting since {duration(now.age)}: {came} to init_process_group, "
        f"{rank_list(missing)} did not."
    )
    advice = "See whether they were started, with the right RANK, WORLD_SIZE and store."
    return "starting", missing, text, advice


def _waiting(before: Job, now: Job) -> _Said | None:
    if verdict.longest_wait(now) < verdict.LONG:
        return None
    found = verdict.culprits(now)
    waits = {r.rank: wait for r in now.ranks if (wait := verdict.wait_of(now, r)) is not None}
    text = " ".join(_meetings(now, waits))
    if not found:
        return "waiting", sorted(waits), text, "They wait for each other, or have just been freed."
    ranks = [culprit.rank for culprit in found]
    text += " " + _each(before, now, ranks)
    first = now.ranks[found[0].rank]
    if first.stopped:
        return "stopped", ranks, text, _continue([first])
    advice = f"Look at what keeps {rank_list(ranks)} from the call that the others wait in."
    return "waiting", ranks, text, advice


def _stopped(before: Job, now: Job) -> _Said | None:
    stopped = [rank for rank in now.ranks if rank.stopped]
    if not stopped:
        return None
    ranks = [rank.rank for rank in stopped]
    return "stopped", ranks, _each(before, now, ranks), _continue(stopped)


def _continue(stopped: list[Rank]) -> str:
    pids = " ".join(str(pid) for pid in sorted({rank.pid for rank in stopped}))
    return f"Let it go on: kill -CONT {pids}, or leave the debugger."


def _meetings(job: Job, waits: dict[int, Wait]) -> list[str]:
    """Say who waits in what, for whom; those that wait in the same are named together."""
    parties: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, wait in waits.items():
        what = verdict.numbered(job, rank, wait)
        parties.setdefault((what, wait.site, tuple(wait.needs)), []).append(rank)
    lines = []
    for (what, site, needs), ranks in parties.items():
        since = max(verdict.seconds_since(job, waits[rank].started_ns) for rank in ranks)
        wait = waits[ranks[0]]
        if wait.own or not needs:
            rest = "for another thread of its own"
        else:
            missing = {"recv": "sent it", "send": "received it"}.get(wait.op, "come to it")
            have = "has" if len(needs) == 1 else "have"
            rest = f"for {rank_list(list(needs))}, which {have} not {missing}"
        verb = "waits" if len(ranks) == 1 else "wait"
        name = rank_list(ranks).capitalize()
        lines.append(f"{name} {verb} since {duration(since)} in {what} at {site} {rest}.")
    return lines


def _each(before: Job, now: Job, ranks: list[int]) -> str:
    """Say what each of these ranks does, as the system and its last call tell."""
    seconds = max(now.seen_ns - before.seen_ns, 1) * 1e-9
    lines = []
    for number in ranks:
        rank = now.ranks[number]
        wait = verdict.wait_of(now, rank)
        doing = verdict.condition(now, rank)
        if doing in ("left", "failed", "ended"):
            lines.append(f"{_title(rank)} has {doing}; {verdict.last_deed(now, number)}.")
            continue
        if rank.remote and rank.presence == "here":
            lines.append(f"{_title(rank)} is on another host: ask `phalanx why` there.")
            continue
        if rank.gone or rank.presence != "here":
            lines.append(f"{_title(rank)} is {doing}.")
            continue
        if wait is not None:
            lines.append(f"{_title(rank)} waits in {verdict.numbered(now, number, wait)}.")
            continue
        used = (rank.cpu_seconds - before.ranks[number].cpu_seconds) / seconds
        if rank.state == "T":
            doing = "stopped (SIGSTOP, or Ctrl-Z)"
        lines.append(
            f"{_title(rank)} is {doing} (process state {rank.state}, {max(used, 0):.0%} of a core) "
            f"and waits for nobody; {verdict.last_deed(now, number)}."
        )
    return " ".join(lines)


def _title(rank: Rank) -> str:
    where = f" on host {rank.host}" if rank.remote else ""
    return f"Rank {rank.rank} (pid {rank.pid}{where})"


def _operations(job: Job) -> int:
    return sum(seat.collectives + seat.messages for group in job.groups for seat in group.seats)


def add_stacks(reason: Reason, job: Job) -> None:
    """Add the Python stacks of the ranks that do not wait in one of our calls."""
    here = [rank for rank in job.ranks if rank.presence == "here" and rank.state]
    free = [rank for rank in here if verdict.wait_of(job, rank) is None]
    free.sort(key=lambda rank: (rank.rank not in reason.ranks, rank.rank))
    for rank in free[:_MOST_STACKS]:
        try:
            reason.stacks[rank.rank] = stacks.stack_of(rank, job.threads)
        except stacks.NoStacks as why:
            if str(why) not in reason.no_stacks:
                reason.no_stacks.append(str(why))
    if len(free) > _MOST_STACKS:
        reason.no_stacks.append(f"{len(free) - _MOST_STACKS} more ranks do not wait either")


def _page(reason: Reason) -> str:
    lines = []
    for line in reason.text.splitlines():
        lines += [line] if line.startswith(" ") else textwrap.wrap(line, 100)
    for rank, stack in sorted(reason.stacks.items()):
        lines += ["", f"stack of rank {rank}, innermost call first:", *("  " + at for at in stack)]
    if reason.no_stacks:
        lines += ["", *reason.no_stacks]
    if reason.advice:
        lines += ["", *textwrap.wrap(reason.advice, 100)]
    return "\n".join(printable(line) for line in lines)


def shown(reason: Reason, width: int) -> RenderableType:
    """Return the same as a page for a terminal."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from phalanx.debug import looks

    head = Text.assemble(
        (f"● {reason.cause}", looks.style(reason.cause)), (f"  job {reason.job}", "dim")
    )
    parts: list[RenderableType] = [head, Text()]
    for line in reason.text.splitlines():
        # One sentence a line: each is about another rank.
        for sentence in [line] if line.startswith(" ") else re.split(r"(?<=\.) (?=[A-Z])", line):
            parts.append(looks.account(printable(sentence)))
    for rank, stack in sorted(reason.stacks.items()):
        parts += [Text(), Text(f"stack of rank {rank}, innermost call first", "bold")]
        for at in stack:
            level = len(at) - len(at.lstrip())
            parts.append(Padding(looks.account(printable(at.lstrip())), (0, 0, 0, 2 + level)))
    if reason.no_stacks:
        parts += [Text(), *(Text(printable(line), "dim") for line in reason.no_stacks)]
    if reason.advice:
        parts += [Text(), Text.assemble(("→ ", "bold green"), printable(reason.advice))]
    return Padding(Group(*parts), (0, max(width - 110, 0), 0, 0))
