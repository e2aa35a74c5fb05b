"""Watch what every rank of a job does, and who is the straggler.

On a terminal the table is live, and `?` shows the keys. In a pipe it is printed at each look.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from phalanx.debug import outside, verdict
from phalanx.debug.outside import Job, Seat
from phalanx.debug.text import amount, duration, printable, table

if TYPE_CHECKING:
    from rich.console import Console

HEADING = ["RANK", "PID", "STATE", "FOR", "GROUP", "OPERATION", "SEQ", "WAITS FOR"]
HEADING += ["OP/S", "BYTES/S", "CALL SITE"]


EXAMPLES = [
    ("phalanx top", "the only job of this machine, once a second"),
    ("phalanx top 4711 --once", "the job of process 4711, once"),
    ("phalanx top --sort wait --show waiting", "who waits, and longest"),
    ("phalanx top --json --interval 5", "one JSON object every five seconds"),
]


def configure(parser: ArgumentParser) -> None:
    outside.add_job_argument(parser)
    parser.add_argument("--once", action="store_true", help="print the table once")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between looks (1)")
    parser.add_argument("--sort", choices=SORTS, default="rank", help="what comes first (rank)")
    parser.add_argument("--show", choices=FILTERS, default="all", help="which ranks (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per look")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise ArgumentTypeError(f"an interval is between 0.05 and 3600 seconds, got {text!r}")
    return seconds


def run(arguments: Namespace) -> int:
    from phalanx.debug import looks

    console = None if arguments.json else looks.terminal()
    if console is not None and not arguments.once:
        return _live(console, arguments)
    job = outside.find(arguments.job)
    try:
        for before, now in _looks(job, min(arguments.interval, 0.5), arguments):
            found = arranged(rows(before, now), arguments.sort, arguments.show)
            if arguments.json:
                print(json.dumps(describe(now, found)), flush=True)
            elif console is not None:
                from phalanx.debug.live import summary

                console.print(summary(now, found, console.width))
            else:
                print("\n".join(lines(now, found)), flush=True)
    except KeyboardInterrupt:
        return 0
    if not arguments.once:
        print(f"job {job.name} has ended", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _live(console: Console, arguments: Namespace) -> int:
    """Watch a job on a terminal; where several are meant, the user chooses one."""
    from phalanx.debug.choice import choose
    from phalanx.debug.live import watch

    jobs = outside.look().jobs if arguments.job is None else []
    job = (
        choose(console, jobs, arguments.interval)
        if len(jobs) > 1 and sys.stdin.isatty()
        else outside.find(arguments.job)
    )
    if job is None:
        return 0
    return watch(console, job, arguments.interval, arguments.sort, arguments.show)


def _looks(job: Job, first: float, arguments: Namespace) -> Iterator[tuple[Job, Job]]:
    """Yield pairs of looks, the first soon, until the job ends."""
    pause = first
    while True:
        time.sleep(pause)
        again = outside.look_again(job)
        if again is None:
            if arguments.once:
                raise outside.JobNotFound(f"job {job.name} has ended meanwhile")
            return
        yield job, again
        if arguments.once:
            return
        job, pause = again, arguments.interval


@dataclass(frozen=True)
class Row:
    """What is said of one rank."""

    rank: int
    pid: int
    group: str
    operation: str
    sequence: int | None
    state: str
    seconds: float | None  # since it waits, or since its last operation
    waits_for: list[int]
    operations_per_second: float
    bytes_per_second: float
    site: str


SORTS: dict[str, Callable[[Row], tuple[float, int]]] = {
    "rank": lambda row: (0, row.rank),
    "wait": lambda row: (-(row.seconds or 0) if row.state == "waiting" else 1, row.rank),
    "ops": lambda row: (-row.operations_per_second, row.rank),
    "bytes": lambda row: (-row.bytes_per_second, row.rank),
}
FILTERS: dict[str, Callable[[Row], bool]] = {
    "all": lambda row: True,
    "waiting": lambda row: row.state == "waiting",
    "others": lambda row: row.state != "waiting",
}


def arranged(found: list[Row], sort: str, show: str) -> list[Row]:
    """Return the rows that are to be shown, in their order."""
    return sorted(filter(FILTERS[show], found), key=SORTS[sort])


def rows(before: Job, now: Job) -> list[Row]:
    """Return what every rank does now, with rates since the look before."""
    return [_row(rank, before, now) for rank in now.ranks]


def _row(rank: outside.Rank, before: Job, now: Job) -> Row:
    group = operation = site = ""
    sequence: int | None = None
    since: int | None = None
    wait = verdict.wait_of(now, rank)
    last = now.last_operation(rank.rank)
    if wait:
        group, operation, site, since = wait.group, wait.what, wait.site, wait.started_ns
        posted = verdict.operation_of(now, rank.rank, wait)
        sequence = posted.sequence if posted else None
    elif last:
        group, operation, site = last[0].name, last[1].text, last[1].site
        sequence, since = last[1].sequence, last[1].finished_ns or last[1].posted_ns
    operations, volume = _rates(rank.rank, before, now)
    return Row(
        rank=rank.rank,
        pid=rank.pid,
        group=group,
        operation=operation,
        sequence=sequence,
        state=verdict.condition(now, rank),
        seconds=None if since is None else verdict.seconds_since(now, since),
        waits_for=wait.needs if wait else [],
        operations_per_second=operations,
        bytes_per_second=volume,
        site=site,
    )


def _rates(rank: int, before: Job, now: Job) -> tuple[float, float]:
    """Return operations and bytes per second of a rank, in all its groups."""
    seconds = max(now.seen_ns - before.seen_ns, 1) * 1e-9
    earlier = {(group.name, tuple(group.members)): group for group in before.groups}
    operations = volume = 0.0
    for group in now.groups:
        seat = group.seat(rank)
        if seat is None:
            continue
        known = earlier.get((group.name, tuple(group.members)))
        past: Seat | None = known.seat(rank) if known else None
        for new, sizes in (
            (seat.collectives - (past.collectives if past else 0), seat.collective_bytes),
            (seat.messages - (past.messages if past else 0), seat.message_bytes),
        ):
            recent = sizes[-new:] if new > 0 else []
            operations += max(new, 0)
            # Only so many are remembered: the others were of the same kind, most likely.
            volume += sum(recent) * (new / len(recent)) if recent else 0
    return operations / seconds, volume / seconds


def straggler(job: Job) -> str:
    """Name the rank that most others wait for, and what it does."""
    if job.deadlock:
        return "deadlock: " + job.deadlock.splitlines()[0]
    found = verdict.culprits(job)
    if not found:
        return "no rank waits for another"
    rank = job.ranks[found[0].rank]
    verb = "waits" if len(found[0].waiting) == 1 else "wait"
    return (
        f"straggler: rank {rank.rank} ({verdict.condition(job, rank)}), for which "
        f"{verdict.rank_list(found[0].waiting)} {verb}; {verdict.last_deed(job, rank.rank)}"
    )


def describe(job: Job, found: list[Row]) -> dict[str, object]:
    """Return the table as plain values."""
    first = next(iter(verdict.culprits(job)), None)
    return {
        "job": job.name,
        "state": verdict.summary(job),
        "age": round(job.age, 3),
        "straggler": first.rank if first else None,
        "ranks": [asdict(row) for row in found],
    }


def cells(row: Row) -> list[str]:
    """Return the row as it is shown, one text for each of the columns."""
    return [
        str(row.rank),
        str(row.pid),
        row.state,
        "" if row.seconds is None else duration(row.seconds),
        row.group,
        row.operation,
        "" if row.sequence is None else f"#{row.sequence}",
        verdict.rank_list(row.waits_for) if row.waits_for else "",
        amount(row.operations_per_second),
        amount(row.bytes_per_second, "B"),
        row.site,
    ]


def census(job: Job) -> str:
    """Count the ranks by what they do: "3 waiting, 1 sleeping"."""
    counts = Counter(verdict.condition(job, rank) for rank in job.ranks)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def title(job: Job) -> str:
    """Say which job it is: "job 9d09294c: 4 processes, 16 s old"."""
    kind = "thread" if job.threads else "process"
    plural = "" if len(job.ranks) == 1 else "s" if job.threads else "es"
    return f"job {job.name}: {len(job.ranks)} {kind}{plural}, {duration(job.age)} old"


def lines(job: Job, found: list[Row], width: int | None = None) -> list[str]:
    """Return the table as text, with a line above about the job and one below on the straggler."""
    head = f"{title(job)}, {verdict.summary(job)} ({census(job)})"
    shown = table([HEADING, *map(cells, found)])
    text = [head, *shown, printable(straggler(job))]
    return [line[:width] for line in text]
