"""Threads that never act for a rank: whoever waits is not kept from a deadlock by them.

Any other thread of a process may still send what its rank's peers wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

_marked: WeakSet[threading.Thread] = WeakSet()

# Where the thread classes of progress bars are defined.
_MODULES = {"rich.live", "tqdm._monitor"}


def mark(thread: threading.Thread) -> threading.Thread:
    """Say that ``thread`` never communicates, and return it."""
    _marked.add(thread)
    return thread


@contextmanager
def standing_by() -> Iterator[None]:
    """Have the calling thread be a bystander for the length of a block."""
    thread = threading.current_thread()
    _marked.add(thread)
    try:
        yield
    finally:
        _marked.discard(thread)


def includes(thread: threading.Thread) -> bool:
    """Say whether ``thread`` is one that never communicates."""
    return thread in _marked or type(thread).__module__ in _MODULES


def count() -> int:
    """Return how many threads of this process are bystanders."""
    return sum(map(includes, threading.enumerate()))
