"""Averagers: when to average a model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

from phalanx.algorithms.model_averaging.utils import (
    Parameters,
    average_parameters_or_parameter_groups,
)
from phalanx.groups import ProcessGroup
from phalanx.world import is_outside, resolve

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """Average a model over ``process_group`` (None: the default one) at some of its steps.

    ``step`` is the number of steps so far. A rank outside the group keeps its own model.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        if not is_outside(process_group):
            process_group = resolve(process_group)
        self.process_group = process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average if it is time to, and count a step; call it after each step of the optimizer.

        ``params`` are a model's parameters or an optimizer's parameter groups.
        """


class PeriodicModelAverager(ModelAverager):
    """Average a model every ``period`` steps, the first time after ``warmup_steps``.

    For post-local SGD (https://arxiv.org/abs/1808.07217) use it with ``post_localSGD_hook``; its
    ``start_localSGD_iter`` should be equal to ``warmup_steps``.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        if period < 1:
            raise ValueError(f"period must be a positive number of steps, got {period}")
        if period == 1:
            warn_of_every_step()
        self.period = period
        self.warmup_steps = warmup_steps

    def average_parameters(self, params: Parameters) -> None:
        """Average if a period is over, and count a step.

        Only parameters that have a gradient on any rank are averaged.
        """
        past = self.step - self.warmup_steps
        if past >= 0 and past % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def check_warmup(warmup_steps: int) -> None:
    """Refuse a negative number of steps."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")


def warn_of_every_step() -> None:
    """Warn that a model that is averaged at every step gains nothing over averaged gradients."""
    warnings.warn(
        "a period of 1 averages the whole model at every step, which costs no less than averaging "
        "gradients: DistributedDataParallel alone does that",
        stacklevel=3,  # whoever makes the averager
    )
