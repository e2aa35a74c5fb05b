"""What a store is, whatever holds its keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)


def seconds(timeout: Timeout) -> float:
    """Return a timeout, a timedelta or a number of seconds, as seconds; raise on anything else."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a timedelta or a number of seconds, not {type(timeout).__name__}"
        )
    if not math.isfinite(timeout):
        raise ValueError(f"timeout must be a finite number of seconds, not {timeout}")
    return float(timeout)


class Store(ABC):
    """Keys and values that all processes of a job see.

    Keys are str; values are given as str or bytes and come back as bytes. Any number of processes
    and threads may use one store at once, and each operation is atomic. Those that wait for a key
    raise `StoreTimeout` after the store's timeout, or the one given.

    A subclass defines the abstract methods; `append` and the queues are optional, and
    `has_extended_api` says whether they are there.
    """

    is_open = False  # to everybody who can connect, whatever this package does about it

    def __init__(self) -> None:
        self._seconds = DEFAULT_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long an operation waits for a key if it is not told otherwise."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long operations of this handle wait for a key."""
        self._seconds = seconds(timeout)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`, whether or not it exists.

        A store may still be at it when the call returns. Whatever is asked through the same handle
        next comes after it; other handles that wait for the key see it in time.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value of `key`, waiting for it if it does not exist yet."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the decimal number in `key` and return the sum; a missing key is 0."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` exist, now."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all of `keys` exist."""

    @abstractmethod
    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set `key` to `desired_value` if it holds `expected_value`, and return what it holds.

        A missing key counts as holding the empty value; if another one was expected the key stays
        missing, and `expected_value` is returned.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete `key` and return whether it existed."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys, queues not counted."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, queues left out, in no particular order."""

    @abstractmethod
    def clone(self) -> Store:
        """Return another handle onto the same store, with a timeout of its own."""

    def has_extended_api(self) -> bool:
        """Return whether `append` and the queues are supported."""
        return False

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to that of `key`; a missing key is empty."""
        raise self._unsupported("append")

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` at the end of the queue `key`.

        Queues live beside the keys: `wait` and `check` see a queue that is not empty, `get` and
        `num_keys` see none.
        """
        raise self._unsupported("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the value at the front of the queue `key`, in order of arrival among those waiting.

        If the queue is empty, wait for a value, or with `block=False` raise `DistQueueEmptyError`.
        """
        raise self._unsupported("queue_pop")

    def queue_len(self, key: str) -> int:
        """Return the length of the queue `key`; 0 if there is none."""
        raise self._unsupported("queue_len")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, waiting for those that do not exist yet."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of `keys` to the value at the same place."""
        if len(keys) != len(values):
            raise ValueError(
                f"multi_set: {len(keys)} keys but {len(values)} values; give one value for each key"
            )
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have come to the barrier `key`; it may be used again."""
        if world_size < 1:
            raise ValueError(f"barrier: world_size must be at least 1, not {world_size}")
        arrived = self.add(f"{key}/arrived", 1)
        # Whoever comes after a full house belongs to the next round.
        rounds, place = divmod(arrived - 1, world_size)
        done = f"{key}/round/{rounds}"
        if place == world_size - 1:
            self.set(done, b"")
        self.wait([done], self._seconds if timeout is None else timeout)

    def _unsupported(self, operation: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} has no {operation}; ask has_extended_api() before using it"
        )
