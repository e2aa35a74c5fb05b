"""The table of ``phalanx bench``: a line as soon as a size is measured.

On a terminal it has colours, and a last line says what is being measured. That line is drawn
between measurements only: nothing runs beside the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phalanx.bench.measurement import Result
from phalanx.bench.peers import Peer
from phalanx.bench.plan import Section
from phalanx.bench.results import readable_bytes, readable_ratio, readable_seconds

ENOUGH_FOR_P99 = 100  # calls, of which one is slower


class Output(Console):
    """A console that leaves it to the command line how to end when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Column(NamedTuple):
    """A column: its heading, how wide it is, and the text and style of a row's cell in it."""

    heading: str
    width: int
    text: Callable[[dict[str, Result]], str]
    style: Callable[[dict[str, Result]], str] = lambda row: ""


def columns(ours: Peer, others: list[Peer]) -> list[Column]:
    """Return the columns of a table in which `ours` is compared with others."""

    def of_ours(field: str, write: Callable[[Any], str]) -> Callable[[dict[str, Result]], str]:
        def text(row: dict[str, Result]) -> str:
            value = row[ours.name].get(field)
            return "-" if value is None else write(value)

        return text

    def median(peer: Peer) -> Callable[[dict[str, Result]], str]:
        def text(row: dict[str, Result]) -> str:
            if peer.name not in row:
                return "-"
            result = row[peer.name]
            return "failed" if result["error"] else readable_seconds(result["p50"])

        return text

    def p99(row: dict[str, Result]) -> str:
        result = row[ours.name]
        meaningful = result.get("calls", 0) >= ENOUGH_FOR_P99
        return readable_seconds(result["p99"]) if meaningful else "-"

    def ratio(peer: Peer) -> Callable[[dict[str, Result]], str]:
        return lambda row: readable_ratio(row.get(peer.name, {}).get("ratio"))

    def colour(peer: Peer) -> Callable[[dict[str, Result]], str]:
        def style(row: dict[str, Result]) -> str:
            value = row.get(peer.name, {}).get("ratio")
            return "" if value is None else "green" if value >= 1 else "red"

        return style

    found = [
        Column("size", 9, of_ours("bytes", lambda count: readable_bytes(count) if count else "-")),
        Column("count", 11, of_ours("count", lambda count: str(count) if count else "-")),
        Column("median", 10, median(ours), lambda row: "bold"),
        Column("min", 10, of_ours("min", readable_seconds)),
        Column("p99", 10, p99),
        Column("algbw", 8, of_ours("algbw", lambda rate: f"{rate:.2f}")),
        Column("busbw", 8, of_ours("busbw", lambda rate: f"{rate:.2f}"), lambda row: "bold"),
    ]
    for peer in others:
        found += [
            Column(peer.title, max(10, len(peer.title) + 2), median(peer)),
            Column("ratio", 8, ratio(peer), colour(peer)),
        ]
    return found


class Display:
    """Where a run is shown, line by line."""

    def __init__(self, console: Console, table: list[Column], kind: str, num_rows: int) -> None:
        self.console, self.table, self.kind, self.num_rows = console, table, kind, num_rows
        self.shown = 0
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update("")
            self._live.stop()

    def begin(self, section: Section) -> None:
        """Start a table."""
        self.say("")
        self.say(section.title(self.kind), "bold cyan")
        heading = "".join(f"{column.heading:>{column.width}}" for column in self.table)
        self._show(Text(heading, "dim"), soft_wrap=True)

    def tell(self, num_bytes: int, what: str) -> None:
        """Say on a terminal what is being measured."""
        if self._live:
            size = f"{readable_bytes(num_bytes)}: " if num_bytes else ""
            number = f"[{self.shown + 1}/{self.num_rows}]"
            self._live.update(Text(f"{number} {size}{what}", "dim"), refresh=True)

    def add(self, row: dict[str, Result]) -> None:
        """Show what was measured at one size, by peer."""
        self.shown += 1
        line = Text()
        for column in self.table:
            line.append(f"{column.text(row):>{column.width}}", column.style(row))
        self._show(line, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """Show a text; a terminal that is narrow breaks it between words, a pipe not at all."""
        self._show(Text(text, style), soft_wrap=not self.console.is_terminal)

    def _show(self, text: Text, soft_wrap: bool) -> None:
        self.console.print(text, soft_wrap=soft_wrap)
        self.console.file.flush()
