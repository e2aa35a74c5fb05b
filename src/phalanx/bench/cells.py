"""A rank's side of one measurement: buffers, a checked first call, and timed calls."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from phalanx.bench.libraries import Library
from phalanx.bench.operations import Operation
from phalanx.bench.values import Values, difference

CACHE_LINE_WORDS = 8

StartLine = Callable[[], object]
Times: TypeAlias = npt.NDArray[np.float64]


class WrongResult(AssertionError):
    """An operation did not result in what it must."""


def start_line_file(directory: Path, size: int) -> None:
    """Make the page that the start line of `size` processes needs."""
    (directory / "start-line").write_bytes(bytes(size * CACHE_LINE_WORDS * 8))


def process_start_line(directory: Path, rank: int, size: int) -> StartLine:
    """Return a function that lets processes go at the same moment, whatever library they measure.

    Each counts its arrivals in a cache line of its own in a shared page. A library's own barrier
    would add its own skew: several messages for one over sockets.
    """
    with (directory / "start-line").open("r+b") as page:
        seats = memoryview(mmap.mmap(page.fileno(), 0)).cast("Q")
    arrivals = 0

    def line() -> None:
        nonlocal arrivals
        arrivals += 1
        seats[rank * CACHE_LINE_WORDS] = arrivals
        for seat in range(0, size * CACHE_LINE_WORDS, CACHE_LINE_WORDS):
            while seats[seat] < arrivals:
                os.sched_yield()

    return line


class Cell:
    """One operation at one size, bound to buffers and ready to be timed."""

    def __init__(self, library: Library, operation: Operation, num_bytes: int) -> None:
        conditions = library.conditions
        count = operation.count(num_bytes, library.size, conditions.item_bytes)
        lengths = {"whole": count, "chunk": count // library.size}
        source = library.allocate(lengths[operation.source])
        target = library.allocate(lengths[operation.target]) if operation.target else source
        self.call = library.bind(operation.name, source, target)
        if conditions.checked and library.checked:
            values = Values(library.size, count, conditions)
            source.copy_(values.given(library.rank, source.numel()))
            returned = self.call()
            found = returned if isinstance(returned, torch.Tensor) else target
            wanted = values.expected(operation, library.rank)
            if wanted is not None and (wrong := difference(found, wanted, conditions)):
                what = f"{operation.name} of {num_bytes} bytes"
                raise WrongResult(f"{what} is wrong on rank {library.rank}: {wrong}")
        # Zeros stay zeros however often they are reduced; written, so that the pages are real.
        source.zero_()
        target.zero_()

    def time(self, line: StartLine, num_batches: int, num_calls: int) -> Times:
        """Return the seconds that every call took, a row per batch.

        The ranks start each batch together; inside it calls follow each other directly.
        """
        call, rows = self.call, []
        for _ in range(num_batches):
            line()
            stamps = [perf_counter()]
            for _ in range(num_calls):
                call()
                stamps.append(perf_counter())
            rows.append(stamps)
        return np.diff(np.array(rows))
