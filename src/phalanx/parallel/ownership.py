"""Gradients that somebody else has to do with: those stay where they are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.parallel.buckets import Slot

_slots: Any = WeakIdKeyDictionary()  # lists of references to slots, by parameter


def share(slots: Sequence[Slot]) -> None:
    """Let the slots of parameters that several reducers have know of it."""
    for slot in slots:
        alive = [each for each in _slots.get(slot.param, []) if each() is not None]
        _slots[slot.param] = [*alive, weakref.ref(slot)]
        if alive:
            for each in _slots[slot.param]:
                each().is_shared = True


# Of the parameter, of two variables and of the call that asks.
_REFERENCES = 4


def is_held(grad: Tensor) -> bool:
    """Say whether somebody else has a gradient, who expects the result in its memory.

    Either as an object, or because it is a piece of something larger.
    """
    return (
        sys.getrefcount(grad) > _REFERENCES
        or grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    )
