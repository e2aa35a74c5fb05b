"""Draw a timeline of a job that was recorded.

A job records what every rank does if it is run with `phalanx run --trace DIR`, or with
PHALANX_TRACE=DIR in its environment. This command writes DIR/trace.html, a page that needs
no network, and DIR/trace.json for https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from glob import escape as glob_escape
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.commands import CommandError

if TYPE_CHECKING:
    from phalanx.trace.files import Source

EXAMPLES = [
    ("phalanx run -n 4 --trace out/ train.py", "record a job"),
    ("phalanx trace out/ --open", "draw it and open it in a browser"),
    ("phalanx trace out/ -o report/", "write the two files elsewhere"),
    ("phalanx trace out/ --run 1", "the first of several jobs that were recorded there"),
    ("phalanx trace out/ --json | jq .ranks", "only the summary, for programs"),
]


def configure(parser: ArgumentParser) -> None:
    """Describe the arguments."""
    told = "where the job was recorded"
    directory = parser.add_argument("directory", type=Path, metavar="DIR", help=told)
    directory.completer = _directories  # type: ignore[attr-defined]
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="where trace.html and trace.json go (default: beside the records)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--json", action="store_true", help="print the summary as JSON and write no files"
    )
    runs = parser.add_mutually_exclusive_group()
    told = "which run to show if several have been recorded here: 1 is the oldest (the newest)"
    runs.add_argument("--run", type=int, metavar="N", dest="number", help=told)
    told = "show all of them on one timeline; each rank is one lane"
    runs.add_argument("--all", action="store_true", help=told)


def _directories(prefix: str, **_: object) -> list[str]:
    """Let a shell complete directories only."""
    return glob(glob_escape(prefix) + "*/")


def run(arguments: Namespace) -> int:
    """Read, join, write, and say what was found."""
    from phalanx.trace import files, joins, summary

    sources, problems = _sources(arguments.directory)
    if not arguments.all:
        sources = _one_run(sources, arguments.number, problems)
    problems += _missing(sources)
    trace = files.assemble(sources, problems)
    if not trace.operations.size and not trace.ranges.size:
        raise CommandError(
            f"nothing was recorded in {arguments.directory}: its ranks "
            f"({len(sources)} files) have ended before their first operation"
        )
    joined = joins.join(trace)
    facts = summary.summarize(trace, joined)
    if arguments.json:
        for part in ("slowest", "stragglers", "unmet"):
            for entry in facts[part]:
                del entry["index"]
        print(json.dumps(facts, indent=2))
        return 0
    page = _write(arguments, trace, joined, facts)
    _report(facts)
    print(f"\n{page}\n{page.with_suffix('.json')}")
    if arguments.open:
        _open(page)
    return 0


def _sources(directory: Path) -> tuple[list[Source], list[str]]:
    from phalanx.trace import files

    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory: name the one given to --trace")
    sources, problems = files.read_all(directory)
    if not sources:
        if problems:
            raise CommandError(f"nothing in {directory} can be read:\n  " + "\n  ".join(problems))
        raise CommandError(
            f"{directory} has no records (files named rank*{files.SUFFIX}): run the job with "
            f"phalanx run --trace {directory}"
        )
    return sources, problems


def _one_run(sources: list[Source], number: int | None, problems: list[str]) -> list[Source]:
    """Choose one of the runs that have nothing in common, and say which others there are."""
    from phalanx.trace import files

    runs = files.runs(sources)
    several = [f"{i}: {files.describe_run(each)}" for i, each in enumerate(runs, 1)]
    chosen = len(runs) if number is None else number
    if not 1 <= chosen <= len(runs):
        raise CommandError(
            f"there is no run {chosen}, these are recorded:\n  " + "\n  ".join(several)
        )
    if len(runs) > 1:
        shown = [*several[:3], f"... {several[-1]}"] if len(several) > 4 else several
        problems.append(
            f"{len(runs)} runs that have no world in common have been recorded here "
            f"({'; '.join(shown)}); this is number {chosen} (--run N shows another, --all all)"
        )
    return runs[chosen - 1]


def _missing(sources: Sequence[Source]) -> list[str]:
    """Say which ranks have left no record."""
    from phalanx import _native

    worlds: dict[int, set[int]] = {}
    for source in sources:
        worlds.setdefault(source.world, set(range(source.size))).discard(source.rank)
    return [f"no record of {_native.rank_list(sorted(gone))}" for gone in worlds.values() if gone]


def _write(arguments: Namespace, trace: Any, joined: Any, facts: dict[str, Any]) -> Path:
    from phalanx.trace import chrome, layout, page

    output: Path = arguments.output or arguments.directory
    target = (output / "trace.html").absolute()
    placed = layout.lay_out(trace, joined)
    title = arguments.directory.resolve().name
    try:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(target, "w", opener=_private) as file:
            file.write(page.build(trace, joined, placed, facts, title))
        with open(target.with_suffix(".json"), "w", opener=_private) as file:
            chrome.write(file, trace, joined, placed)
    except OSError as error:
        raise CommandError(f"cannot write into {output}: {error.strerror or error}") from error
    return target


def _private(path: str, flags: int) -> int:
    """Open a file that, if it is made, only this user can read: as the records themselves."""
    return os.open(path, flags, 0o600)


def _report(facts: dict[str, Any]) -> None:
    """Print the summary for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from phalanx.debug.text import amount, printable
    from phalanx.trace.words import count, moment

    console = Console(highlight=False)
    for problem in facts["problems"]:
        print(f"phalanx: note: {problem}", file=sys.stderr)
    unfinished = f", {facts['unfinished']} of them unfinished" if facts["unfinished"] else ""
    console.print(
        f"{count(facts['operations'], 'operation')} of {count(len(facts['ranks']), 'rank')} in "
        f"{moment(facts['seconds'])}{unfinished}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles = ("rank", "lost waiting", "share", "transfer", "came last", "kept others", "bytes")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for rank in facts["ranks"]:
        table.add_row(
            str(rank["rank"]),
            moment(rank["lost_seconds"]),
            f"{rank['lost_seconds'] / (facts['seconds'] or 1):.1%}",
            moment(rank["transfer_seconds"]),
            f"{rank['came_last']:,}x",
            moment(rank["kept_others_seconds"]),
            amount(rank["bytes"], "B"),
        )
    console.print(table)
    for entry in facts["stragglers"][:3]:
        console.print(
            f"[bold]{moment(entry['waited_seconds'])}[/] waited for rank {entry['rank']}"
            f"{' and others' if entry['rank_share'] < 1 else ''} at "
            f"[bold]{escape(printable(entry['site']))}[/] ({entry['op']})",
            soft_wrap=True,
        )
    for entry in facts["unmet"][:3]:
        console.print(
            f"[bold]{_absent(entry['absent'])}[/] never came to {entry['op']} "
            f"#{entry['sequence']} on {escape(printable(entry['group']))} at "
            f"[bold]{escape(printable(entry['site']))}[/], where others waited "
            f"{moment(entry['waited_seconds'])}",
            soft_wrap=True,
        )


def _absent(ranks: list[int]) -> str:
    from phalanx import _native

    return _native.rank_list(ranks) if ranks else "a rank without a record"


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        raise CommandError(f"no browser was found here: open {page} in one")
