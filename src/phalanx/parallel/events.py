"""What autograd tells the reducer: gradients that come, and the end of a backward pass.

All of it refers to the reducer weakly, so that a model that is wrapped no more is reduced no more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.parallel.buckets import Slot

if TYPE_CHECKING:
    from phalanx.parallel.reducer import Reducer

_AUTOGRAD = ("torch/autograd/graph.py", "torch/autograd/__init__.py")


def arrival(reference: weakref.ref[Reducer], slot: Slot) -> Callable[[Tensor], None]:
    """Return what to call when the gradient of a parameter has been accumulated to.

    Written for speed: it runs once per parameter and step.
    """

    def arrived(param: Tensor) -> None:
        reducer = reference()
        if reducer is None or not (reducer.running or reducer.on_stray(slot)):
            return
        grad = param.grad
        if grad is None:  # undefined: as if there were none
            return
        left = slot.left = slot.left - 1
        if left:
            reducer.on_repeat(slot)
            return
        reducer.arrived.append(slot)
        bucket = slot.bucket
        if grad is slot.view:
            reducer.on_accumulated(slot)
        elif slot.at_once:
            reducer.move_in(slot, grad)
        else:
            bucket.loose.append(slot)
        pending = bucket.pending = bucket.pending - 1
        if not pending:
            reducer.launch_ready()

    return arrived


class Departure:
    """What to call when a gradient reaches an output of the module, from which the pass goes on."""

    def __init__(self, reducer: weakref.ref[Reducer]) -> None:
        self._reducer = reducer

    def __call__(self, _: Tensor) -> None:
        alive = self._reducer()
        if alive is not None and not _is_for_inputs():
            alive.on_output(self)


class End:
    """What autograd calls at the end of a backward pass, or drops if an exception leaves it."""

    def __init__(self, reducer: weakref.ref[Reducer]) -> None:
        self._reducer = reducer
        self._called = False

    def __call__(self) -> None:
        self._called = True
        if (alive := self._reducer()) is not None:
            alive.on_end()

    def __del__(self) -> None:
        if not self._called and (alive := self._reducer()) is not None:
            alive.on_lost()


def _is_for_inputs() -> bool:
    """Say whether the running pass is for given inputs, as of torch.autograd.grad.

    It accumulates to those parameters only that are among the inputs, if any.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_AUTOGRAD):
        if frame.f_code is torch.autograd.grad.__code__:
            return True
        if frame.f_code is torch.autograd.backward.__code__:
            return frame.f_locals.get("inputs") is not None
        frame = frame.f_back
    return False
