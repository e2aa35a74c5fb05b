"""What each rank of this process notes for the others while the level is DETAIL.

That is its latest calls and, while it is in none of them, where it stands: a thread looks at that
a few times in a second.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import FrameType

from phalanx import bystanders, forks
from phalanx.backends.base import GroupBackend
from phalanx.debug import notes
from phalanx.debug.notes import Entry
from phalanx.world import World

_PERIOD = 0.2  # seconds


class Diary:
    """The latest calls of one rank, on all its groups, and where it stands between them."""

    def __init__(self, backend: GroupBackend) -> None:
        self._backend = backend
        self._entries: deque[Entry] = deque(maxlen=12)
        self._in_calls = 0
        # Of the latest call, whose thread is the one to look at.
        self.thread = threading.get_ident()
        # A signal handler may make calls too.
        self._lock = threading.RLock()

    def begin(self, entry: Entry) -> None:
        """Note a call."""
        with self._lock:
            self._in_calls += 1
            self.thread = threading.get_ident()
            self._entries.append(entry)
            self._backend.note(notes.written(list(self._entries)))

    def end(self) -> None:
        """Know that a call is over."""
        with self._lock:
            self._in_calls -= 1

    def look(self, frame: FrameType | None) -> None:
        """Note where the rank stands, unless it is in a call."""
        with self._lock:
            if self._in_calls == 0 and frame is not None:
                stack = notes.shown(notes.user_stack(frame))
                now = Entry(notes.NOW, str(time.monotonic_ns()), "", stack)
                self._backend.note(notes.written([*self._entries, now]))


_diaries: dict[World, Diary] = {}
_lock = threading.RLock()
_stop: threading.Event | None = None


def of(world: World, backend: GroupBackend) -> Diary:
    """Return the diary of a world's rank; a new one is noted through ``backend``."""
    global _stop
    with _lock:
        diary = _diaries.get(world)
        if diary is None:
            diary = _diaries[world] = Diary(backend)
        if _stop is None:
            _stop = threading.Event()
            thread = threading.Thread(
                target=_look_at_all, args=(_stop,), name="phalanx-detail", daemon=True
            )
            bystanders.mark(thread).start()
        return diary


def close(world: World) -> None:
    """Stop noting where the rank of a world stands."""
    global _stop
    with _lock:
        _diaries.pop(world, None)
        if not _diaries and _stop is not None:
            _stop.set()
            _stop = None


@forks.after_fork_in_child
def _forget() -> None:
    global _lock, _stop
    _lock, _stop = threading.RLock(), None  # somebody who is not here may hold it
    _diaries.clear()


def _look_at_all(stop: threading.Event) -> None:
    while not stop.wait(_PERIOD):
        frames = sys._current_frames()
        for diary in list(_diaries.values()):
            diary.look(frames.get(diary.thread))
