"""How cost grows with bytes, drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.bench.results import Group, Results, readable_bytes, readable_ratio, readable_seconds
from phalanx.extras import need

COLOURS = {
    "phalanx": "#c0392b",
    "phalanx-shared": "#e59866",
    "phalanx-threads": "#c0392b",
    "phalanx-shared-threads": "#e59866",
    "gloo": "#2471a3",
    "openmpi": "#1e8449",
    "mpich": "#7dcea0",
    "threadedpg": "#7d3c98",
    "bare": "#7f8c8d",
}
GREY = "#606060"
MOST_TICKS = 5

Value = Callable[[int, float], float]  # of bytes and seconds


class Section(NamedTuple):
    """A part of a run that is drawn in panels of its own: what the ranks did under a title."""

    title: str
    results: Results
    group: Group
    moves: float  # bytes on the bus for each byte of the size
    ours: str
    other: str | None  # what ratios are given against


def draw(path: Path, sections: Sequence[Section], caption: str) -> None:
    """Draw time and bus bandwidth over bytes, or bars where there is one size, into a file."""
    grown = [one for one in sections if len(one.results.sizes(*one.group)) > 1]
    single = [one for one in sections if one not in grown]
    columns = min(4, max(len(grown), len(single), 1))
    blocks = [grown[start : start + columns] for start in range(0, len(grown), columns)]
    bars = [single[start : start + columns] for start in range(0, len(single), columns)]
    figure, axes = grid(columns * (2 * len(blocks) + len(bars)), columns, panel=(4.3, 3.1))
    rows = iter([axes[start : start + columns] for start in range(0, len(axes), columns)])
    for block in blocks:
        for paint in (_draw_time, _draw_bandwidth):
            _fill(next(rows), block, paint)
    for block in bars:
        _fill(next(rows), block, _draw_bars)
    figure.suptitle(caption, fontsize=9, color=GREY)
    finish(figure, axes, None)
    figure.savefig(path, dpi=130)


def _fill(row: list[Any], block: list[Section], paint: Callable[[Any, Section], None]) -> None:
    for axis, section in zip(row, block, strict=False):
        paint(axis, section)
    for axis in row[len(block) :]:
        axis.set_visible(False)


def _draw_time(axis: Any, section: Section) -> None:
    over_bytes(axis, section.results, section.group, lambda num_bytes, seconds: seconds * 1e6)
    axis.set_ylabel("median time (µs)", fontsize=8)
    axis.set_title(section.title, fontsize=10, pad=20 if section.other else 6)
    if section.other:
        _write_ratios(axis, section, section.other)


def _draw_bandwidth(axis: Any, section: Section) -> None:
    def bandwidth(num_bytes: int, seconds: float) -> float:
        return num_bytes * section.moves / seconds / 1e9

    over_bytes(axis, section.results, section.group, bandwidth)
    axis.set_ylabel("bus bandwidth (GB/s)", fontsize=8)


def _draw_bars(axis: Any, section: Section) -> None:
    """Draw a bar for each implementation, where there is nothing to grow with."""
    results, group = section.results, section.group
    (num_bytes,) = results.sizes(*group)
    for peer in reversed(results.peers_of(*group)):
        seconds = results.p50(*group, num_bytes, peer)
        if seconds is not None:
            title = results.title(peer)
            bars = axis.barh([title], [seconds * 1e6], color=COLOURS.get(peer), height=0.6)
            axis.bar_label(bars, [readable_seconds(seconds)], padding=3, fontsize=8)
    axis.margins(x=0.25)
    axis.set_xlabel("median time (µs)", fontsize=8)
    axis.set_title(section.title, fontsize=10)


def _write_ratios(axis: Any, section: Section, other: str) -> None:
    """Write above the panel how many times faster ours is."""
    results, group = section.results, section.group
    above = axis.get_xaxis_transform()
    axis.annotate(
        f"faster than {results.title(other)}",
        (0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 12),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
    )
    for num_bytes in _ticks(results.sizes(*group)):
        ratio = results.ratio(*group, num_bytes, section.ours, other)
        if ratio is not None:
            axis.annotate(
                readable_ratio(ratio),
                (num_bytes, 1.0),
                xycoords=above,
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=COLOURS[section.ours] if ratio >= 1 else GREY,
            )


def over_bytes(axis: Any, results: Results, group: Group, value: Value) -> None:
    """Draw a line per implementation over the sizes of a group."""
    sizes = results.sizes(*group)
    for peer in results.peers_of(*group):
        points = [
            (float(num_bytes), value(num_bytes, seconds))
            for num_bytes in sizes
            if (seconds := results.p50(*group, num_bytes, peer)) is not None
        ]
        line(axis, results, peer, points)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = _ticks(sizes)
    axis.set_xticks(ticks, [readable_bytes(size) for size in ticks], fontsize=7)
    axis.minorticks_off()


def _ticks(sizes: list[int]) -> list[int]:
    return sizes[:: max(1, math.ceil(len(sizes) / MOST_TICKS))]


def grid(
    num_panels: int, most_columns: int = 5, panel: tuple[float, float] = (3.1, 2.6)
) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, row by row."""
    figures = need("matplotlib.figure", "bench", "a plot")
    columns = min(most_columns, num_panels)
    rows = math.ceil(num_panels / columns)
    width, height = panel
    figure = figures.Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[num_panels:]:
        unused.set_visible(False)
    return figure, axes


def line(axis: Any, results: Results, peer: str, points: list[tuple[float, float]]) -> None:
    """Draw the line of one implementation."""
    if points:
        axis.plot(
            *zip(*points, strict=True),
            marker=".",
            linewidth=1.5,
            color=COLOURS.get(peer),
            label=results.title(peer),
        )


def finish(figure: Any, axes: list[Any], label: str | None) -> Any:
    """Give a figure what all panels share: a grid, the legend, and the label of the time axis."""
    named: dict[str, Any] = {}
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        lines, names = axis.get_legend_handles_labels()
        named.update(zip(names, lines, strict=True))
    if label:
        figure.supylabel(label, fontsize=9)
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))
    return figure
