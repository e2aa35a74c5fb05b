"""How cost grows with bytes and with ranks, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.bench.plots import Value, finish, grid, line, over_bytes
from phalanx.bench.results import Results, readable_bytes


def draw(results: Results, directory: Path) -> list[tuple[str, str]]:
    """Draw every plot there are numbers for; return captions and file names."""
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
    return _panels(results, "time (µs)", lambda num_bytes, seconds: seconds * 1e6)


def _bandwidth(results: Results) -> Any:
    return _panels(
        results, "bytes / time (GB/s)", lambda num_bytes, seconds: num_bytes / seconds / 1e9
    )


def _panels(results: Results, label: str, value: Value) -> Any:
    """Draw a panel per operation, a line per implementation."""
    cells = [group for group in results.groups() if group[:2] == ("processes", 2)]
    panels = [group for group in cells if len(results.sizes(*group)) > 1]
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for axis, group in zip(axes, panels, strict=False):
        over_bytes(axis, results, group, value)
        axis.set_title(group[2], fontsize=10)
    return finish(figure, axes, label)


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
    figure, axes = grid(len(panels))
    for axis, (kind, counts, num_bytes) in zip(axes, panels, strict=False):
        for peer in results.peers_of(kind, counts[-1], "all_reduce"):
            points = [
                (ranks, seconds * 1e6)
                for ranks in counts
                if (seconds := results.p50(kind, ranks, "all_reduce", num_bytes, peer)) is not None
            ]
            line(axis, results, peer, points)
        axis.set_title(f"{kind}, {readable_bytes(num_bytes)}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
    return finish(figure, axes, "time (µs)")
