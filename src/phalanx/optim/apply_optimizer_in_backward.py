"""Optimizers that step a parameter during backward, as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

__all__: list[str] = []

# The hooks that step each parameter, for those who arrange for the steps themselves.
param_to_optim_hook_handle_map: Any = WeakTensorKeyDictionary()


def _apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: dict[str, Any],
    register_hook: bool = True,
) -> None:
    """Give each parameter an optimizer of its own, which steps it in every backward pass.

    A parameter that is given several has them step in that order. Its gradient is None after
    backward. Under DistributedDataParallel, steps follow the reduction. With ``register_hook``
    False, the optimizers are made and somebody else must step them.
    """
    for param in params:
        optimizer = optimizer_class([param], **optimizer_kwargs)
        facts = vars(param)
        facts.setdefault("_in_backward_optimizers", []).append(optimizer)
        facts.setdefault("_optimizer_classes", []).append(optimizer_class)
        facts.setdefault("_optimizer_kwargs", []).append(optimizer_kwargs)
        if register_hook and param not in param_to_optim_hook_handle_map:
            handle = param.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]
            param_to_optim_hook_handle_map[param] = [handle]


def _step(param: Tensor) -> None:
    for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    param.grad = None


def _get_in_backward_optimizers(module: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a module's parameters, to save or change what is in them."""
    return [
        optimizer
        for param in module.parameters()
        for optimizer in getattr(param, "_in_backward_optimizers", ())
    ]
