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
MOST_TICKS = 6
MOST_COLUMNS = 4
PANEL_HEIGHT, BAR_HEIGHT = 2.9, 1.7  # inches

Value = Callable[[int, float], float]  # of bytes and seconds


class Section(NamedTuple):
    """A part of a run that is drawn in panels of its own: what the ranks did under a title."""

    title: str
    results: Results
    group: Group
    moves: float  # bytes on the bus for each byte of the size
    ours: str
    other: str | None  # what ratios are given against


Paint = Callable[[Any, Section], None]


def draw(path: Path, sections: Sequence[Section], caption: str) -> None:
    """Draw time and bus bandwidth over bytes, or bars where there is one size, into a file."""
    figures = need("matplotlib.figure", "bench", "a plot")
    rows = _rows(sections)
    columns = max(map(len, rows))
    heights = [BAR_HEIGHT if row[0][0] is _draw_bars else PANEL_HEIGHT for row in rows]
    figure = figures.Figure(figsize=(4.6 * columns, sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for row, panels in zip(axes, rows, strict=True):
        for axis, (paint, section) in zip(row, panels, strict=False):
            paint(axis, section)
        for unused in row[len(panels) :]:
            unused.set_visible(False)
    figure.suptitle(caption, fontsize=8, color=GREY)
    finish(figure, list(axes.flat), None)
    figure.savefig(path, dpi=130)


def _rows(sections: Sequence[Section]) -> list[list[tuple[Paint, Section]]]:
    """Lay the panels out: time above bandwidth, or beside it for one section; bars below."""
    grown = [one for one in sections if len(one.results.sizes(*one.group)) > 1]
    single = [one for one in sections if one not in grown]
    if len(grown) == 1 and len(single) <= 2:
        rows = [[(paint, grown[0]) for paint in (_draw_time, _draw_bandwidth)]]
    else:
        rows = [
            [(paint, one) for one in block]
            for block in _blocks(grown)
            for paint in (_draw_time, _draw_bandwidth)
        ]
    return rows + [[(_draw_bars, one) for one in block] for block in _blocks(single)]


def _blocks(sections: list[Section]) -> list[list[Section]]:
    # Full rows but for the last, and no row much longer than the others.
    columns = math.ceil(len(sections) / math.ceil(len(sections) / MOST_COLUMNS)) if sections else 1
    return [sections[start : start + columns] for start in range(0, len(sections), columns)]


def _draw_time(axis: Any, section: Section) -> None:
    over_bytes(axis, section.results, section.group, lambda num_bytes, seconds: seconds)
    axis.yaxis.set_major_formatter(lambda seconds, _: _short_seconds(seconds))
    axis.set_ylabel("median time", fontsize=8)
    axis.set_title(section.title, fontsize=10, loc="left", pad=20 if section.other else 8)
    if section.other:
        _write_ratios(axis, section, section.other)


def _short_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= factor * 0.999:
            return f"{seconds / factor:g} {unit}"
    return "0"


def _draw_bandwidth(axis: Any, section: Section) -> None:
    def bandwidth(num_bytes: int, seconds: float) -> float:
        return num_bytes * section.moves / seconds / 1e9

    over_bytes(axis, section.results, section.group, bandwidth)
    axis.set_yscale("linear")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("bus bandwidth (GB/s)", fontsize=8)


def _draw_bars(axis: Any, section: Section) -> None:
    """Draw a bar for each implementation, where there is nothing to grow with."""
    results, group = section.results, section.group
    (num_bytes,) = results.sizes(*group)
    for peer in reversed(results.peers_of(*group)):
        seconds = results.p50(*group, num_bytes, peer)
        if seconds is not None:
            title = results.title(peer)
            bars = axis.barh([title], [seconds], color=COLOURS.get(peer), height=0.65)
            axis.bar_label(bars, [readable_seconds(seconds)], padding=3, fontsize=8)
    size = f", {readable_bytes(num_bytes)}" if num_bytes else ""
    axis.margins(x=0.25)
    axis.xaxis.set_major_formatter(lambda seconds, _: _short_seconds(seconds))
    axis.set_xlabel("median time", fontsize=8)
    axis.set_title(f"{section.title}{size}", fontsize=10, loc="left")


def _write_ratios(axis: Any, section: Section, other: str) -> None:
    """Write above the panel how many times faster ours is."""
    results, group = section.results, section.group

    def write(x: float, text: str, coordinates: Any, **style: Any) -> None:
        axis.annotate(
            text,
            (x, 1.0),
            xycoords=coordinates,
            textcoords="offset points",
            fontsize=7,
            **style,
        )

    title = f"times faster than {results.title(other)}"
    write(1.0, title, "axes fraction", xytext=(0, 14), ha="right", color=GREY)
    for num_bytes in _ticks(results.sizes(*group)):
        ratio = results.ratio(*group, num_bytes, section.ours, other)
        if ratio is not None:
            colour = COLOURS[section.ours] if ratio >= 1 else GREY
            above = axis.get_xaxis_transform()
            write(num_bytes, readable_ratio(ratio), above, xytext=(0, 3), ha="center", color=colour)


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
    """Choose sizes that are written out, as many apart from each other."""
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
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        lines, names = axis.get_legend_handles_labels()
        named.update(zip(names, lines, strict=True))
    if label:
        figure.supylabel(label, fontsize=9)
    if named:
        figure.legend(
            named.values(),
            named.keys(),
            loc="outside lower center",
            ncols=len(named),
            frameon=False,
            fontsize=9,
        )
    return figure
