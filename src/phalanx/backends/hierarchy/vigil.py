"""Waiting for another host, with an eye on whether that makes sense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phalanx import _native, bystanders
from phalanx.backends.engines.mailbox import Pending
from phalanx.backends.hierarchy.warden import Warden
from phalanx.errors import CollectiveMismatch, DistBackendError, DistTimeout, PeerFailed
from phalanx.types import Deadline

SLICE = 0.4  # seconds between two looks at what the other hosts tell
_GRACE = 5.0  # after an engine has failed, until somebody has said why


def _nothing() -> None:
    pass


class Vigil:
    """How the ranks of one group wait for each other. Ranks here are group ranks."""

    def __init__(self, warden: Warden | None, group: str, global_ranks: Sequence[int]) -> None:
        self._warden = warden
        self._group = group
        self._global_ranks = global_ranks

    def wait(
        self, work: Pending, deadline: Deadline, needs: Sequence[int], doing: str = ""
    ) -> None:
        """Wait for a message that takes these ranks.

        ``doing`` says what for, if only a new action of theirs can end the wait: until the message
        has begun to come it may be part of a deadlock.
        """
        with self.shown(doing, deadline, needs) as check:
            while not work.ended(min(deadline.left(), SLICE)):
                self.look(needs, check if work.is_awaited() else _nothing)
                if deadline.left() <= 0:
                    raise self._timeout(needs)
            error = work.exception()
            if error is None:
                return
        if isinstance(error, DistBackendError) and not isinstance(error, CollectiveMismatch):
            self._explain(error, needs)
        raise error

    @contextmanager
    def shown(
        self, doing: str, deadline: Deadline, needs: Sequence[int], any: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Let others see that this thread waits for these ranks, once it says so again and again.

        The block is given what to call for that; Deadlock is raised there.
        """
        is_lane = bystanders.includes(threading.current_thread())
        if self._warden is None or not doing or is_lane:
            yield _nothing
            return
        kind = doing.partition("(")[0]
        ranks = [self._global_ranks[rank] for rank in needs]
        roster, me = self._warden.roster, self._warden.rank
        waiting = _native.Waiting(roster, me, self._group, doing, ranks, deadline.left(), kind, any)
        try:
            yield waiting.check
        finally:
            waiting.close()

    def look(self, needs: Sequence[int], check: Callable[[], None] = _nothing) -> None:
        """Raise what is known to keep a wait for these ranks from ending.

        ``check`` is what `shown` gave: others may have left over a deadlock that this is part of.
        """
        if self._warden is not None:
            self._warden.read()
            check()
            self._warden.check(self._group, [self._global_ranks[rank] for rank in needs])

    def _explain(self, error: DistBackendError, needs: Sequence[int]) -> None:
        """Raise in place of an engine's error what the other hosts say of its cause."""
        if self._warden is None:
            return
        limit = time.monotonic() + _GRACE
        while time.monotonic() < limit:
            self.look(needs)
            time.sleep(0.1)
        names = ", ".join(str(self._global_ranks[rank]) for rank in needs)
        raise PeerFailed(f"the connection to rank {names} failed: {error}") from None

    def _timeout(self, needs: Sequence[int]) -> DistTimeout:
        names = ", ".join(str(self._global_ranks[rank]) for rank in needs)
        return DistTimeout(f"reached its timeout; not arrived: rank {names}, on another host")
