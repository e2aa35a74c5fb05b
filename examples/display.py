"""What the examples show: a live loss curve in the terminal, its picture, a confusion matrix."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import Tensor

WIDTH = 88


@dataclass
class Curves:
    """The losses of a run of some steps: one of each, and now and then one on held-out data."""

    steps: int
    training: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training, self.validation = state["training"], state["validation"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, steps = options.max_width - 7, max(self.steps, len(self.training))
        training = means(self.training, -(-steps // width))
        validation = list(self.validation.items())
        losses = [loss for _, loss in training + validation] or [0.0]
        plot = Plot(width, 12, steps, min(losses), max(losses))
        plot.draw(training, "cyan")
        plot.mark(validation, "yellow")
        yield from plot.lines()

    def save(self, path: Path, title: str) -> None:
        """Draw the curves into a PNG file."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        steps = range(1, len(self.training) + 1)
        axes.plot(steps, self.training, color="tab:cyan", alpha=0.25, linewidth=0.8)
        axes.plot(
            *zip(*means(self.training, -(-len(steps) // 80)), strict=True),
            color="tab:cyan",
            label="training",
        )
        validation = list(self.validation.values())
        axes.plot(list(self.validation), validation, ".-", color="tab:orange", label="validation")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")
        pyplot.close(figure)


def means(losses: Sequence[float], size: int) -> list[tuple[float, float]]:
    """Average `size` neighbouring losses at a time; return the middle step and the mean of each."""
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [(i * size + (len(part) + 1) / 2, sum(part) / len(part)) for i, part in enumerate(parts)]


class Plot:
    """A line plot in Unicode's braille characters, each of which is two dots wide and four high."""

    DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, from the top
    EMPTY = 0x2800

    def __init__(self, width: int, height: int, steps: int, low: float, high: float) -> None:
        self.width, self.height = width, height
        self.steps, self.low, self.high = steps, low, high
        self.cells = [[(" ", "")] * width for _ in range(height)]  # characters and their colours

    def draw(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        """Draw a line through points, each a step and a loss."""
        last: tuple[int, int] | None = None
        for point in points:
            x, y = self._place(*point)
            x0, y0 = last or (x, y)
            count = max(abs(x - x0), abs(y - y0), 1)
            for i in range(count + 1):
                row, dot = divmod(y0 + (y - y0) * i // count, 4)
                column, side = divmod(x0 + (x - x0) * i // count, 2)
                dots = max(ord(self.cells[row][column][0]), self.EMPTY) | self.DOTS[side][dot]
                self.cells[row][column] = chr(dots), colour
            last = x, y

    def mark(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        """Put a bullet at each of the points."""
        for point in points:
            x, y = self._place(*point)
            self.cells[y // 4][x // 2] = "•", colour

    def _place(self, step: float, loss: float) -> tuple[int, int]:
        """Return the column and row of a point, in dots."""
        x = (step - 1) / max(self.steps - 1, 1) * (2 * self.width - 1)
        y = (self.high - loss) / (self.high - self.low or 1) * (4 * self.height - 1)
        return round(x), round(y)

    def lines(self) -> Iterator[Text]:
        """Yield the lines of the plot, with axes."""
        for row in range(self.height):
            line = Text()
            if row % 4 and row < self.height - 1:
                line.append("      │", "dim")
            else:
                loss = self.high - (self.high - self.low) * row / (self.height - 1)
                line.append(f"{loss:5.2f} ┤", "dim")
            yield line.append_tokens(self.cells[row])
        yield Text("      └" + "─" * self.width, "dim")
        yield Text(f"{'':7}1{self.steps:>{self.width - 1}}", "dim")


class Dashboard(Live):
    """A live view of a run, its progress and its speed; plain lines, if not in a terminal."""

    def __init__(self, curves: Curves, tokens_per_step: int, console: Console) -> None:
        self.curves, self.tokens_per_step = curves, tokens_per_step
        self.first, self.began = len(curves.training), time.perf_counter()
        self.progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", "cyan"),
            TextColumn("{task.fields[validation]}", "yellow"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task("", total=curves.steps, **self._fields())
        self.progress.update(self.task, completed=self.first)
        # A quiet console draws all the same, only to throw it away.
        live = console.is_terminal and not console.quiet
        view = Constrain(Group(curves, self.progress), WIDTH)
        super().__init__(view, console=console, auto_refresh=live)

    def advance(self) -> None:
        """Show what has been added to the curves."""
        step, fields = len(self.curves.training), self._fields()
        self.progress.update(self.task, completed=step, **fields)
        if step in self.curves.validation and not self.console.is_terminal:
            self.console.print(f"step {step:<5}", *fields.values(), sep="  ")

    def _fields(self) -> dict[str, str]:
        latest, validation = self.curves.training[-20:], list(self.curves.validation.values())
        tokens = (len(self.curves.training) - self.first) * self.tokens_per_step
        return {
            "loss": f"loss {sum(latest) / len(latest):.3f}" if latest else "",
            "validation": f"validation {validation[-1]:.3f}" if validation else "",
            "speed": f"{tokens / (time.perf_counter() - self.began):,.0f} tokens/s",
        }

    def stop(self) -> None:
        """Leave what is shown where it is."""
        super().stop()
        if not self.console.is_terminal:
            self.console.line()


def code(text: str, title: str) -> Panel:
    """Show Python code."""
    lines = Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Panel(lines, title=title, width=WIDTH)


def confusion_table(confusion: Tensor) -> Table:
    """Show how often each class, a row, was taken for which, a column."""
    table = Table(box=None, padding=0, title="digit (row) taken for (column)", title_style="")
    table.add_column("", style="bold")
    for name in range(len(confusion)):
        table.add_column(f"{name} ", style="", header_style="bold", justify="right", width=4)
    for row, counts in enumerate(confusion.tolist()):
        cells = [Text("· ", "dim")] * len(counts)
        for column, count in enumerate(counts):
            if count:
                style = "black on green" if row == column else "bold white on red"
                cells[column] = Text(f"{count:3} ", style)
        table.add_row(f"{row}", *cells)
    return table


def picture(image: Tensor, title: str) -> Panel:
    """Draw a small image of values from 0 to 1 in shades of grey."""
    rows = ("".join(" ░▒▓█"[round(4 * value)] * 2 for value in row) for row in image.tolist())
    return Panel("\n".join(rows), title=title, expand=False, padding=0)
