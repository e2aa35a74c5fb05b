"""An optimizer whose steps overlap with the reduction of further gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from phalanx.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from phalanx.optim.subset import StepwiseOptimizer, check_steps_without_closure
from phalanx.parallel.buckets import GradBucket

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel


class OverlappedOptimizer:
    """An optimizer that updates each bucket of gradients when it has been reduced."""

    def __init__(
        self,
        optim_cls: type[Optimizer],
        params: Iterable[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check_steps_without_closure(optim_cls)
        self.optim_cls = optim_cls
        self.stepwise = StepwiseOptimizer(optim_cls, *args, **kwargs)
        self._state = _OptimizerHookState(self.stepwise, params)

    def register_ddp(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of ``ddp``, which then can have no other."""
        if ddp.mixed_precision is not None:
            raise ValueError(
                "an optimizer that steps during backward does not go with mixed_precision: the "
                "parameters are then copies of low precision"
            )

        def average(state: None, bucket: GradBucket) -> Future[Tensor]:
            return ddp.reducer._run_allreduce_hook(bucket)

        ddp.register_comm_hook(None, _hook_then_optimizer(average, self._state))


def _as_overlapped_optim(
    optim_cls: type[Optimizer], params: Iterable[Tensor] | None, *args: Any, **kwargs: Any
) -> OverlappedOptimizer:
    """Return an optimizer of ``params``, or of all, that DistributedDataParallel can run."""
    return OverlappedOptimizer(optim_cls, params, *args, **kwargs)
