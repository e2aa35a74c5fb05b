"""An optimizer that averages the model from time to time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from phalanx.algorithms.model_averaging.averagers import ModelAverager

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Step with ``optim``, then let ``averager`` average the parameters if it is time to.

    Post-local SGD: https://arxiv.org/abs/1808.07217. Use it with ``post_localSGD_hook``, whose
    ``start_localSGD_iter`` should be equal to the averager's ``warmup_steps``. All else (parameter
    groups, state, hooks) is that of ``optim``, so learning rate schedulers work on either.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.averager = averager

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "averager"):  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What ``optim`` remembers of each parameter."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of ``optim``."""
        return self.optim.param_groups

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``optim``, and the averager's step as ``"step"``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of ``optim`` and the averager's step: it is not warmed up twice.

        Where there is no step to restore, it is 0, with a warning.
        """
        own = dict(state_dict)
        step = own.pop("step", None)
        self.optim.load_state_dict(own)
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = step or 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with ``optim``, then average if it is time to; return what ``optim`` returned."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give ``optim`` further parameters."""
        self.optim.add_param_group(param_group)
