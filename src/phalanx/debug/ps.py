"""List the jobs of this user on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace

from phalanx.debug import outside, verdict
from phalanx.debug.text import duration, table

EXAMPLES = [
    ("phalanx ps", "one line for each job"),
    ("phalanx ps --json", "the same, for programs"),
]


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")


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
    rows = [["JOB", "RANKS", "KIND", "PIDS", "AGE", "STATE", "COMMAND"]]
    for job in view.jobs:
        pids = [str(pid) for pid in job.pids]
        shown = pids if len(pids) <= 4 else [*pids[:2], "...", pids[-1]]
        rows.append(
            [
                job.name,
                str(len(job.ranks)),
                "threads" if job.threads else "processes",
                " ".join(shown),
                duration(job.age),
                verdict.summary(job),
                job.command,
            ]
        )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(table(rows, width)))
    return 0


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
