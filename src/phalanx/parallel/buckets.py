"""Gradients that are reduced together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx._native import copy_all
from phalanx.heap import empty_shared
from phalanx.parallel.ownership import held
from phalanx.parallel.packing import dense_stride

Measured = Callable[[Sequence["Slot"], Sequence[float]], None]


class GradBucket:
    """What a communication hook is given: gradients, flat, and which parameters they belong to.

    ``buffer()`` holds this rank's gradients, not yet divided by the number of ranks. Buckets are
    numbered in the order in which they are reduced, which is the same on all ranks.
    """

    def __init__(
        self,
        index: int,
        num_buckets: int,
        buffer: Tensor,
        gradients: list[Tensor],
        parameters: list[Tensor],
    ) -> None:
        self._index = index
        self._num_buckets = num_buckets
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters

    def index(self) -> int:
        """Return which bucket this is."""
        return self._index

    def is_last(self) -> bool:
        """Say whether this is the last bucket of the backward pass."""
        return self._index == self._num_buckets - 1

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the flat one; the gradients become views of it."""
        start = buffer.storage_offset() - self._buffer.storage_offset()
        self._gradients = [
            buffer.as_strided(each.size(), each.stride(), start + each.storage_offset())
            for each in self._gradients
        ]
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients, one per parameter, as views of the buffer."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the gradients belong to."""
        return self._parameters


DEFAULT_CAP_MB = 25
DEFAULT_FIRST_BYTES = 1024 * 1024
MB = 1024 * 1024


@dataclass(frozen=True)
class BucketCapacityConfig:
    """How large buckets may become, in bytes.

    A bucket is closed when it has reached its capacity. The first one, whose gradients are ready
    first, is small by default, so that its reduction starts early.
    """

    bucket_bytes_cap: int
    per_bucket_bytes_caps: tuple[int, ...]
    first_bucket_bytes_cap: int

    @classmethod
    def create(
        cls,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        use_python_reducer: bool = False,
    ) -> BucketCapacityConfig:
        """Make one of what ``DistributedDataParallel`` is given; a list has the last word."""
        if bucket_cap_mb_list:
            if use_python_reducer:
                raise AssertionError("python reducer is not supported with bucket_cap_mb_list")
            caps = tuple(int(cap * MB) for cap in bucket_cap_mb_list)
            return cls(max(caps), caps, max(caps))
        if bucket_cap_mb is not None:
            return cls(int(bucket_cap_mb * MB), (), int(bucket_cap_mb * MB))
        return cls(DEFAULT_CAP_MB * MB, (), DEFAULT_FIRST_BYTES)

    @property
    def bucket_cap_mb(self) -> int:
        """Return the capacity of all but the first bucket in MiB."""
        return self.bucket_bytes_cap // MB

    @property
    def has_custom_per_bucket_caps(self) -> bool:
        """Say whether each bucket was given a capacity of its own."""
        return bool(self.per_bucket_bytes_caps)

    def compute_bucket_size_limits(
        self, static_graph: bool, find_unused_parameters: bool
    ) -> tuple[list[int], list[int]]:
        """Return the limits for the first buckets and, unless they are the usual, for later ones.

        Until it is known in which order gradients arrive, all are reduced at once. If some
        parameters may stay unused there is no such order, and the first buckets stay.
        """
        if self.per_bucket_bytes_caps:
            return list(self.per_bucket_bytes_caps), list(self.per_bucket_bytes_caps)
        if static_graph or not find_unused_parameters:
            return [sys.maxsize], []
        return self.limits(), []

    def limits(self) -> list[int]:
        """Return the capacities of buckets in the order in which they are reduced."""
        if self.per_bucket_bytes_caps:
            return list(self.per_bucket_bytes_caps)
        if self.first_bucket_bytes_cap < self.bucket_bytes_cap:
            return [self.first_bucket_bytes_cap, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]


def compute_bucket_assignment_by_size(
    tensors: Sequence[Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: Any = None,
) -> tuple[list[list[int]], list[int]]:
    """Sort tensors into buckets: the indices in each, and the limit that closed it.

    A bucket holds tensors of one dtype and device, in the order given, until their bytes reach
    its limit; the last limit serves all further buckets. A tensor whose gradient will be sparse
    has a bucket of its own. ``tensor_indices`` says what to call the tensors, otherwise they are
    numbered, and buckets come in the order of their first tensor.
    """
    if any(tensor.is_sparse for tensor in tensors):
        message = "No support for sparse tensors."
        if logger is not None:
            logger.set_error_and_log(message)
        raise RuntimeError(message)
    done: list[tuple[list[int], int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    turn: dict[Any, int] = {}
    for position, tensor in enumerate(tensors):
        index = tensor_indices[position] if tensor_indices else position
        if expect_sparse_gradient and expect_sparse_gradient[index]:
            done.append(([index], sys.maxsize))
            continue
        key = (tensor.dtype, tensor.device)
        limit = bucket_size_limits[min(turn.get(key, 0), len(bucket_size_limits) - 1)]
        indices, size = filling.pop(key, ([], 0))
        indices.append(index)
        size += tensor.numel() * tensor.element_size()
        if size >= limit:
            done.append((indices, limit))
            turn[key] = turn.get(key, 0) + 1
        else:
            filling[key] = (indices, size)
    for key, (indices, _) in filling.items():
        done.append(
            (indices, bucket_size_limits[min(turn.get(key, 0), len(bucket_size_limits) - 1)])
        )
    if not tensor_indices:
        done.sort(key=lambda bucket: min(bucket[0]))
    return [indices for indices, _ in done], [limit for _, limit in done]


# From this many elements on a gradient is copied into its bucket at once, while it is in the cache;
# smaller ones wait for each other, to be copied in one go.
_LARGE = 16 * 1024


class Slot:
    """A parameter and the place of its gradient in a bucket."""

    __slots__ = (
        *("__weakref__", "at_once", "bucket", "carried", "due", "index", "is_large", "is_shared"),
        *("left", "name", "param", "sparse", "stays", "view"),
    )

    def __init__(self, index: int, name: str, param: Tensor, sparse: bool) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.sparse = sparse
        self.is_large = sparse or param.numel() >= _LARGE
        self.is_shared = False  # whether another reducer has it, too
        self.stays = False  # whether its gradient is somebody's who expects the result there
        self.at_once = self.is_large  # whether its gradient is dealt with when it comes
        self.bucket: Bucket
        self.view = param  # the gradient's place, once it has one; becomes the gradient itself
        self.due = 1  # how often its gradient is accumulated to in one backward pass
        self.left = 1  # how often it still will be
        self.carried = False  # whether it was accumulated to in a pass that was not reduced

    def check(self, grad: Tensor) -> None:
        """Raise unless a gradient fits its place."""
        if grad.layout is not torch.strided or grad.dtype is not self.bucket.dtype:
            raise RuntimeError(
                f"the gradient of {self.name} is {grad.layout}, {grad.dtype}, but was dense, "
                f"{self.bucket.dtype} when DistributedDataParallel was made: wrap the module after "
                "its parameters have their final type"
            )

    @property
    def used(self) -> bool:
        """Say whether there is something new to reduce."""
        return self.left < self.due or self.carried


class Bucket:
    """Gradients of one dtype that are reduced as one flat tensor, in the shared heap."""

    def __init__(self, index: int, slots: list[Slot], dtype: torch.dtype) -> None:
        self.index = index
        self.slots = slots
        self.dtype = dtype
        self.sparse = slots[0].sparse
        self.numel = sum(slot.param.numel() for slot in slots)
        self.expected = sum(slot.due > 0 for slot in slots)  # gradients that a pass brings
        self.pending = self.expected  # those of them that are not ready yet
        self.loose: list[Slot] = []  # ready, but not yet in the flat tensor
        self.flat: Tensor
        for slot in slots:
            slot.bucket = self
        if not self.sparse:
            self.renew()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def renew(self) -> None:
        """Take fresh memory; whoever holds gradients in the old one keeps them."""
        self.flat = empty_shared(self.numel, dtype=self.dtype)
        storage, offset = self.flat.untyped_storage(), self.flat.storage_offset()
        for slot in self.slots:
            # Not a view for autograd, so that a gradient can be detached in place as any other.
            shape, stride = slot.param.shape, dense_stride(slot.param)
            view = torch.empty(0, dtype=self.dtype).set_(storage, offset, shape, stride)
            offset += slot.param.numel()
            if slot.param.grad is slot.view and not held.by_both.is_shared(slot, "view"):
                slot.param.grad = view.copy_(slot.view)
            slot.view = view
        self._storage = storage._cdata
        del storage  # or it would count
        self._owners = self._count_owners()

    def _count_owners(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage))

    def is_held(self) -> bool:
        """Say whether anybody but the parameters still uses gradients that lie here."""
        if self._count_owners() > self._owners:
            return True
        return any(
            slot.param.grad is not slot.view and held.by_slot.is_shared(slot, "view")
            for slot in self.slots
        )

    @torch.no_grad()
    def settle(self, keep: bool, measured: Measured | None = None) -> list[Slot]:
        """Copy in what is still outside, and let it be the gradients.

        If ``keep``, gradients that have a graph of their own are left where they are, and their
        slots returned. ``measured`` is told the sums of squares.
        """
        slots, self.loose = self.loose, []
        if not slots:
            return slots
        grads: list[Any] = [slot.param.grad for slot in slots]
        try:
            squares = copy_all([slot.view for slot in slots], grads, measured is not None)
        except ValueError:
            for slot, grad in zip(slots, grads, strict=True):
                slot.check(grad)
            raise
        if measured is not None:
            measured(slots, squares)
        kept = [s for s, grad in zip(slots, grads, strict=True) if keep and grad.requires_grad]
        for slot in slots:
            if not kept or slot not in kept:
                slot.param.grad = slot.view
        return kept

    def gradients(self) -> list[Tensor]:
        return [slot.view for slot in self.slots]

    def parameters(self) -> list[Tensor]:
        return [slot.param for slot in self.slots]
