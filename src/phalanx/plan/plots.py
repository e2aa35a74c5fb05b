"""A plan, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.bench.plots import finish, grid
from phalanx.bench.results import readable_bytes
from phalanx.plan.model import ALGORITHMS, Layout, Model

COLOURS = dict(zip(ALGORITHMS, ("#2471a3", "#e59866", "#c0392b"), strict=True))
GREY = "#7f8c8d"
SIZES = [4**power for power in range(1, 16)]
HOSTS = [2**power for power in range(1, 15)]
MOST_RANKS = 10_000


def draw(path: Path, model: Model, num_bytes: int) -> None:
    """Draw all_reduce over bytes, and over hosts up to 10,000 ranks."""
    figure, axes = grid(2, panel=(4.4, 3.2))
    over_bytes(axes[0], model)
    over_hosts(axes[1], model, num_bytes)
    finish(figure, axes, "time of all_reduce (s)").savefig(path, dpi=130)


def over_bytes(axis: Any, model: Model) -> None:
    """Draw a line per algorithm over the size of the tensor."""
    for name, call in ALGORITHMS.items():
        axis.plot(SIZES, [call(model, size) for size in SIZES], color=COLOURS[name], label=name)
    limits = [model.limit(size) for size in SIZES]
    axis.plot(SIZES, limits, color=GREY, linestyle=":", label="the network's limit")
    axis.set_title(f"{model.layout.hosts} hosts x {model.layout.ranks_per_host}", fontsize=10)
    _scales(axis)
    axis.set_xticks(SIZES[1::3], [readable_bytes(size) for size in SIZES[1::3]])


def over_hosts(axis: Any, model: Model, num_bytes: int) -> None:
    """Draw a line per algorithm over the number of hosts."""
    each = model.layout.ranks_per_host
    hosts = [count for count in HOSTS if count * each <= MOST_RANKS] or [2]
    if hosts[-1] * each < MOST_RANKS:
        hosts.append(max(MOST_RANKS // each, 2))
    models = [Model(model.machine, model.link, Layout(count, each)) for count in hosts]
    for name, call in ALGORITHMS.items():
        axis.plot(hosts, [call(one, num_bytes) for one in models], color=COLOURS[name], label=name)
    limits = [one.limit(num_bytes) for one in models]
    axis.plot(hosts, limits, color=GREY, linestyle=":", label="the network's limit")
    axis.set_title(f"{readable_bytes(num_bytes)}, {each} ranks per host", fontsize=10)
    _scales(axis)
    ticks = hosts[::3]
    axis.set_xticks(ticks, [f"{count}" for count in ticks])
    axis.set_xlabel("hosts", fontsize=8)


def _scales(axis: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.minorticks_off()
