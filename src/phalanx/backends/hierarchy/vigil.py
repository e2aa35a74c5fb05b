"""Waiting for another host, with an eye on whether that makes sense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phalanx import _native, bystanders, forks
from phalanx.backends.engines.mailbox import Pending
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.hierarchy.warden import StoreLost, Warden
from phalanx.errors import CollectiveMismatch, DistBackendError, DistTimeout, PeerFailed
from phalanx.types import Deadline

SLICE = 0.1  # seconds between two looks at what the warden knows
_GRACE = 5.0  # for what has begun to come, and for word of why an engine has failed


def _nothing() -> None:
    pass


class Vigil:
    """How one rank waits for the others of its group. Ranks here are group ranks.

    Errors raised here say what has happened, and leave it to the caller to say to which operation.
    """

    def __init__(
        self, warden: Warden, engine: MessageEngine, group: str, global_ranks: Sequence[int]
    ) -> None:
        self._warden = warden
        self._engine = engine
        self.group = group
        self.global_ranks = global_ranks
        self._closed = threading.Event()
        self.origin = forks.Origin()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Say that the group is closed: whoever still waits gives up at once."""
        self._closed.set()

    def wait(
        self,
        work: Pending,
        deadline: Deadline,
        needs: Sequence[int],
        doing: str = "",
        number: int = 0,
    ) -> None:
        """Wait for a message that takes these ranks.

        ``doing`` says what for, if only a new action of theirs can end the wait: until the message
        has begun to come it may be part of a deadlock. ``number`` is that of the collective, if it
        belongs to one: what has broken a later one does not matter here.
        """
        try:
            with self.shown(doing, deadline, needs) as check:
                while not work.ended(min(deadline.left(), SLICE)):
                    self.look(needs, number, check if work.is_awaited() else _nothing)
                    if deadline.left() <= 0:
                        self._expire(work, deadline.limit)
                        break
                if (error := work.exception()) is not None:
                    raise self._cause(error, needs, number, check)
        except BaseException:
            if self.origin.is_here():
                self._engine.withdraw(work)  # what comes now must not be written any more
            raise

    def _expire(self, work: Pending, limit: float) -> None:
        """Give a wait up, unless its message has begun to come and is soon here."""
        if self._engine.withdraw(work) or not work.ended(_GRACE):
            raise DistTimeout(f"reached its timeout of {limit:g} s")

    @contextmanager
    def shown(
        self, doing: str, deadline: Deadline, needs: Sequence[int], any: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Let others see that this thread waits for these ranks, once it says so again and again.

        The block is given what to call for that; Deadlock is raised there.
        """
        if not doing or bystanders.includes(threading.current_thread()):
            yield _nothing
            return
        kind = doing.partition("(")[0]
        ranks = [self.global_ranks[rank] for rank in needs]
        roster, me = self._warden.roster, self._warden.rank
        waiting = _native.Waiting(roster, me, self.group, doing, ranks, deadline.left(), kind, any)
        try:
            yield waiting.check
        finally:
            waiting.close()

    def look(self, needs: Sequence[int], number: int, check: Callable[[], None] = _nothing) -> None:
        """Raise what is known to keep a wait for these ranks from ending.

        ``check`` is what `shown` gave: others may have left over a deadlock that this is part of.
        """
        if not self.origin.is_here():
            raise DistBackendError(
                "this process was forked in the middle of an operation of its parent (by a signal "
                "handler): it is no rank; let a child that a handler forks end there"
            )
        check()
        if self._closed.is_set():
            raise DistBackendError("the group has been closed by its own rank")
        try:
            self._warden.check(self.group, number, [self.global_ranks[rank] for rank in needs])
        except DistBackendError:
            check()  # who fails over a deadlock does so when all know of it
            raise

    @contextmanager
    def explained(self, needs: Sequence[int], number: int = 0) -> Iterator[None]:
        """Have an error of the engine say what the other hosts know of its cause."""
        try:
            yield
        except DistBackendError as error:
            raise self._cause(error, needs, number) from None

    def _cause(
        self,
        error: BaseException,
        needs: Sequence[int],
        number: int,
        check: Callable[[], None] = _nothing,
    ) -> BaseException:
        """Return what to raise for an engine's error: what the other hosts say of its cause."""
        if isinstance(error, CollectiveMismatch) or not isinstance(error, DistBackendError):
            return _bare(error)
        limit = time.monotonic() + _GRACE
        self._warden.suspect([self.global_ranks[rank] for rank in self._engine.failed()])
        try:
            while time.monotonic() < limit:
                # Another rank's end may be why the one that is needed is lost.
                self.look([*needs, *self._engine.failed()], number, check)
                if type(error) is DistBackendError:
                    return _bare(error)  # of this rank's own
                time.sleep(0.1)
        except StoreLost as lost:
            return PeerFailed(f"{_bare(error)}; {lost}")
        except DistBackendError as cause:
            return cause
        return PeerFailed(str(_bare(error)))


def _bare(error: BaseException) -> BaseException:
    """Return an engine's error without the engine's name for what it was about."""
    reason = getattr(error, "reason", None)
    return error if reason is None else type(error)(reason)
