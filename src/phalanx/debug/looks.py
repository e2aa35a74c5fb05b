"""Colours and tables for a terminal; in a pipe, phalanx.debug.text makes plain ones."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.debug.text import printable

# What a rank or a job does, by the first words of it that match.
_STYLES = {
    "computing": "green",
    "running": "green",
    "sleeping": "cyan",
    "in the system": "cyan",
    "waiting": "yellow",
    "elsewhere": "dim",
    "starting": "blue",
    "joining": "blue",
    "stuck": "bold red",
    "deadlock": "bold red",
    "in a debugger": "magenta",
    "left": "dim",
    "ended": "dim",
    "absent": "dim",
    "idle": "cyan",
    "moving": "green",
}
_ENDINGS = {"gone": "bold red", "failed": "bold red", "stopped": "magenta"}  # "rank 2 gone"


def terminal() -> Console | None:
    """Return a console if the output is a terminal that can be written to in place, else None."""
    console = Console(highlight=False)
    # A console may be told to take a pipe for a terminal, for its colours; a pipe it is.
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None


def style(state: str) -> str:
    """Return the style in which the state of a rank or of a job is shown."""
    for ending, shown in _ENDINGS.items():
        if state.endswith(ending):
            return shown
    return next((shown for start, shown in _STYLES.items() if state.startswith(start)), "")


def plain(text: str, shown: str = "") -> Text:
    """Return another process' text as it is: nothing in it is markup or moves the cursor."""
    return Text(printable(text), shown, no_wrap=True, overflow="ellipsis")


def account(text: str) -> Text:
    """Return a text about ranks with these, their groups and their calls set off."""
    shown = Text(text)
    shown.highlight_regex(r"\b[Rr]anks? \d+(?:(?:, |-)\d+)*", "bold")
    shown.highlight_regex(r"\S+:\d+ in \S*[^\s.,;]", "cyan")
    shown.highlight_regex(r"\b[a-z_]+\([^)]*\)(?: #\d+)?", "yellow")
    shown.highlight_regex(r"group '[^']*'", "blue")
    return shown


_GAP = 2


class Column(NamedTuple):
    """A column of a table; where there is no room for all, those of low worth are left out.

    Texts are cut to `least` characters before a column goes.
    """

    heading: str
    worth: int = 0
    right: bool = False
    least: int = 22


def grid(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Lay out rows in as many of the columns as fit; long texts are cut before one goes."""
    sizes = [
        max([len(column.heading), *(cell_len(row[i].plain) for row in rows)])
        for i, column in enumerate(columns)
    ]
    needed = [min(size, column.least) + _GAP for size, column in zip(sizes, columns, strict=True)]
    kept = list(range(len(columns)))
    while len(kept) > 3 and sum(needed[i] for i in kept) > width:
        kept.remove(min(kept, key=lambda i: columns[i].worth))
    widths = {i: sizes[i] for i in kept}
    while sum(widths.values()) + _GAP * len(widths) > width and max(widths.values()) > 1:
        widths[max(kept, key=lambda i: widths[i])] -= 1
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    for i, size in widths.items():
        table.add_column(
            columns[i].heading,
            justify="right" if columns[i].right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=size,
        )
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


@contextmanager
def tidy() -> Iterator[None]:
    """Let a block end as by an exception when the process is told to end.

    What shows something live can restore the terminal then.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
