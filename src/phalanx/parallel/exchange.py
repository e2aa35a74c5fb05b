"""How buckets are reduced: by the group itself, or by a communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.futures import Future

from phalanx import collectives
from phalanx.errors import DistError
from phalanx.groups import ProcessGroup
from phalanx.parallel.buckets import Bucket, GradBucket
from phalanx.parallel.health import GradientHealth
from phalanx.types import ReduceOp
from phalanx.work import Deferral, Work, beyond_futures
from phalanx.world import active

Hook = Callable[[Any, GradBucket], Future[Any]]


class Exchange:
    """The reductions of one backward pass after the other.

    Buckets are launched in the same order on all ranks, and waited for at the end.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.hook: tuple[Any, Hook] | None = None
        self.divisor: int | None = None  # of sums, if not the number of ranks
        self.health: GradientHealth | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the last pass."""
        self.num_launched = 0
        self._works: list[Work] = []
        self._sparse: list[Bucket] = []  # reduced without a hook
        self._deferral = Deferral()
        self._futures: list[tuple[Bucket, Tensor, Future[Any]]] = []

    def launch(self, bucket: Bucket, num_buckets: int, async_op: bool) -> None:
        """Reduce a bucket in which all gradients are."""
        self.num_launched += 1
        flat = self._sparse_gradient(bucket) if bucket.sparse else bucket.flat
        if self.hook is not None:
            gradients = [flat] if bucket.sparse else bucket.gradients()
            given = GradBucket(bucket.index, num_buckets, flat, gradients, bucket.parameters())
            self._futures.append((bucket, flat, self.run_hook(given)))
        elif bucket.sparse:
            bucket.slots[0].view = flat
            self._sparse.append(bucket)
            self._add(collectives.all_reduce(flat, self._sparse_op(), self.group, async_op=True))
        else:
            squares = None if self.health is None else self.health.place(bucket)
            transport = active(self.group)
            self._add(transport.all_reduce(flat, self._op(), async_op=async_op, squares=squares))

    def _add(self, work: Work | None) -> None:
        if work is not None:
            self._works.append(work)

    def _op(self) -> ReduceOp:
        return ReduceOp.AVG if self.divisor is None else ReduceOp.premul_sum(1 / self.divisor)

    def _sparse_op(self) -> ReduceOp:
        return ReduceOp.AVG if self.divisor is None else ReduceOp.SUM  # divided afterwards

    def _sparse_gradient(self, bucket: Bucket) -> Tensor:
        (slot,) = bucket.slots
        grad = slot.param.grad
        if grad is None:
            return _no_rows(slot.param, bucket.dtype)
        if not grad.is_sparse:
            raise RuntimeError(
                f"the gradient of {slot.name} was to be sparse, as its module says, but is dense"
            )
        return grad.to(bucket.dtype)

    def run_hook(self, bucket: GradBucket) -> Future[Any]:
        """Let the communication hook reduce a bucket."""
        state, hook = cast("tuple[Any, Hook]", self.hook)
        with self._deferral.calling(), torch.no_grad():
            future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"the communication hook {getattr(hook, '__name__', hook)} returned "
                f"{type(future).__name__}: it must return a torch.futures.Future of the flat result"
            )
        return future

    def average(self, bucket: GradBucket) -> Future[Any]:
        """Average a bucket as is done without a hook, for hooks that want that."""
        flat = bucket.buffer()
        work = (
            collectives.all_reduce(flat, self._sparse_op(), self.group, async_op=True)
            if flat.is_sparse
            else active(self.group).all_reduce(flat, self._op(), async_op=True)
        )
        with self._deferral.collecting():
            future = cast(Work, work).get_future()
            # Not of this object: it holds the future, and what C++ keeps no collector sees.
            return future.then(partial(_averaged, self.divisor if flat.is_sparse else None))

    def wait(self) -> None:
        """Wait for all that was launched; then the results are in the buckets."""
        for work in self._works:
            work.wait()
        for bucket in self._sparse:
            self._measure(bucket, _divided(bucket.slots[0].view, self.divisor))
        self._deferral.complete()
        for bucket, flat, future in self._futures:
            try:
                value = future.wait()
            except Exception as error:
                # Without what leads to the future, which holds the error: C++ would keep both.
                self._futures = []
                del future
                raise beyond_futures(error) from None
            result = value[0] if isinstance(value, list | tuple) else value
            _take_result(bucket, flat, result)
            self._measure(bucket, result)

    def _measure(self, bucket: Bucket, result: Tensor) -> None:
        if self.health is not None:
            self.health.measure_result(bucket, result)

    def abandon(self) -> None:
        """Let go of what hooks have promised, since nobody will ask for it: it holds on to much.

        What is deferred stays: the callbacks of hooks may owe the others collectives, too.
        """
        self._futures = []

    def make_up(self, buckets: Sequence[Bucket], num_buckets: int) -> None:
        """Give the other ranks zeros for the buckets that an abandoned pass has not launched."""
        for work in self._works:
            with suppress(DistError):  # which has been told already, or will meet the others too
                work.wait()
        futures = []
        for bucket in buckets:
            zeros = zero_bucket(bucket, num_buckets)
            if self.hook is not None:
                futures.append(self.run_hook(zeros))
            elif bucket.sparse:
                collectives.all_reduce(zeros.buffer(), self._sparse_op(), self.group)
            else:
                # The others measure their sums: so does everybody.
                squares = None if self.health is None else self.health.place(bucket)
                active(self.group).all_reduce(zeros.buffer(), self._op(), squares=squares)
        # Not before all hooks have begun, as in the others' pass.
        self._deferral.complete()
        for future in futures:
            future.wait()


def _averaged(divisor: int | None, done: Future[Any]) -> Tensor:
    return _divided(done.value()[0], divisor)


def _divided(result: Tensor, divisor: int | None) -> Tensor:
    """Divide what was left a sum."""
    return result if divisor is None else result.div_(divisor)


def zero_bucket(bucket: Bucket, num_buckets: int) -> GradBucket:
    """Return a bucket as hooks see it, full of zeros."""
    if bucket.sparse:
        flat = _no_rows(bucket.slots[0].param, bucket.dtype)
        views = [flat]
    else:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        start = bucket.flat.storage_offset()
        views = [
            flat.as_strided(view.shape, view.stride(), view.storage_offset() - start)
            for view in bucket.gradients()
        ]
    return GradBucket(bucket.index, num_buckets, flat, views, bucket.parameters())


def _take_result(bucket: Bucket, flat: Tensor, result: Tensor) -> None:
    """Put what a hook has made of a bucket in its place."""
    if not isinstance(result, Tensor) or result.numel() != flat.numel():
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RuntimeError(
            f"the communication hook gave {shown} for bucket {bucket.index}, which holds "
            f"{bucket.numel} elements: its future must hold one flat tensor of that many"
        )
    if bucket.sparse:
        bucket.slots[0].view = result
    elif result.data_ptr() != bucket.flat.data_ptr():
        bucket.flat.copy_(result.view(-1))


def _no_rows(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sparse gradient of a parameter of which nothing was used."""
    indices = torch.empty(1, 0, dtype=torch.int64)
    values = torch.empty(0, *param.shape[1:], dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
