"""Every exception of the package.

RuntimeError
└── DistError
    ├── BufferInUse                a tensor was touched before its operation was waited for
    ├── DistNetworkError           a connection could not be made or broke
    ├── DistStoreError             a store refused or lost a request
    │   ├── DistQueueEmptyError    queue_pop(block=False) found nothing
    │   └── StoreTimeout           (also DistTimeout)
    └── DistBackendError           an operation on a group failed
        ├── CollectiveMismatch     ranks asked for different operations
        ├── PeerFailed             a rank died, raised or left
        ├── Deadlock               ranks wait for each other for ever
        └── DistTimeout            (also TimeoutError)

Those that torch.distributed has too are kinds of torch's: ``except`` one of its classes catches
ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_theirs: Any = torch._C

# Told of every new DistBackendError (copies made by pickle among them): whatever fails, and in
# whatever thread, this is where a rank learns of it. Set by phalanx.debug.
observer: Callable[[DistBackendError], None] = lambda error: None  # noqa: E731


class _Here(threading.local):
    is_expected = False


_here = _Here()


@contextmanager
def expected() -> Iterator[None]:
    """Have errors that a block raises in this thread be answers to it, not failures."""
    before, _here.is_expected = _here.is_expected, True
    try:
        yield
    finally:
        _here.is_expected = before


class DistError(_theirs._DistError):  # type: ignore[misc]
    """Root of all errors raised by the package."""


class BufferInUse(DistError):
    """A tensor of an asynchronous operation was touched before its work was waited for."""


class DistNetworkError(DistError, _theirs._DistNetworkError):  # type: ignore[misc]
    """A connection could not be made or broke."""


class DistStoreError(DistError, _theirs._DistStoreError):  # type: ignore[misc]
    """A store refused or lost a request."""


class DistQueueEmptyError(DistStoreError, _theirs._DistQueueEmptyError):  # type: ignore[misc]
    """A queue was popped without blocking and had nothing in it."""


class DistBackendError(DistError, _theirs._DistBackendError):  # type: ignore[misc]
    """An operation on a group failed."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if not _here.is_expected:
            observer(self)


class CollectiveMismatch(DistBackendError):
    """Ranks of one group asked for operations that do not fit together."""


class PeerFailed(DistBackendError):
    """A rank that an operation needs has died, raised or left."""


class Deadlock(DistBackendError):
    """Ranks wait for each other in a way that cannot move."""


class DistTimeout(DistBackendError, TimeoutError):
    """A deadline passed while waiting for other ranks."""


class StoreTimeout(DistStoreError, DistTimeout):
    """A deadline passed while waiting for a key of a store."""
