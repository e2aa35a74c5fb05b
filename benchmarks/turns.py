"""Ways of doing the same thing that take turns in the same ranks.

The ranks are processes with one thread each. All live in a Phalanx world and in one of
torch.distributed on Gloo at once, and, where a way asks for it, in a group of torch.distributed on
Phalanx. A way that fails on a rank is left out, and the others start anew without it.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import phalanx
from phalanx.bench.cells import process_start_line, start_line_file
from phalanx.launch.processes import run_processes

RANKS = 2
TIMEOUT = timedelta(seconds=120)
PATIENCE = 1800.0  # seconds that a launch may take: far more than any does

Row = Callable[[], float]  # returns seconds


class Stage:
    """One rank's side of a launch: where ways appear, in the same order on every rank."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.size = phalanx.get_rank(), phalanx.get_world_size()
        self.line = process_start_line(directory, self.rank, self.size)
        self._on = directory / "on"

    def enter(self, way: str) -> None:
        """Say which way is to blame for what fails from here on."""
        phalanx.barrier()
        if self.rank == 0:
            self._on.write_text(way)
        phalanx.barrier()

    def take_turns(self, rows: dict[str, Row], rounds: int) -> dict[str, list[float]]:
        """Return what the row of each way took here in each round; another begins each time."""
        times: dict[str, list[float]] = {way: [] for way in rows}
        ways = list(rows)
        for turn in range(rounds):
            first = turn % len(ways)
            for way in ways[first:] + ways[:first]:
                self.enter(way)
                times[way].append(rows[way]())
        return times

    def slowest(self, seconds: float) -> float:
        """Return the largest of the ranks' times."""
        found = torch.tensor([seconds], dtype=torch.float64)
        phalanx.all_reduce(found, op=phalanx.ReduceOp.MAX)
        return found.item()

    def repeats(self, once: dict[str, Row], seconds: float) -> int:
        """Return how often the slowest of the ways does its thing once in `seconds`."""
        estimate = max(row[0] for row in self.take_turns(once, 1).values())
        return max(1, round(seconds / self.slowest(estimate)))


@functools.cache
def group(backend: str) -> Any:
    """Return torch.distributed's group of all ranks on a backend; all ask for it together."""
    import torch.distributed as dist

    if backend == "gloo":
        return dist.group.WORLD
    import phalanx.torch_backend  # noqa: F401  (makes the backend known where it is not installed)

    return dist.new_group(backend=backend, timeout=TIMEOUT)


def be_rank(directory: str, fn: Callable[..., Any], ways: list[str], *args: Any) -> Any:
    """Be one rank, in a Phalanx world that there is already."""
    from phalanx.bench.torch_peer import gloo

    torch.set_num_threads(1)
    place = Path(directory)
    with gloo(place, phalanx.get_rank(), phalanx.get_world_size(), TIMEOUT):
        answer = fn(Stage(place), ways, *args)
        phalanx.barrier()
        group.cache_clear()
    return answer


class Outcome(NamedTuple):
    """What each rank returned, and why ways had to be left out."""

    ranks: list[Any]
    errors: dict[str, str]


def _run(size: int, directory: str, *task: Any) -> list[Any]:
    return run_processes(be_rank, size, directory, *task, timeout=TIMEOUT, deadline=PATIENCE)


def launch(
    fn: Callable[..., Any],
    ways: list[str],
    *args: Any,
    size: int = RANKS,
    run: Callable[..., list[Any]] = _run,
    within: Path | None = None,
) -> Outcome:
    """Run `fn(stage, ways, *args)` on new ranks, again without a way if one fails.

    `ranks` is empty when no way is left. `run(size, directory, *task)` has so many ranks call
    `be_rank(directory, *task)`; all of them see the directory, which is `within` another.
    """
    errors: dict[str, str] = {}
    while remaining := [way for way in ways if way not in errors]:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=within) as name:
            start_line_file(Path(name), size)
            try:
                ranks = run(size, name, fn, remaining, *args)
            except Exception as error:
                on = Path(name, "on")
                if not on.exists():
                    raise  # the ranks themselves did not come up
                errors[on.read_text()] = f"{type(error).__name__}: {error}"
                print(f"FAILED, going on without {on.read_text()}: {error}", flush=True)
            else:
                return Outcome(ranks, errors)
    return Outcome([], errors)


def slowest_rank(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the times of each way in each round, on the rank where it took longest."""
    return {
        way: [max(times) for times in zip(*(rank[way] for rank in by_rank), strict=True)]
        for way in (by_rank[0] if by_rank else ())
    }


class Ratio(NamedTuple):
    """A ratio of two ways: the median over the rounds, and the middle half of them."""

    median: float
    low: float
    high: float


def compare(numerator: list[float], denominator: list[float]) -> Ratio:
    """Divide times of the same rounds."""
    ratios = [above / below for above, below in zip(numerator, denominator, strict=True)]
    low, high = np.percentile(ratios, [25, 75])
    return Ratio(statistics.median(ratios), float(low), float(high))
