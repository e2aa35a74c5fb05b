"""Attributes that are replaced while somebody needs it, and put back after the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from phalanx import forks

Patch = tuple[Any, str, Any]  # an owner, an attribute's name, and what it is meanwhile


class Shared:
    """A context that many blocks can be in at once: the first enters it, the last leaves it."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        self.lock = threading.Lock()  # held while it is entered or left
        forks.renew(self, "lock", threading.Lock)
        self.num_users = 0
        self._context = context
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            self.num_users += 1
            if self.num_users == 1:
                self._stack.enter_context(self._context())

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.num_users -= 1
            if self.num_users == 0:
                self._stack.close()


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Have patches in place for the length of a block."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for patch in patches:
        setattr(*patch)
    try:
        yield
    finally:
        for each in kept:
            setattr(*each)
