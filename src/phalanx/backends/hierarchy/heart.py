"""Signs of life of a host, in any store."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from phalanx import _native, bystanders
from phalanx.stores import PrefixStore
from phalanx.stores.base import Store
from phalanx.stores.core import CoreStore

StoreError = RuntimeError  # what any store raises that cannot be reached, torch's too

_BEAT = 0.8  # seconds between two signs of life
_END = 3.0  # for the last one to be taken
_REQUEST = 3.0  # for one of them, where the store is not the core's


class Heart(Protocol):
    """Raises a count in a store from time to time."""

    def stop(self) -> None: ...

    def silence(self) -> float:
        """Return the seconds since the store last answered."""

    def refused(self) -> bool:
        """Say whether the store could not be reached at all, rather than being slow to answer."""


def start(store: Store, key: str) -> Heart:
    """Have a count in a store be raised from now on.

    The native core does it where the store is its own: then nothing that Python does delays it.
    """
    core, name = store, key
    while isinstance(core, PrefixStore):
        name, core = f"{core.prefix}/{name}", core.underlying_store
    if isinstance(core, CoreStore):
        return _native.Heart(core._core, name, _BEAT)
    twin = store.clone()
    twin.set_timeout(_REQUEST)
    return _ThreadHeart(twin, key)


class _ThreadHeart:
    """A heart in a thread of Python's, for stores that others wrote."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._answered = time.monotonic()
        self._refused = False
        self._stopping = threading.Event()
        thread = threading.Thread(target=self._beat, name="phalanx-heart", daemon=True)
        self._thread = bystanders.mark(thread)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                self._store.add(self._key, 1)
                self._answered = time.monotonic()
                self._refused = False
            except StoreError:
                # One that is stopped takes all of the time instead.
                self._refused = time.monotonic() - begun < _REQUEST / 2
            if self._stopping.wait(_BEAT):
                return

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_END)

    def silence(self) -> float:
        return time.monotonic() - self._answered

    def refused(self) -> bool:
        return self._refused
