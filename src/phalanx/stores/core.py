"""The stores that the native core implements: one set of methods over one native interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.stores.base import Store, Timeout, seconds

if TYPE_CHECKING:
    from phalanx import _native


class CoreStore(Store):
    """A store over a native one. Waiting releases the GIL, and Ctrl-C ends it."""

    def __init__(self, core: _native.Store) -> None:
        super().__init__()
        self._core = core

    def set(self, key: str, value: str | bytes) -> None:
        self._core.set(key, value, self._seconds)

    def get(self, key: str) -> bytes:
        return self._core.get(key, self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._core.add(key, amount, self._seconds)

    def append(self, key: str, value: str | bytes) -> None:
        self._core.append(key, value, self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return self._core.check(keys, self._seconds)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._core.wait(keys, self._seconds if timeout is None else seconds(timeout))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._core.compare_set(key, expected_value, desired_value, self._seconds)

    def delete_key(self, key: str) -> bool:
        return self._core.delete_key(key, self._seconds)

    def num_keys(self) -> int:
        return self._core.num_keys(self._seconds)

    def list_keys(self) -> list[str]:
        return self._core.list_keys(self._seconds)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._core.multi_get(keys, self._seconds)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._core.multi_set(keys, values, self._seconds)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._core.queue_push(key, value, self._seconds)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._core.queue_pop(key, block, self._seconds)

    def queue_len(self, key: str) -> int:
        return self._core.queue_len(key, self._seconds)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        limit = self._seconds if timeout is None else seconds(timeout)
        self._core.barrier(key, world_size, limit)

    def has_extended_api(self) -> bool:
        return True
