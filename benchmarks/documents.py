"""Tables in the terminal and in Markdown, and the report that every benchmark ends with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Table = tuple[str, list[str], list[list[str]]]  # title, heading, rows
Pictures = list[tuple[str, str]]  # captions and file names


class Report(NamedTuple):
    """How the numbers of one benchmark are shown and written up."""

    benchmark: str  # its module
    document: str  # the file that `compose` is for
    show: Callable[[dict], None]
    draw: Callable[[dict, Path], Pictures]
    compose: Callable[[dict, Pictures], str]

    def write(self, data: dict, directory: Path) -> None:
        """Write the document and its plots."""
        directory.mkdir(parents=True, exist_ok=True)
        pictures = self.draw(data, directory)
        (directory / self.document).write_text(self.compose(data, pictures))
        for name in [self.document, *[name for _, name in pictures]]:
            print(f"wrote {directory / name}")

    def main(self) -> None:
        """Show, or write up, the numbers of an earlier run."""
        parser = argparse.ArgumentParser(description=f"benchmarks.{self.benchmark}, once more")
        parser.add_argument("json", type=Path, help=f"what benchmarks.{self.benchmark} wrote")
        parser.add_argument("--docs", type=Path, help=f"write {self.document} and plots there")
        options = parser.parse_args()
        data = json.loads(options.json.read_text())
        if options.docs:
            self.write(data, options.docs)
        else:
            self.show(data)


def show_tables(everything: list[Table]) -> None:
    """Print tables, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        for title, heading, rows in everything:
            print(f"\n{title}\n{plain(heading, rows)}")
    else:
        console = Console()
        console.width = max(console.width, 190)
        for title, heading, rows in everything:
            table = RichTable(title=title, title_justify="left")
            for index, name in enumerate(heading):
                justify = "left" if title == "Targets" or not index else "right"
                table.add_column(name, justify=justify, no_wrap=True)
            for row in rows:
                table.add_row(*row)
            console.print(table)


def plain(heading: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in [heading, *rows]
    )


def markdown(table: Table) -> str:
    title, heading, rows = table
    rule = [":--" if title == "Targets" or not index else "--:" for index in range(len(heading))]
    lines = ["| " + " | ".join(row) + " |" for row in [heading, rule, *rows]]
    return "\n".join(lines)


def opening(title: str, module: str, data: dict) -> list[str]:
    """Return how a document begins: by which command, where, and in which time it was made."""
    machine = data["machine"]
    return [
        f"# {title}",
        f"<!-- Made by benchmarks/{module}.py; change that, not this file. -->",
        f"Made in {data['seconds'] / 60:.0f} min by\n\n    {data['command']}\n\n"
        f"on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; Python {machine['python']}, torch {machine['torch']}, NumPy "
        f"{machine['numpy']}; load {machine['load_before']} before the run.",
    ]


def ending(tables: list[Table], missing: list[str], level: int = 2) -> list[str]:
    """Return how a document ends: every table, and a line per thing that could not be measured."""
    parts = [f"{'#' * level} {table[0]}\n\n{markdown(table)}" for table in tables]
    if missing:
        parts.append("## Not available\n\n" + "\n".join(f"- {line}" for line in missing))
    return parts
