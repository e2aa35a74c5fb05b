"""Plain text for a terminal: tables, durations, sizes."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Replace what would move the cursor or change colours: the text is another process'."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lay out rows in columns as wide as their widest text; lines are cut at `width`."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return [line[:width] for line in lines]


def duration(seconds: float) -> str:
    """Say how long: "0.3 s", "12 s", "3 min", "5 h", "2 d"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / (60 if unit == 'min' else size):.0f} {unit}"
    return f"{seconds:.0f} s"


def amount(value: float, unit: str = "") -> str:
    """Say how much: "950", "1.2 k", "3.4 GB"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
