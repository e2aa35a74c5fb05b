"""A part of another store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from phalanx.stores.base import Store, Timeout


class PrefixStore(Store):
    """Put `prefix/` before every key of another store, so that several users do not meet.

    The timeout is that of the store below, and so is the number of keys.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: prefix must be str, not {type(prefix).__name__}")
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore: store must be a Store, not {type(store).__name__}")
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        """What is put before every key, without the slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store that this one is a part of."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store._store
        return store

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def _join(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"store: a key must be str, not {type(key).__name__}")
        return f"{self._prefix}/{key}"

    def _join_all(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, str):
            raise TypeError("store: keys must be a list, not str")
        return [self._join(key) for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._join(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._join(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._join(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._join(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._join_all(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._store.wait(self._join_all(keys), timeout)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._store.compare_set(self._join(key), expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._join(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        start = f"{self._prefix}/"
        return [key.removeprefix(start) for key in self._store.list_keys() if key.startswith(start)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._join_all(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._join_all(keys), values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._join(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._join(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._join(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._join(key), world_size, timeout)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
