"""Mixed precision: a model that computes in a lower precision than its parameters are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable


@dataclass
class MixedPrecision:
    """Element types for parameters and inputs, for the reduction of gradients, and for buffers.

    None leaves a type as it is; gradients are reduced in that of the parameters by default. Only
    floating point tensors are converted. The optimizer and checkpoints see full precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class LowPrecision:
    """The parameters of a module in two precisions, of which one at a time is in place.

    The lower one is there from forward to the end of backward. A gradient that was there before
    is put aside for that time, and added to the new one afterwards, in full precision. Without a
    ``dtype`` parameters stay what they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.parameters: list[Any] = [p for p in parameters if p.is_floating_point()]
        self.dtype = dtype
        self._kept: list[Tensor | None] = [None] * len(self.parameters)
        self._index = {param: i for i, param in enumerate(self.parameters)}
        self.is_low = False
        for param in self.parameters:
            param._fp_param = param.data
            param._mp_param = torch.empty(0, dtype=dtype)

    @torch.no_grad()
    def lower(self) -> None:
        """Put the lower precision in place."""
        if self.is_low:
            return
        self.is_low = True
        for i, param in enumerate(self.parameters):
            self._kept[i], param.grad = param.grad, None
            param._fp_param = param.data
            param.data = param._mp_param = param.data.to(self.dtype)

    def kept(self, param: Tensor) -> Tensor | None:
        """Return the gradient that was put aside."""
        return self._kept[self._index[param]]

    def restore_after_backward(self, outputs: Iterable[Tensor]) -> None:
        """Put full precision in place at the end of the backward pass from these outputs."""

        def queue(_: Tensor) -> None:
            Variable._execution_engine.queue_callback(self.restore)

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(queue)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def restore(self) -> None:
        """Put full precision in place, gradients included."""
        if not self.is_low:
            return
        self.is_low = False
        for i, param in enumerate(self.parameters):
            grad, kept = param.grad, self._kept[i]
            self._kept[i] = param.grad = None
            param.data = param._fp_param
            param._mp_param = torch.empty(0, dtype=self.dtype)
            if grad is not None:
                grad = grad.to(param.dtype)
                kept = grad if kept is None else kept.add_(grad)
            param.grad = kept


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return nested inputs with their floating point tensors converted."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(v, dtype) for v in value))
    if isinstance(value, list | tuple | set):
        return type(value)(cast_floats(v, dtype) for v in value)
    if isinstance(value, dict):
        return type(value)({k: cast_floats(v, dtype) for k, v in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: cast_floats(getattr(value, f.name), dtype) for f in fields(value) if f.init
        }
        return replace(value, **changes)
    return value


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating point buffers of a module, but those that are to be ignored."""
    for buffer in module.buffers():
        if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
            buffer.data = buffer.to(dtype)
