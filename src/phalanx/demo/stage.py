"""Where the tour is shown: in colours on a terminal, which waits for keys; plain in a pipe."""

from __future__ import annotations

import inspect
import os
import sys
import termios
import textwrap
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import ControlType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from phalanx.debug.text import table

_WIDTH = 100


class Stage:
    """Shows headings, explanations, code and results, one below the other."""

    def __init__(self, console: Console | None, pauses: bool) -> None:
        self.console = console
        self._pauses = pauses and console is not None and sys.stdin.isatty()
        self._chapters = 0
        self._begun = False  # something stands below the heading

    def chapter(self, title: str) -> None:
        """Begin something new; before that, let the user read."""
        if self._chapters:
            self._pause()
        self._chapters += 1
        self._begun = False
        if self.console is None:
            print(f"\n{self._chapters}. {title}\n", flush=True)
        else:
            head = Text.assemble(
                (f" {self._chapters} ", "bold reverse cyan"), (f" {title} ", "bold")
            )
            self.console.print()
            self.console.print(Rule(head, style="cyan", align="left"), width=self.width)

    @property
    def width(self) -> int:
        return min(self.console.width, _WIDTH) if self.console else _WIDTH

    def say(self, text: str) -> None:
        """Explain something."""
        if self._begun:
            self.show("")
        self._begun = True
        self.show(textwrap.fill(text, self.width))

    def code(self, *functions: Callable[..., Any]) -> None:
        """Show functions as they stand in their file, with its line numbers."""
        for function in functions:
            lines, first = inspect.getsourcelines(function)
            source = "".join(lines).rstrip()
            if self.console is None:
                print(
                    "\n".join(f"{n:>6}  {line}" for n, line in enumerate(source.split("\n"), first))
                )
                continue
            shown = Syntax(
                source,
                "python",
                theme="ansi_dark",
                line_numbers=True,
                start_line=first,
                background_color="default",
                word_wrap=True,
            )
            self.console.print(Padding(shown, (1, 0)), width=self.width)

    def command(self, text: str) -> None:
        """Show what is run."""
        if self.console is None:
            print(f"\n>>> {text}", flush=True)
        else:
            self.console.print(Text.assemble((">>> ", "bold magenta"), (text, "bold")))

    def show(self, text: str | Text) -> None:
        """Show a result, or a text that is already laid out."""
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, width=self.width)

    def busy(self, text: str) -> AbstractContextManager[object]:
        """Show that something takes its time."""
        return nullcontext() if self.console is None else self.console.status(text)

    def error(self, title: str, message: str) -> None:
        """Show an error and who got it."""
        if self.console is None:
            print(f"{title}:")
            print(textwrap.indent(message, "  "), flush=True)
        else:
            body = Text(message)
            body.highlight_regex(r"\S+\.py:\d+ in \w+", "bold cyan")
            body.highlight_regex(r"\branks? \d+(?:(?:, |-)\d+)*", "bold")
            heading = Text(f" {title} ", "bold red")
            self.console.print(
                Panel(body, title=heading, title_align="left", border_style="red"), width=self.width
            )

    def table(self, heading: Sequence[str], rows: Sequence[Sequence[str]], best: int) -> None:
        """Show results side by side; the column `best` stands out."""
        if self.console is None:
            print("", *table([heading, *rows]), sep="\n", flush=True)
            return
        shown = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        for i, name in enumerate(heading):
            shown.add_column(name, justify="right", style="bold green" if i == best else "")
        for row in rows:
            shown.add_row(*row)
        self.console.print("", shown)

    def choices(self, pairs: dict[str, str]) -> None:
        """Show what can be done, and what it does."""
        if self.console is None:
            print("\n".join(table(list(pairs.items()))), flush=True)
            return
        shown = Table.grid(padding=(0, 3, 0, 0))
        for what, does in pairs.items():
            shown.add_row(Text(what, "bold green"), does)
        self.console.print(shown, "")

    def _pause(self) -> None:
        if not self._pauses or self.console is None:
            return
        with _keys(sys.stdin.fileno()) as read:
            self.console.print(Text("\n any key goes on, q ends ", "dim"), end="")
            key = read()
        erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
        self.console.control(erase)
        if key in (b"q", b"Q", b"\x1b", b"\x04", b""):
            raise Quit


class Quit(Exception):
    """Whoever watches has seen enough."""


@contextmanager
def _keys(terminal: int) -> Iterator[Callable[[], bytes]]:
    """Have a terminal give each key at once; those that were pressed before do not count."""
    settings = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield lambda: os.read(terminal, 32)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
