"""Gradients that somebody else has to do with: those stay where they are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from phalanx.parallel.buckets import Slot

_slots: Any = WeakIdKeyDictionary()  # lists of references to slots, by parameter

_TIMES = 20  # that a count is tried: Python may change its code when it has run a few times
_UNKNOWN = -1


def share(slots: Sequence[Slot]) -> None:
    """Let the slots of parameters that several reducers have know of it."""
    for slot in slots:
        alive = [each for each in _slots.get(slot.param, []) if each() is not None]
        _slots[slot.param] = [*alive, weakref.ref(slot)]
        if alive:
            for each in _slots[slot.param]:
                each().is_shared = True


def _count(owner: object, name: str) -> int:
    # The same code for what is tried and what is asked: what it counts of its own is the same.
    return sys.getrefcount(getattr(owner, name))


class Holding:
    """A tensor that nobody but us has: how many references Python counts then.

    That depends on the versions of Python and torch, so it is tried. If it is not one more with one
    more reference, nothing can be told from it, and others are taken to have every tensor.
    """

    def __init__(self, owner: object, name: str) -> None:
        alone = {_count(owner, name) for _ in range(_TIMES)}
        kept = getattr(owner, name)
        with_another = {_count(owner, name) for _ in range(_TIMES)}
        del kept
        number = alone.pop()
        self._own = number if not alone and with_another == {number + 1} else _UNKNOWN

    def is_known(self) -> bool:
        """Say whether references can be counted."""
        return self._own != _UNKNOWN

    def is_shared(self, owner: object, name: str) -> bool:
        """Say whether anybody else has the tensor that is this attribute, or may have it."""
        return self._own == _UNKNOWN or _count(owner, name) > self._own


class _Sample:
    """Holds tensors as slots and parameters do."""

    def __init__(self) -> None:
        self.view = torch.empty(1)
        self.param = torch.nn.Parameter(torch.empty(1))


class Holdings:
    """The ways in which a gradient is held."""

    def __init__(self) -> None:
        sample = _Sample()
        self.by_slot = Holding(sample, "view")
        sample.param.grad = torch.empty(1)
        self.by_parameter = Holding(sample.param, "grad")
        sample.param.grad = sample.view
        self.by_both = Holding(sample, "view")


held = Holdings()


def is_held(param: Tensor) -> bool:
    """Say whether somebody else has a parameter's gradient, and expects the result in its memory.

    Either as an object, or because it is a piece of something larger. The caller must not have it.
    """
    if held.by_parameter.is_shared(param, "grad"):
        return True
    grad: Any = param.grad
    return bool(grad.untyped_storage().nbytes() > grad.numel() * grad.element_size())
