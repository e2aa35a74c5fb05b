"""Steps of some of an optimizer's parameters, for gradients that become ready in parts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def step_only(optimizer: Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Update ``params``, which are some of the optimizer's, by ``gradients``, and nothing else.

    What ``.grad`` is, on these parameters and on others, has no influence and does not change.
    """
    chosen = {id(param) for param in params}
    all_params = [group["params"] for group in optimizer.param_groups]
    own_gradients = [param.grad for param in params]
    try:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.to(param.dtype)
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        optimizer.step()
    finally:
        for group, group_params in zip(optimizer.param_groups, all_params, strict=True):
            group["params"] = group_params
        for param, own_gradient in zip(params, own_gradients, strict=True):
            param.grad = own_gradient


def check_steps_without_closure(optimizer_class: type[Optimizer]) -> None:
    """Raise ValueError if the optimizer needs a closure for its steps."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{optimizer_class.__name__} needs a closure, which a step during backward cannot have"
        )


class StepwiseOptimizer:
    """An optimizer that gets to know its parameters as their gradients come in.

    Takes an optimizer class and its arguments except the parameters.
    """

    def __init__(self, optimizer_class: type[Optimizer], *args: Any, **kwargs: Any) -> None:
        self.optimizer = optimizer_class([{"params": []}], *args, **kwargs)
        self._known: set[int] = set()

    def step_param(self, param: Tensor, gradient: Tensor) -> None:
        """Update one parameter."""
        self.step_params([param], [gradient])

    def step_params(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update parameters."""
        known = self.optimizer.param_groups[0]["params"]
        for param in params:
            if id(param) not in self._known:
                self._known.add(id(param))
                known.append(param)
        step_only(self.optimizer, params, gradients)
