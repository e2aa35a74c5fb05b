"""Hooks that let an optimizer update parameters as soon as their gradients are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future

from phalanx.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from phalanx.parallel.buckets import GradBucket

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel

__all__: list[str] = []

Hook = Callable[[Any, GradBucket], Future[Tensor]]


class _OptimizerHookState:
    """An optimizer with a method ``step_param(param, gradient)``, and the parameters it is for.

    It may also have ``step_params``, which takes lists. Without ``params`` it is for all.
    """

    def __init__(self, functional_optim: Any, params: Iterable[Tensor] | None = None) -> None:
        if not hasattr(functional_optim, "step_param"):
            raise ValueError(
                f"{type(functional_optim).__name__} must implement method step_param, which "
                "updates one parameter"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def step(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update those of ``params`` that the optimizer is for."""
        chosen = self.params_to_optimize
        pairs = [
            (param, gradient)
            for param, gradient in zip(params, gradients, strict=True)
            if chosen is None or param in chosen
        ]
        if hasattr(self.functional_optimizer, "step_params"):
            self.functional_optimizer.step_params([p for p, _ in pairs], [g for _, g in pairs])
            return
        for param, gradient in pairs:
            self.functional_optimizer.step_param(param, gradient)


def _hook_then_optimizer(hook: Hook, optimizer_state: _OptimizerHookState) -> Hook:
    """Return a hook that does what ``hook`` does and then updates the bucket's parameters."""

    def hook_then_optimizer(state: Any, bucket: GradBucket) -> Future[Tensor]:
        def step(done: Future[Tensor]) -> Tensor:
            optimizer_state.step(bucket.parameters(), reduced_gradients(bucket, done))
            return bucket.buffer()

        return hook(state, bucket).then(step)

    return hook_then_optimizer


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """Return the hook for parameters that have optimizers of their own.

    Its state is a weak reference to the module under DistributedDataParallel. The gradients are
    averaged as without a hook. ``gradient_is_bucket_view`` is taken for torch's sake.
    """

    def apply_optim_in_backward_hook(
        state: weakref.ref[DistributedDataParallel], bucket: GradBucket
    ) -> Future[Tensor]:
        def step(done: Future[Tensor]) -> Tensor:
            gradients = reduced_gradients(bucket, done)
            for param, gradient in zip(bucket.parameters(), gradients, strict=True):
                if hasattr(param, "_in_backward_optimizers"):
                    param.grad = gradient
                    _step_own(param)
            return bucket.buffer()

        ddp = state()
        assert ddp is not None
        return ddp.reducer._run_allreduce_hook(bucket).then(step)

    return apply_optim_in_backward_hook


def _setup_in_backward(ddp: DistributedDataParallel) -> None:
    """Step the parameters that have optimizers of their own when they have been reduced.

    Where it is known only at the end of backward what a parameter and its gradient are, all are
    stepped then; otherwise bucket by bucket.
    """
    params = [p for p in ddp._module_parameters if hasattr(p, "_in_backward_optimizers")]
    for param in params:
        for handle in param_to_optim_hook_handle_map.pop(param, ()):
            handle.remove()
    at_the_end = ddp.find_unused_parameters or ddp.mixed_precision is not None
    if not at_the_end:
        hook = _apply_optim_in_backward_hook(ddp.gradient_as_bucket_view)
        ddp.register_comm_hook(weakref.ref(ddp), hook)
    ddp.reducer.on_finish = partial(_finish, params, at_the_end)


def _finish(params: Sequence[Tensor], step: bool) -> None:
    for param in params:
        if step and param.grad is not None:
            _step_own(param)
        param.grad = None


def _step_own(param: Tensor) -> None:
    for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()


def reduced_gradients(bucket: GradBucket, done: Future[Any]) -> list[Tensor]:
    """Return the gradients of a bucket as the hook whose future is ``done`` has made them."""
    value = done.value()
    result: Tensor = value if isinstance(value, Tensor) else value[0]
    if result.is_sparse:
        return [result]
    if result.data_ptr() != bucket.buffer().data_ptr():
        bucket.buffer().copy_(result.view(-1))
    return bucket.gradients()
