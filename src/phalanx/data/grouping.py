"""Batches of samples of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from phalanx.data.sampler import EpochSampler, amounts, digest


class LengthGroupedSampler(EpochSampler):
    """Order a dataset so that a step's batches, on all ranks, are of samples of similar length.

    Batches then need little padding, and no rank waits for one with longer samples. Samples are
    shuffled, sorted by length within each ``megabatch`` (so many steps of all ranks), and the steps
    shuffled again; a larger megabatch means more similar lengths and less chance. Without
    ``shuffle`` all samples are sorted, the longest first. Give the loader the same ``batch_size``.

    ``lengths`` are numbers, one per sample, or a function of a sample; by default ``len``. For
    these two each rank reads the whole dataset once, now.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        lengths: Sequence[float] | Tensor | Callable[[Any], float] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        megabatch: int = 50,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("megabatch", megabatch)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"LengthGroupedSampler: {name} must be a positive integer, got {value!r}"
                )
        self.dataset = dataset
        self.batch_size = batch_size
        self.megabatch = megabatch
        self.shuffle = shuffle
        super().__init__(len(dataset), num_replicas, rank, seed, drop_last)
        self.lengths = _lengths(dataset, lengths)

    def order(self) -> Tensor:
        """Return the indices, in blocks of similar length, one for a step of all ranks."""
        generator = self._generator()
        block = (self._now or self._next).block
        length = self._unchanged(len(self.dataset))
        if self.shuffle:
            shuffled = torch.randperm(length, generator=generator)
            parts = torch.split(shuffled, self.megabatch * block)
        else:
            parts = (torch.arange(length),)
        ordered = torch.cat([self._sorted(part) for part in parts])
        num_blocks = len(ordered) // block
        if self.shuffle:
            # What fills no block stays last, or all blocks behind it would be cut anew.
            blocks = ordered[: num_blocks * block].view(num_blocks, block)
            blocks.copy_(blocks[torch.randperm(num_blocks, generator=generator)])
        return ordered

    def _sorted(self, indices: Tensor) -> Tensor:
        return indices[self.lengths[indices].argsort(descending=True, stable=True)]

    def _block(self) -> int:
        return self.batch_size * self.num_replicas

    def _filling(self, order: Tensor) -> Tensor:
        block = (self._now or self._next).block
        return order[(len(order) - 1) // block * block :]  # the last step's own

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            "shuffle": self.shuffle,
            "megabatch": self.megabatch,
            "lengths": digest(self.lengths),
        }


def _lengths(
    dataset: Any, lengths: Sequence[float] | Tensor | Callable[[Any], float] | None
) -> Tensor:
    """Return the length of each sample, ValueError if there is none."""
    if lengths is None or callable(lengths):
        measure = lengths or _length
        lengths = [measure(dataset[i]) for i in range(len(dataset))]
    return amounts("LengthGroupedSampler", "lengths", lengths, len(dataset))


def _length(sample: object) -> int:
    # The length of a tuple or a mapping is its number of fields.
    if isinstance(sample, tuple | Mapping) or not isinstance(sample, Sized):
        raise ValueError(
            f"LengthGroupedSampler: a sample is a {type(sample).__name__}, whose length is not "
            "clear: give lengths, or a function of a sample as lengths="
        )
    return len(sample)
