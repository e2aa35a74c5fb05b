"""Hooks by which a ZeroRedundancyOptimizer makes its step during backward, bucket by bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future

from phalanx.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import reduced_gradients
from phalanx.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from phalanx.parallel.buckets import GradBucket
from phalanx.work import Work

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a hook that does what ``hook`` does and, when backward has computed all, the step.

    Each rank updates its share of a bucket as soon as that is reduced; the exchange of the results
    overlaps with the update of the next bucket. A bucket belongs to one rank or, with
    ``shard_buckets``, is divided among all. ``zero`` must have ``overlap_with_ddp=True``. The
    first two backward passes (three with a static graph) update nothing, as long as buckets may
    change. A parameter that no rank has used is updated as by a gradient of zeros.
    """
    steps = _Steps(ddp, zero, shard_buckets)

    def hook_with_zero_step_fn(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return steps.follow(bucket, hook(state, bucket))

    return hook_with_zero_step_fn


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a hook as ``hook_with_zero_step`` does that updates while backward is computing.

    A bucket is updated when the gradients of the next one are there. Where reductions are done by
    then, and their memory still in the cache, this is the faster of the two.
    """
    steps = _Steps(ddp, zero, shard_buckets)
    before: Future[Tensor] | None = None

    def hook_with_zero_step_interleaved_fn(state: Any, bucket: GradBucket) -> Future[Tensor]:
        nonlocal before
        if before is not None and bucket.index() > 0:
            before.wait()
        future = steps.follow(bucket, hook(state, bucket))
        before = None if bucket.is_last() else future
        return future

    return hook_with_zero_step_interleaved_fn


class _Steps:
    """The steps of an optimizer that follow the reductions of DDP's buckets."""

    def __init__(
        self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool
    ) -> None:
        _check(ddp, zero)
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._shard_buckets = shard_buckets
        self._num_passes = 0
        self._seen: list[list[Tensor]] = []  # the parameters of each bucket of this pass
        self._exchanges: list[Work] = []

    def follow(self, bucket: GradBucket, reduced: Future[Tensor]) -> Future[Tensor]:
        """Do what is due when a bucket has been reduced; return the future of that."""
        ddp, zero = self._ddp(), self._zero
        assert ddp is not None
        if bucket.index() == 0:
            self._num_passes += 1
            self._seen.clear()
            self._exchanges.clear()
        self._seen.append(bucket.parameters())
        if zero._is_divided:
            zero._check_bucket(bucket.index(), bucket.parameters())
            if bucket.index() == 0 and ddp._join_config.enable:
                zero._take_over_options(ddp._has_joined)
            return reduced.then(partial(self._step, bucket))
        num_warmup = 3 if ddp.static_graph else 2
        if bucket.is_last() and self._num_passes >= num_warmup:
            return reduced.then(self._divide)
        return reduced

    def _divide(self, done: Future[Any]) -> Any:
        self._zero._divide_buckets(self._seen, self._shard_buckets)
        return done.value()

    def _step(self, bucket: GradBucket, done: Future[Any]) -> Any:
        gradients = reduced_gradients(bucket, done)
        exchange = self._zero._step_bucket(bucket.index(), gradients)
        if exchange is not None:
            self._exchanges.append(exchange)
        if bucket.is_last():
            for exchange in self._exchanges:
                exchange.wait()
            self._exchanges.clear()
        return done.value()


def _check(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    if not zero._overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer must be constructed with overlap_with_ddp=True for this hook"
        )
    if ddp.process_group is not zero.process_group:
        raise ValueError(
            "DistributedDataParallel and ZeroRedundancyOptimizer must have one process group, but "
            f"have {ddp.process_group.group_name!r} and {zero.process_group.group_name!r}"
        )
    for name in ("mixed_precision", "skip_all_reduce_unused_params"):
        if getattr(ddp, name):
            raise ValueError(f"a step during backward does not go with DDP's {name}")
