"""How cost grows with bytes and with ranks, as PNG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .results import Results, readable_bytes

COLOURS = {
    "phalanx": "#c0392b",
    "phalanx-shared": "#e59866",
    "phalanx-threads": "#c0392b",
    "gloo": "#2471a3",
    "openmpi": "#1e8449",
    "mpich": "#7dcea0",
    "threadedpg": "#7d3c98",
    "bare": "#7f8c8d",
}


def draw(results: Results, directory: Path) -> list[tuple[str, str]]:
    """Draw every plot there are numbers for; return captions and file names."""
    import matplotlib

    matplotlib.use("Agg")
    pictures = []
    for caption, name, paint in (
        ("Time against bytes, two processes", "benchmark-latency.png", _latency),
        ("Bandwidth against bytes, two processes", "benchmark-bandwidth.png", _bandwidth),
        ("all_reduce against ranks", "benchmark-ranks.png", _ranks),
    ):
        figure = paint(results)
        if figure is not None:
            figure.savefig(directory / name, dpi=110)
            pictures.append((caption, name))
    return pictures


def _latency(results: Results) -> Any:
    return _over_bytes(results, "time (µs)", lambda num_bytes, seconds: seconds * 1e6)


def _bandwidth(results: Results) -> Any:
    return _over_bytes(
        results, "bytes / time (GB/s)", lambda num_bytes, seconds: num_bytes / seconds / 1e9
    )


def _over_bytes(results: Results, label: str, value) -> Any:
    """Draw a panel per operation, a line per implementation."""
    cells = [group for group in results.groups() if group[:2] == ("processes", 2)]
    panels = [group for group in cells if len(results.sizes(*group)) > 1]
    if not panels:
        return None
    figure, axes = _grid(len(panels))
    for axis, group in zip(axes, panels, strict=False):
        for peer in results.peers_of(*group):
            points = [
                (num_bytes, value(num_bytes, seconds))
                for num_bytes in results.sizes(*group)
                if (seconds := results.p50(*group, num_bytes, peer)) is not None
            ]
            _line(axis, results, peer, points)
        axis.set_title(group[2], fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        sizes = results.sizes(*group)
        ticks = sizes[:: max(1, math.ceil(len(sizes) / 5))]
        axis.set_xticks(ticks, [readable_bytes(size) for size in ticks], fontsize=7)
    return _finish(figure, axes, label)


def _ranks(results: Results) -> Any:
    """Draw all_reduce over the number of ranks: a panel per kind of rank and size."""
    groups = [group for group in results.groups() if group[2] == "all_reduce"]
    panels = []
    for kind in ("processes", "threads"):
        counts = sorted(ranks for found, ranks, _ in groups if found == kind)
        if len(counts) > 1:
            common = set.intersection(
                *[set(results.sizes(kind, ranks, "all_reduce")) for ranks in counts]
            )
            panels += [(kind, counts, num_bytes) for num_bytes in sorted(common)]
    if not panels:
        return None
    figure, axes = _grid(len(panels))
    for axis, (kind, counts, num_bytes) in zip(axes, panels, strict=False):
        for peer in results.peers_of(kind, counts[-1], "all_reduce"):
            points = [
                (ranks, seconds * 1e6)
                for ranks in counts
                if (seconds := results.p50(kind, ranks, "all_reduce", num_bytes, peer)) is not None
            ]
            _line(axis, results, peer, points)
        axis.set_title(f"{kind}, {readable_bytes(num_bytes)}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
    return _finish(figure, axes, "time (µs)")


def _grid(num_panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(5, num_panels)
    rows = math.ceil(num_panels / columns)
    figure = Figure(figsize=(3.1 * columns, 2.6 * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[num_panels:]:
        unused.set_visible(False)
    return figure, axes


def _line(axis: Any, results: Results, peer: str, points: list[tuple[float, float]]) -> None:
    if points:
        axis.plot(
            *zip(*points, strict=True),
            marker=".",
            linewidth=1.5,
            color=COLOURS.get(peer),
            label=results.title(peer),
        )


def _finish(figure: Any, axes: list[Any], label: str) -> Any:
    named = {}
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        lines, names = axis.get_legend_handles_labels()
        named.update(zip(names, lines, strict=True))
    figure.supylabel(label, fontsize=9)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named) or 1)
    return figure
