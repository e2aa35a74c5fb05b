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
    stays, in full precision, and autograd adds to it; a new one is converted afterwards. Without a
    ``dtype`` parameters stay what they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.parameters: list[Any] = [p for p in parameters if p.is_floating_point()]
        self.dtype = dtype
        self.is_low = False
        self._versions: list[int] = []
        for param in self.parameters:
            param._fp_param = param.data
            param._mp_param = torch.empty(0, dtype=dtype)

    @torch.no_grad()
    def lower(self) -> bool:
        """Put the lower precision in place; say whether it was not there already."""
        if self.is_low:
            if self._find_changed() is not None:
                self.restore()
            return False
        self.is_low = True
        for param in self.parameters:
            param._fp_param = param.data
            param.data = param._mp_param = param.data.to(self.dtype)
        self._versions = [param._version for param in self.parameters]
        return True

    @torch.no_grad()
    def restore(self, failed: bool = False) -> None:
        """Put full precision in place, gradients included; raise if the lower one was changed.

        ``failed`` says that an exception is on its way already, which is not to be hidden.
        """
        if not self.is_low:
            return
        changed = self._find_changed()
        self.is_low = False
        for param in self.parameters:
            grad, param.grad = param.grad, None
            param.data = param._fp_param
            param._mp_param = torch.empty(0, dtype=self.dtype)
            if grad is not None:
                param.grad = grad.to(param.dtype)
        if changed is not None and not failed:
            raise RuntimeError(
                f"a parameter {tuple(changed.shape)} was changed between a forward pass and its "
                "backward pass, while it was in low precision, and the change is lost: evaluate "
                "under torch.no_grad(), and step the optimizer after backward"
            )

    def _find_changed(self) -> Tensor | None:
        """Return a parameter that was changed while the copy in low precision was in place."""
        if self.dtype is None:
            return None
        for param, version in zip(self.parameters, self._versions, strict=True):
            if param._version != version or param.data_ptr() != param._mp_param.data_ptr():
                changed: Tensor = param
                return changed
        return None

    def restore_after_backward(self, outputs: Iterable[Tensor]) -> None:
        """Put full precision in place at the end of the backward pass from these outputs."""

        def queue(_: Tensor) -> None:
            Variable._execution_engine.queue_callback(_Restoration(self))

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(queue)  # type: ignore[no-untyped-call]


class _Restoration:
    """What autograd calls at the end of a backward pass, or drops if an exception leaves it."""

    def __init__(self, low: LowPrecision) -> None:
        self._low = low
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._low.restore()

    def __del__(self) -> None:
        if not self._called:
            self._low.restore(failed=True)


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
