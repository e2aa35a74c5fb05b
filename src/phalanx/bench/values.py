"""What ranks put into an operation that is checked, and what must come out.

All values repeat after a few elements, so that the right result is a short pattern, repeated.
They are whole numbers small enough that every reduction of them is exact, in any order, in every
element type; and the pattern is odd in length, so that chunks in the wrong place show.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.bench.operations import Conditions, Operation

ROOT = 0
LONGEST_PATTERN = 251
# Up to here, all whole numbers are exact.
LIMITS = {"int8": 127, "uint8": 255, "int16": 1 << 15, "float16": 1 << 11, "bfloat16": 1 << 8}


class Values:
    """What `size` ranks put into an operation on `count` elements, and get."""

    def __init__(self, size: int, count: int, conditions: Conditions) -> None:
        self.size, self.count, self.conditions = size, count, conditions
        limit = LIMITS.get(conditions.dtype, 1 << 24)
        self._length = max(3, min(LONGEST_PATTERN, (limit // size - 1) | 1))

    def given(self, rank: int, count: int) -> Tensor:
        """Return what `rank` puts into the operation, in a buffer of `count` elements."""
        return self._repeated(self._pattern(rank), count)

    def expected(self, operation: Operation, rank: int) -> Tensor | None:
        """Return what `rank` must get, None where that is left open."""
        return None if operation.result is None else RESULTS[operation.result](self, rank)

    @property
    def chunk(self) -> int:
        return self.count // self.size

    def reduced(self, rank: int) -> Tensor:
        return self._repeated(self._reduced_pattern(), self.count)

    def gathered(self, rank: int) -> Tensor:
        return torch.cat([self.given(peer, self.chunk) for peer in range(self.size)])

    def scattered(self, rank: int) -> Tensor:
        return self._chunk_of(self.given(ROOT, self.count), rank)

    def transposed(self, rank: int) -> Tensor:
        return torch.cat(
            [self._chunk_of(self.given(peer, self.count), rank) for peer in range(self.size)]
        )

    def reduced_chunk(self, rank: int) -> Tensor:
        return self._chunk_of(self.reduced(rank), rank)

    def _chunk_of(self, whole: Tensor, rank: int) -> Tensor:
        return whole.narrow(0, rank * self.chunk, self.chunk)

    def _pattern(self, rank: int) -> Tensor:
        pattern = (torch.arange(self._length) + rank) % self._length
        if self.conditions.reduce_op == "product":
            return 1 + (pattern == 0).long()  # ones and some twos: powers of two are exact
        return pattern

    def _reduced_pattern(self) -> Tensor:
        op = self.conditions.reduce_op
        patterns = torch.stack([self._pattern(rank) for rank in range(self.size)])
        if self.dtype.is_floating_point:
            patterns = patterns.double()
        if op == "sum":
            return patterns.sum(0)
        if op == "avg":
            return patterns.sum(0) / self.size
        if op == "product":
            return patterns.prod(0)
        return patterns.amin(0) if op == "min" else patterns.amax(0)

    def _repeated(self, pattern: Tensor, count: int) -> Tensor:
        return pattern.to(self.dtype).repeat(-(-count // self._length))[:count]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.conditions.dtype)
        return dtype


def _on_root(result: Callable[[Values, int], Tensor]) -> Callable[[Values, int], Tensor | None]:
    return lambda values, rank: result(values, rank) if rank == ROOT else None


RESULTS: dict[str, Callable[[Values, int], Tensor | None]] = {
    "reduced": Values.reduced,
    "reduced on root": _on_root(Values.reduced),
    "reduced chunk": Values.reduced_chunk,
    "of root": lambda values, rank: values.given(ROOT, values.count),
    "of the other": lambda values, rank: values.given(1 - rank, values.count),
    "gathered": Values.gathered,
    "gathered on root": _on_root(Values.gathered),
    "scattered": Values.scattered,
    "transposed": Values.transposed,
}


def difference(found: Tensor, wanted: Tensor, conditions: Conditions) -> str | None:
    """Say where a result is wrong first, None if it is right."""
    if torch.equal(found, wanted):
        return None
    wrong = found != wanted
    if conditions.reduce_op == "avg":
        # It may be rounded once more: some divide by the size, others multiply by its inverse.
        spacing = torch.finfo(found.dtype).eps * wanted.double().abs()
        wrong &= (found.double() - wanted.double()).abs() > spacing
        if not wrong.any():
            return None
    at = int(wrong.nonzero()[0])
    return f"element {at} is {found[at].item()}, expected {wanted[at].item()}"
