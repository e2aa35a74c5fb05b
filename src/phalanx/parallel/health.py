"""Watching gradients: their norms, and who has brought in NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.groups import ProcessGroup
from phalanx.objects import all_gather_object
from phalanx.parallel.buckets import Bucket, Slot

_SHOWN = 10  # gradients named in a message


class GradientHealth:
    """Norms of the gradients of the last backward pass, measured while they were moved anyway.

    ``norm`` and ``bucket_norms`` are of the averaged gradients, the same on all ranks (``norm`` is
    what ``clip_grad_norm_`` would compute); ``local_norms``, by parameter, of what this rank
    brought in. If NaN or Inf is among the averages, ``bad`` says on all ranks which rank had it in
    which gradient, as ``(rank, parameter, "NaN" or "Inf")``, and FloatingPointError says so too,
    unless ``raises`` is False.
    """

    def __init__(self, raises: bool = True) -> None:
        self.raises = raises
        self.norm = 0.0
        self.bucket_norms: list[float] = []
        self.local_norms: dict[str, float] = {}
        self.bad: list[tuple[int, str, str]] = []
        self._local: dict[Slot, float] = {}
        self._squares: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Forget what a pass that an exception has left was measured to bring in."""
        self._local, self._squares = {}, {}

    def measured(self, slots: Sequence[Slot], squares: Sequence[float]) -> None:
        """Take down sums of squares of this rank's gradients."""
        self._local.update(zip(slots, squares, strict=True))

    def place(self, bucket: Bucket) -> Tensor:
        """Return where the reduction of a bucket is to leave its sum of squares."""
        squares = self._squares[bucket.index] = torch.zeros(1, dtype=torch.float64)
        return squares

    def measure_result(self, bucket: Bucket, result: Tensor) -> None:
        """Measure what a hook, or the reduction of a sparse gradient, has made of a bucket."""
        self.place(bucket).fill_(_square(result))

    def measure_in_place(self, slot: Slot) -> None:
        """Measure a gradient that has accumulated in its bucket, where nothing is copied."""
        self._local[slot] = _square(slot.view)

    def settle(self, group: ProcessGroup) -> None:
        """Draw up the results; raise on all ranks if gradients are not finite."""
        squares = [self._squares[index].item() for index in sorted(self._squares)]
        self.bucket_norms = [math.sqrt(square) for square in squares]
        self.norm = math.sqrt(sum(squares))
        self.local_norms = {slot.name: math.sqrt(square) for slot, square in self._local.items()}
        self.bad = []
        own = [
            (group.ranks[group.rank()], slot.name, "NaN" if math.isnan(square) else "Inf")
            for slot, square in sorted(self._local.items(), key=lambda item: item[0].index)
            if not math.isfinite(square)
        ]
        self.begin()
        if math.isfinite(self.norm):  # the same bits on all ranks, so all agree
            return
        everybody: list[Any] = [None] * group.size()
        all_gather_object(everybody, own, group=group)
        self.bad = [entry for entries in everybody for entry in entries]
        if self.raises:
            raise FloatingPointError(self._message())

    def _message(self) -> str:
        if not self.bad:
            where = [i for i, norm in enumerate(self.bucket_norms) if not math.isfinite(norm)]
            return (
                f"gradients in buckets {where} overflowed when they were averaged, though they "
                "were finite on every rank: scale the loss down, or reduce in another type"
            )
        lines = [f"  rank {rank}: {what} in {name}" for rank, name, what in self.bad[:_SHOWN]]
        more = f"\n  and {len(self.bad) - _SHOWN} more" if len(self.bad) > _SHOWN else ""
        return "gradients are not finite:\n" + "\n".join(lines) + more


def _square(tensor: Tensor) -> float:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    norm = torch.linalg.vector_norm(values.detach(), dtype=_wide(values.dtype))
    return float(norm) ** 2


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
