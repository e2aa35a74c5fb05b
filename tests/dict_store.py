"""A store in a few lines of Python."""

from __future__ import annotations

import threading
from datetime import timedelta

from phalanx.errors import StoreTimeout
from phalanx.stores import Store


class DictStore(Store):
    """The least that a store of somebody else's has to write."""

    def __init__(self, shared: tuple[dict[str, bytes], threading.Condition] | None = None) -> None:
        super().__init__()
        self._shared = shared or ({}, threading.Condition())
        self._values, self._changed = self._shared

    def _put(self, key: str, value: str | bytes) -> None:
        if not isinstance(key, str) or not isinstance(value, (str, bytes)):
            raise TypeError("keys are str, values str or bytes")
        self._values[key] = value.encode() if isinstance(value, str) else value
        self._changed.notify_all()

    def set(self, key, value):
        with self._changed:
            self._put(key, value)

    def get(self, key):
        self.wait([key])
        return self._values[key]

    def add(self, key, amount):
        if not isinstance(amount, int):
            raise TypeError("amount is an int")
        with self._changed:
            total = int(self._values.get(key) or 0) + amount
            if not -(2**63) <= total < 2**63:
                raise ValueError("not a 64-bit integer")
            self._put(key, str(total))
            return total

    def check(self, keys):
        if isinstance(keys, str):
            raise TypeError("keys is a list")
        return all(key in self._values for key in keys)

    def wait(self, keys, timeout=None):
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.check(keys), self._seconds if timeout is None else timeout
            ):
                raise StoreTimeout("too late")

    def compare_set(self, key, expected_value, desired_value):
        with self._changed:
            current = self._values.get(key, b"")
            expected = (
                expected_value.encode() if isinstance(expected_value, str) else expected_value
            )
            if current == expected:
                self._put(key, desired_value)
            return self._values.get(key, expected)

    def delete_key(self, key):
        with self._changed:
            return self._values.pop(key, None) is not None

    def num_keys(self):
        return len(self._values)

    def list_keys(self):
        return list(self._values)

    def clone(self):
        twin = DictStore(self._shared)
        twin.set_timeout(self.timeout)
        return twin
