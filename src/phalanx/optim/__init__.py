"""Optimizers that know of other ranks."""

from phalanx.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as _apply_optimizer_in_backward,
)
from phalanx.optim.apply_optimizer_in_backward import (
    _get_in_backward_optimizers as _get_in_backward_optimizers,
)
from phalanx.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from phalanx.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
