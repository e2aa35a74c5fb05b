"""Words between ranks that no group carries: whoever listens is busy, as far as a group can see."""

from __future__ import annotations

import threading
import time

import phalanx as dist


def tell(word: str, times: int = 1) -> None:
    """Say a word to the ranks that listen for it."""
    dist.group.WORLD.get_group_store().add(word, times)


def listen(word: str, times: int = 1) -> None:
    """Wait until a word has been said several times."""
    store, limit = dist.group.WORLD.get_group_store(), time.monotonic() + 50
    while store.add(word, 0) < times:
        assert time.monotonic() < limit, f"nobody said {word!r}"
        threading.Event().wait(0.01)
