"""Attributes that are replaced while somebody needs it, and put back after the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Patches:
    """A list of `(owner, name, value)`: what an owner's attribute is meanwhile."""

    def __init__(self, *patches: tuple[Any, str, Any]) -> None:
        self._patches = list(patches)
        self._lock = threading.Lock()
        self._users = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have them in place for the length of a block, in which others may begin."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._swap()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._swap()

    def _swap(self) -> None:
        """Put each in place and keep what was there, or the other way round."""
        for i, (owner, name, value) in enumerate(self._patches):
            self._patches[i] = (owner, name, getattr(owner, name))
            setattr(owner, name, value)
