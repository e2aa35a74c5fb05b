"""Where things stand on the timeline: what overlaps on a rank gets rows of its own."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.trace.files import Trace
from phalanx.trace.joins import Joined


@dataclass
class Layout:
    """The row of each range and operation within its rank's lane, and the rows' titles by rank."""

    range_rows: NDArray[Any]
    operation_rows: NDArray[Any]
    titles: dict[int, list[str]]


def lay_out(trace: Trace, joined: Joined) -> Layout:
    """Give each rank rows for its ranges, the outer above the inner, and below for operations."""
    operations, ranges = trace.operations, trace.ranges
    range_rows = np.zeros(ranges.size, np.int64)
    operation_rows = np.zeros(operations.size, np.int64)
    titles = {}
    range_ends = np.where(ranges["finished"] < 0, trace.length, ranges["finished"])
    ends = operations["posted"] + joined.duration
    for rank in trace.ranks:
        mine = np.flatnonzero(ranges["rank"] == rank)
        range_rows[mine] = pack(ranges["started"][mine].tolist(), range_ends[mine].tolist())
        above = int(range_rows[mine].max()) + 1 if mine.size else 0
        mine = np.flatnonzero(operations["rank"] == rank)
        operation_rows[mine] = above + pack(
            operations["posted"][mine].tolist(), ends[mine].tolist()
        )
        below = int(operation_rows[mine].max()) + 1 - above if mine.size else 0
        titles[rank] = ["ranges"] * above + ["operations"] * below
    return Layout(range_rows, operation_rows, titles)


def pack(starts: Iterable[int], ends: Iterable[int]) -> NDArray[np.int64]:
    """Return a row for each event, given in the order of their starts: the first that is free."""
    placed: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, row
    rows = 0
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        heapq.heappush(busy, (max(start, end), row))
        placed.append(row)
    return np.array(placed, np.int64)
