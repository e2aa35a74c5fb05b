"""A store of torch's, as Phalanx uses stores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from phalanx.errors import StoreTimeout
from phalanx.stores.base import Store, Timeout, seconds
from phalanx.types import Deadline

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # seconds between looks


class TorchStore(Store):
    """A store of torch's. It remembers what was set through it, to take that away again."""

    is_open = True

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._own: set[str] = set()
        self.set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._own.add(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        self._own.add(key)
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        if isinstance(keys, str):
            raise TypeError("store: keys must be a list, not str")
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = self._seconds if timeout is None else seconds(timeout)
        deadline, pause = Deadline(limit), _FIRST_PAUSE
        # A wait of torch's has no ear for signals, and logs a warning when its time is over.
        while not self.check(keys):
            left = deadline.left()
            if left <= 0:
                raise StoreTimeout(f"waited {limit:g} s for {list(keys)} in {self._store!r}")
            time.sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        self._own.add(key)
        return bytes(self._store.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        self._own.discard(key)
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        return list(self._store.list_keys())

    def clone(self) -> Store:
        twin = TorchStore(self._store.clone())
        twin.set_timeout(self.timeout)
        return twin

    def tidy(self) -> None:
        """Delete the keys that this handle has set.

        A group that is made later under the same name, in the same store, must not find them.
        """
        for key in list(self._own):
            with suppress(RuntimeError):  # not all stores can delete
                self.delete_key(key)
