"""What a forked child does with what it has copied from its parent: as little as it can.

The parent's threads are not in the child. Locks that they held stay locked there, what they were
about to do is never done, and joining or destroying what they work on may wait for ever. So a child
takes new locks, is no rank of its parent's worlds, and leaves their objects alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

Callback = Callable[[], object]

_callbacks: list[Callback] = []
_generation = 0  # forks between the process that loaded this module and this one


def after_fork_in_child(callback: Callback) -> Callback:
    """Have a function called in every forked child, in the order of registration.

    Another thread may have been anywhere when the process was forked, so the function must take no
    lock that existed before.
    """
    _callbacks.append(callback)
    return callback


def renew(owner: Any, name: str, make: Callable[[], object]) -> None:
    """Have an attribute of a module or an object made anew in every forked child.

    For locks: a child gets another. The one that was there is left as it is, so that a block which
    holds it in the thread that forks can still release it.
    """
    kept = weakref.ref(owner)

    def set_anew() -> None:
        if (found := kept()) is not None:
            setattr(found, name, make())

    after_fork_in_child(set_anew)


def leave_alone(thing: object) -> None:
    """Keep an object of the parent's for ever, with all that it holds: also when Python ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Origin:
    """Remembers the process that it was made in."""

    __slots__ = ("_generation",)

    def __init__(self) -> None:
        self._generation = _generation

    def is_here(self) -> bool:
        """Say whether this is that process, and no child that was forked from it since."""
        return self._generation == _generation


def _run() -> None:
    global _generation
    _generation += 1
    for callback in list(_callbacks):
        try:
            callback()
        except Exception:
            sys.excepthook(*sys.exc_info())  # the others are to be called all the same


os.register_at_fork(after_in_child=_run)
