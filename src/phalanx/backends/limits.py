"""Timeouts of single operations, given in their options."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.backends.base import COLLECTIVES, MESSAGES, GroupBackend

_LIMITED = COLLECTIVES | MESSAGES


class Limited:
    """A transport whose operations have a timeout of their own."""

    def __init__(self, transport: GroupBackend, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        return partial(found, timeout=self._timeout) if name in _LIMITED else found
