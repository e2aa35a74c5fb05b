"""Measure all_reduce on hosts of this machine's own making, and fit the model to it."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.backends.hierarchy.choices import SMALL
from phalanx.commands import CommandError
from phalanx.plan.model import Engine, Layout, Link, Machine, Model

SIZES = (4, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20)
_TRIALS, _LEAST = 3, 5  # rounds, of which the best counts, and calls in each


@dataclass(frozen=True)
class Sample:
    """A time that was measured; ``rate`` is the link's ("1gbit"), None if nothing limits it."""

    library: str  # "phalanx", or "gloo": flat, through torch
    hosts: int
    ranks_per_host: int
    rate: str | None
    num_bytes: int
    seconds: float


def measure_sizes(library: str, sizes: Sequence[int], budget: float) -> list[float]:
    """Return this rank's seconds per all_reduce of each size. Every rank of a world calls it."""
    import torch

    torch.set_num_threads(1)
    dist: Any
    if library == "gloo":
        dist = importlib.import_module("phalanx.bench.torch_peer").dist  # torch's own
    else:
        import phalanx as dist
    dist.init_process_group("gloo" if library == "gloo" else "phalanx")
    found = []
    for num_bytes in sizes:
        tensor = torch.zeros(max(num_bytes // 4, 1))
        found.append(_time(partial(dist.all_reduce, tensor), dist, budget))
    dist.destroy_process_group()
    return found


def _time(call: Callable[[], object], dist: Any, budget: float) -> float:
    import torch

    dist.barrier()
    start = time.perf_counter()
    call()
    # All ranks make as many calls: those that the slowest finds right.
    once = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(once, dist.ReduceOp.MAX)
    count = max(_LEAST, min(500, int(budget / _TRIALS / once.item())))
    medians = []
    for _ in range(_TRIALS):
        dist.barrier()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return min(medians)


def measure(
    library: str,
    layout: Layout,
    rate: str | None = None,
    sizes: Sequence[int] = SIZES,
    budget: float = 0.5,
) -> list[Sample]:
    """Measure sizes of all_reduce on hosts that this makes; `budget` is seconds for each size."""
    from phalanx.testing.hosts import Hosts

    with Hosts(layout.hosts, ranks=layout.ranks_per_host) as hosts:
        if rate is not None:
            hosts.shape(rate=rate)
        times = hosts.launch(measure_sizes, library, tuple(sizes), budget, timeout=300)
    slowest = [max(by_rank) for by_rank in zip(*times, strict=True)]
    where = layout.hosts, layout.ranks_per_host, rate
    return [Sample(library, *where, *pair) for pair in zip(sizes, slowest, strict=True)]


def measure_adding(num_bytes: int = 4 << 20) -> float:
    """Return the seconds that each byte takes to be added to another, by one thread."""
    import torch

    one, other = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            one.add_(other)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return min(times) / num_bytes


def fit(samples: Sequence[Sample], add_byte: float) -> Machine:
    """Return the machine whose times these are: two hosts of one rank each, and one of several."""

    def of(library: str, hosts: int) -> tuple[float, float]:
        return line(
            [
                (sample.num_bytes, sample.seconds)
                for sample in samples
                if (sample.library, sample.hosts, sample.rate) == (library, hosts, None)
            ]
        )

    flat, flat_byte = of("gloo", 2)  # a ring of two: two steps, each with half of the bytes
    between, between_byte = of("phalanx", 2)  # a swap: one message each way
    local, local_byte = of("phalanx", 1)  # all in the memory of one host
    return Machine(
        flat=Engine(flat / 2, max(flat_byte - add_byte / 2, 0.0)),
        between=Engine(between, max(between_byte - add_byte, 0.0)),
        local=local,
        local_byte=local_byte,
        add_byte=add_byte,
    )


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a constant and a cost per byte: the least squares of relative errors, not below 0."""
    import numpy as np

    rows = np.array([[1 / seconds, num_bytes / seconds] for num_bytes, seconds in points])
    constant, slope = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    if slope < 0:
        return statistics.fmean(seconds for _, seconds in points), 0.0
    return max(float(constant), 0.0), float(slope)


def measure_machine(
    ranks_per_host: int, say: Callable[[str], None], budget: float = 0.5
) -> tuple[Machine, list[Sample]]:
    """Measure this machine and fit the model to it; `say` is told what is measured."""
    samples: list[Sample] = []
    for library, layout in (
        ("phalanx", Layout(1, max(ranks_per_host, 2))),
        ("phalanx", Layout(2, 1)),
        ("gloo", Layout(2, 1)),
    ):
        say(f"{library}: {layout.hosts} x {layout.ranks_per_host} ranks")
        samples += measure(library, layout, budget=budget)
    return fit(samples, measure_adding()), samples


def predict(machine: Machine, sample: Sample) -> float:
    """Return what the model says of a time that was measured here: all ranks share the cores."""
    from phalanx.testing.hosts.switch import Link as Wire

    wire = Wire.read(sample.rate, 0, 0)
    link = Link(float("inf") if wire.rate is None else wire.rate / 8, 0.0)
    layout, flat = Layout(sample.hosts, sample.ranks_per_host), sample.library == "gloo"
    speak_for_others = not flat and sample.num_bytes <= SMALL
    busy = layout.hosts if speak_for_others else layout.size
    model = Model(machine.shared(busy, os.cpu_count() or 1), link, layout)
    return model.flat_ring(sample.num_bytes) if flat else model.phalanx(sample.num_bytes)


def write(machine: Machine, samples: Sequence[Sample], path: Path) -> None:
    """Keep what was fitted, and to what."""
    kept = {"machine": asdict(machine), "samples": [asdict(sample) for sample in samples]}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read(path: Path) -> Machine:
    """Return what `write` has kept."""
    try:
        found = json.loads(path.read_text())["machine"]
        flat, between = Engine(**found.pop("flat")), Engine(**found.pop("between"))
        return Machine(flat, between, **found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"cannot read a machine from {str(path)!r} ({error}): make one with "
            "phalanx plan --measure FILE"
        ) from None
