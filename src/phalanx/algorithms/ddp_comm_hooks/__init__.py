"""Communication hooks: other ways to reduce the gradients of DistributedDataParallel.

Within one machine none is faster than the plain average, which reduces gradients where they lie;
compression pays where they have to travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from phalanx.algorithms.ddp_comm_hooks import debugging_hooks as debugging
from phalanx.algorithms.ddp_comm_hooks import default_hooks as default
from phalanx.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap
from phalanx.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from phalanx.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from phalanx.groups import ProcessGroup

__all__ = [
    "DDPCommHookType",
    "debugging",
    "default",
    "optimizer_overlap",
    "powerSGD",
    "quantization",
    "register_ddp_comm_hook",
]


@dataclass(frozen=True)
class _Hook:
    """Registers a hook, with ``state`` as its state."""

    hook: default.Hook

    def __call__(self, model: Any, state: Any = None) -> None:
        model.register_comm_hook(state, self.hook)


@dataclass(frozen=True)
class _PowerSGD:
    """Registers a PowerSGD hook, with a state of its own for the process group ``state``."""

    hook: default.Hook
    matrix_approximation_rank: int

    def __call__(
        self, model: Any, state: ProcessGroup | None = None, start_powerSGD_iter: int = 1_000
    ) -> None:
        own = powerSGD.PowerSGDState(
            state, self.matrix_approximation_rank, start_powerSGD_iter=start_powerSGD_iter
        )
        model.register_comm_hook(own, self.hook)


class DDPCommHookType(Enum):
    """The hooks by name; ``DDPCommHookType.FP16_COMPRESS.value(model, state)`` registers one.

    The state is a process group, None for the default one, for all of them.
    """

    ALLREDUCE = _Hook(default.allreduce_hook)
    FP16_COMPRESS = _Hook(default.fp16_compress_hook)
    BF16_COMPRESS = _Hook(default.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Hook(quantization.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Hook(quantization.quantization_perchannel_hook)
    POWER_SGD = _PowerSGD(powerSGD.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _PowerSGD(powerSGD.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _PowerSGD(powerSGD.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _PowerSGD(powerSGD.batched_powerSGD_hook, 2)
    NOOP = _Hook(debugging.noop_hook)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register one of the hooks with a DistributedDataParallel ``model``."""
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(
            f"comm_hook_type must be a DDPCommHookType, got {comm_hook_type!r} "
            f"(known: {', '.join(DDPCommHookType.__members__)})"
        )
    comm_hook_type.value(model=model, state=state)
