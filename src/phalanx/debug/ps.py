"""List the jobs of this user on this machine."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from phalanx.debug import outside, verdict
from phalanx.debug.text import duration, table

if TYPE_CHECKING:
    from rich.table import Table

# With what is left out last where there is no room.
_COLUMNS = {
    "JOB": 9,
    "RANKS": 5,
    "KIND": 1,
    "PIDS": 0,
    "AGE": 4,
    "STATE": 8,
    "COMMAND": 3,
}

_LEAST = 30  # characters of the command are worth more than other columns

EXAMPLES = [
    ("phalanx ps", "one line for each job"),
    ("phalanx ps --json", "the same, for programs"),
]


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--once", action="store_true", help="look once and end, as it always does")


def run(arguments: Namespace) -> int:
    view = outside.look()
    for note in view.strange:
        print(f"phalanx: {note}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([describe(job) for job in view.jobs], indent=2))
        return 0
    if not view.jobs:
        print("no jobs of this user on this machine")
        return 0
    from phalanx.debug import looks

    console = looks.terminal()
    if console is None:
        print("\n".join(table([list(_COLUMNS), *map(_cells, view.jobs)])))
    else:
        console.print(shown(view.jobs, console.width))
    return 0


def shown(jobs: list[outside.Job], width: int, selected: str | None = None) -> Table:
    """Return jobs as a table for a terminal; the one whose id is `selected` stands out."""
    from phalanx.debug import looks

    columns = [looks.Column(name, worth, least=_LEAST) for name, worth in _COLUMNS.items()]
    rows = [[looks.plain(cell) for cell in _cells(job)] for job in jobs]
    for job, (name, _, kind, pids, _, state, _) in zip(jobs, rows, strict=True):
        if job.id == selected:  # one even bar
            continue
        name.stylize("bold")
        kind.stylize("dim")
        pids.stylize("dim")
        state.stylize(looks.style(state.plain))
    found = looks.grid(columns, rows, width)
    for job, row in zip(jobs, found.rows, strict=True):
        row.style = "reverse" if job.id == selected else None
    return found


def _cells(job: outside.Job) -> list[str]:
    pids = [str(pid) for pid in job.pids]
    return [
        job.name,
        str(len(job.ranks)),
        "threads" if job.threads else "processes",
        " ".join(pids if len(pids) <= 4 else [*pids[:2], "...", pids[-1]]),
        duration(job.age),
        verdict.summary(job),
        job.short_command,
    ]


def describe(job: outside.Job) -> dict[str, object]:
    """Return what there is to say of a job as plain values."""
    return {
        "job": job.name,
        "ranks": len(job.ranks),
        "kind": "threads" if job.threads else "processes",
        "pids": job.pids,
        "host": job.ranks[0].host,
        "age": round(job.age, 3),
        "state": verdict.summary(job),
        "command": job.command,
    }
