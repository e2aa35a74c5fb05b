"""Samplers whose ranks share out one order of samples.

An epoch is an order of indices that all ranks compute alike, from ``seed`` and ``epoch`` alone.
Rank r of R takes every R-th of them from the r-th on. What R ranks have used, after equally many
samples each, is therefore a beginning of the order; the rest can be dealt out again later, also to
another number of ranks. No sampler draws from torch's default generator.
"""

from __future__ import annotations

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data.sampler import Sampler

from phalanx.world import get_rank, get_world_size, is_initialized


@dataclass
class _Pass:
    """One iteration over an epoch, or over what is left of it."""

    start: int  # where in the epoch's order
    block: int  # how many samples in sequence the order keeps together
    yielded: int = 0


class EpochSampler(Sampler[int], ABC):
    """Deal out an epoch's order of samples to ranks, and remember how far they have come.

    For own samplers: implement ``order``. All ranks get equally many samples: the last few of an
    epoch are dropped (``drop_last``), or else its first ones repeated. ``num_samples`` is this
    rank's number in a whole epoch, ``total_size`` that of all ranks together.
    """

    def __init__(
        self, length: int, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool
    ) -> None:
        self.num_replicas, self.rank = _place(type(self).__name__, num_replicas, rank)
        self.seed = seed
        self.epoch = 0
        self.drop_last = drop_last
        if drop_last and 0 < length < self.num_replicas:
            warnings.warn(
                f"{type(self).__name__}: {length} samples are fewer than the {self.num_replicas} "
                "ranks, and drop_last leaves none: use fewer ranks, or drop_last=False",
                stacklevel=3,
            )
        self._length = length
        self.num_samples = self._share(length)
        self.total_size = self.num_samples * self.num_replicas
        self._now: _Pass | None = None
        self._next = self._fresh()

    @abstractmethod
    def order(self) -> Tensor:
        """Return the indices of the epoch, in the same order on all ranks."""

    def __iter__(self) -> Iterator[int]:
        self._now, self._next = self._next, self._fresh()
        return _counted(self._own(self._now), self._now)

    def __len__(self) -> int:
        return self._share(self._length - (self._now or self._next).start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, before iterating; all ranks must choose alike.

        Another epoch than the present one starts at its beginning; for the present one, a position
        that was loaded stays.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._now, self._next = None, self._fresh()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the ranks are, to go on from there later; the same on all ranks.

        ``consumed`` is how many samples this rank has used since its present iteration began
        (steps times batch size, if it counts). Without it, those that were asked of the sampler are
        taken for used: right without loader workers, which run ahead.
        """
        present = self._now or self._next
        if consumed is None:
            consumed = present.yielded
        if consumed < 0:
            raise ValueError(f"{type(self).__name__}: consumed must not be negative: {consumed}")
        return {
            "sampler": type(self).__name__,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": min(present.start + consumed * self.num_replicas, self._length),
            "block": present.block,
            **self._facts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next iteration, where ``state`` was taken; all ranks must load it.

        Restores seed and epoch. The number of ranks may be another one: what is left of the epoch
        is dealt out to those that are there now, nothing twice and nothing lost.
        """
        given = {"sampler": type(self).__name__, **self._facts()}
        different = [
            f"{name} is {state.get(name)!r} in the state, {value!r} here"
            for name, value in given.items()
            if state.get(name) != value
        ]
        if different:
            raise ValueError(
                f"{type(self).__name__}: the state is of another order of samples: "
                f"{'; '.join(different)}"
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._now, self._next = None, _Pass(state["position"], state["block"])

    def _facts(self) -> dict[str, Any]:
        """Return what the order depends on besides seed and epoch."""
        return {"length": self._length}

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def _fresh(self) -> _Pass:
        return _Pass(0, self._block())

    def _block(self) -> int:
        return 1

    def _share(self, count: int) -> int:
        return (count if self.drop_last else count + self.num_replicas - 1) // self.num_replicas

    def _own(self, present: _Pass) -> list[int]:
        order = self.order()
        self._unchanged(len(order))
        rest = order[present.start :]
        missing = self._share(len(rest)) * self.num_replicas - len(rest)
        if missing > 0:
            fill = self._filling(order)
            rest = torch.cat([rest, fill.repeat(-(-missing // len(fill)))[:missing]])
        elif missing < 0:
            rest = rest[:missing]
        own: list[int] = rest[self.rank :: self.num_replicas].tolist()
        return own

    def _unchanged(self, length: int) -> int:
        """Return the present number of samples, RuntimeError if it was another one before."""
        if length != self._length:
            raise RuntimeError(
                f"{type(self).__name__}: there were {self._length} samples when the sampler was "
                f"made, and there are {length} now: make a new sampler when the dataset changes"
            )
        return length

    def _filling(self, order: Tensor) -> Tensor:
        """Return what to repeat if the last samples cannot be dealt out evenly."""
        return order


class DistributedSampler(EpochSampler):
    """Give each rank its own part of a dataset, shuffled anew in each epoch.

    The indices are those of ``torch.utils.data.DistributedSampler`` with the same arguments.
    ``num_replicas`` and ``rank`` are by default those of the world; ``dataset``, ``seed`` and the
    rest must be the same on all ranks. Call ``set_epoch`` before each epoch, or all epochs have one
    order. All ranks get equally many samples: the last few are dropped (``drop_last``), or else the
    first ones repeated. Without ``shuffle`` the order is that of the dataset.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(len(dataset), num_replicas, rank, seed, drop_last)
        self.dataset = dataset
        self.shuffle = shuffle

    def order(self) -> Tensor:
        """Return a permutation of the dataset's indices, or these as they are."""
        length = len(self.dataset)
        return (
            torch.randperm(length, generator=self._generator())
            if self.shuffle
            else torch.arange(length)
        )

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"shuffle": self.shuffle}


class WeightedDistributedSampler(EpochSampler):
    """Draw ``num_samples`` indices per epoch, on all ranks together, each by its weight.

    As ``torch.utils.data.WeightedRandomSampler``, with draws that all ranks make alike and share
    out. Without ``replacement`` no index comes twice in an epoch. If ``dataset`` is given, there
    must be a weight for each of its samples.
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        num_samples: int,
        replacement: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset: Sized | None = None,
    ) -> None:
        name = type(self).__name__
        self.weights = amounts(name, "weights", weights, None if dataset is None else len(dataset))
        self.replacement = replacement
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples <= 0:
            raise ValueError(f"{name}: num_samples must be a positive integer, got {num_samples!r}")
        positive = int((self.weights > 0).sum())
        if positive < (1 if replacement else num_samples):
            raise ValueError(
                f"{name}: {positive} of {len(self.weights)} weights are positive, too few to draw "
                f"{num_samples} samples {'with' if replacement else 'without'} replacement"
            )
        super().__init__(num_samples, num_replicas, rank, seed, drop_last)

    def order(self) -> Tensor:
        """Return the epoch's draws."""
        generator = self._generator()
        if self.replacement:
            bounds = (self.weights / self.weights.max()).cumsum(0)
            points = torch.rand(self._length, dtype=torch.float64, generator=generator) * bounds[-1]
            # Rounding may carry a point to the very end, behind which there is nothing.
            last = int(self.weights.nonzero()[-1])
            return torch.searchsorted(bounds, points, right=True).clamp_(max=last)
        # The first arrivals of a race with these rates are a sample without replacement: Efraimidis
        # and Spirakis, "Weighted random sampling with a reservoir" (2006). Here in logarithms.
        arrivals = torch.empty_like(self.weights).exponential_(generator=generator).log_()
        arrivals -= self.weights.log()
        arrivals[self.weights == 0] = torch.inf
        return arrivals.argsort(stable=True)[: self._length]

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"replacement": self.replacement, "weights": digest(self.weights)}


def digest(values: Tensor) -> int:
    """Return a number that tells other values from these."""
    return zlib.crc32(values.numpy().tobytes())


def _counted(indices: list[int], present: _Pass) -> Iterator[int]:
    for index in indices:
        present.yielded += 1
        yield index


def _place(sampler: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return number of ranks and rank, by default those of the world."""
    if (num_replicas is None or rank is None) and not is_initialized():
        raise ValueError(
            f"{sampler}: the default process group has not been initialized: call "
            "init_process_group first, or give both num_replicas and rank"
        )
    num_replicas = get_world_size() if num_replicas is None else num_replicas
    rank = get_rank() if rank is None else rank
    if num_replicas < 1:
        raise ValueError(f"{sampler}: num_replicas must be at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"{sampler}: Invalid rank {rank}: with num_replicas={num_replicas} ranks are 0 to "
            f"{num_replicas - 1}"
        )
    return num_replicas, rank


def amounts(
    sampler: str, name: str, given: Sequence[float] | Tensor, count: int | None = None
) -> Tensor:
    """Return numbers, one per sample, as a tensor; they must be finite and not negative."""
    values = torch.as_tensor(given, dtype=torch.float64).detach()
    if values.dim() != 1 or count not in (None, len(values)):
        samples = "each sample" if count is None else f"each of {count} samples"
        raise ValueError(
            f"{sampler}: {name} must be one number for {samples}, got shape {tuple(values.shape)}"
        )
    wrong = (~torch.isfinite(values) | (values < 0)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{sampler}: {name} must be finite and not negative, but {name}[{first}] is "
            f"{values[first].item()} ({len(wrong)} such of {len(values)})"
        )
    return values
