"""Futures of works, completed without anybody's waiting."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from torch.futures import Future

from phalanx import bystanders, forks
from phalanx.errors import DistTimeout
from phalanx.work import Work

_PATIENCE = 2.0  # seconds for a thread to end in
_callers: set[int] = set()  # threads that run callbacks now, of any group
_open: WeakSet[Completer] = WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # A thread that is in torch's C++ when the interpreter ends would take the process with it.
    for completer in list(_open):
        completer.close()


class Completer:
    """Completes the futures of one group's works.

    Those of collectives, which end in the order in which they were issued, are completed in that
    order, by a thread that is started with the first. Others have a thread each.

    Callbacks may communicate, as those of DistributedDataParallel's hooks do, and all ranks have to
    communicate in the same order: `settle`, before anybody else does, lets them go first.
    """

    def __init__(self) -> None:
        _open.add(self)
        self._begin()

    def _begin(self) -> None:
        self._queue: SimpleQueue[tuple[Work, Future[Any], bool] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._changed = threading.Condition()
        self.unsettled = 0  # futures of collectives with callbacks that may not have run
        self.dropped: deque[Any] = deque(maxlen=64)  # works that nobody has waited for, the newest

    def begin_anew(self) -> None:
        """Forget what threads were to do that a forked child does not have."""
        forks.leave_alone((self._queue, self.dropped))
        self._begin()

    def future(self, work: Work, in_order: bool, has_callbacks: bool) -> Future[Any]:
        """Return a future of the list of output tensors of ``work``."""
        trigger: Future[Any] = Future()
        # An error has to be raised in a callback: torch's C++ reads another kind of error as a
        # result.
        outcome: Future[Any] = trigger.then(lambda _: _outputs(work))
        if work.is_completed():
            trigger.set_result(None)
            return outcome
        goes_first = in_order and has_callbacks
        with self._changed:
            self.unsettled += goes_first
        if in_order and threading.get_ident() not in _callers:
            with self._changed:
                if self._thread is None:
                    self._thread = self._start(self._run)
            self._queue.put((work, trigger, goes_first))
        else:  # also if a callback asks: it may wait, and not for its own thread
            self._start(self._complete, work, trigger, goes_first)
        return outcome

    def settle(self, timeout: float) -> None:
        """Wait until the callbacks of collectives' futures have run, unless one of them asks."""
        if threading.get_ident() in _callers:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self.unsettled, timeout):
                raise DistTimeout(
                    f"waited {timeout:g} s for callbacks of futures of this group's works: they "
                    "go before its next operation, so they must not wait for it"
                )

    def close(self) -> None:
        """Let the threads end, once they have completed all futures."""
        self._queue.put(None)
        self.dropped.clear()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)

    def _start(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name="phalanx-future", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _next(self) -> tuple[Work, Future[Any], bool] | None:
        with bystanders.standing_by():
            return self._queue.get()

    def _run(self) -> None:
        while item := self._next():
            self._complete(*item)
            del item

    def _complete(self, work: Work, trigger: Future[Any], goes_first: bool) -> None:
        with suppress(Exception):  # raised again in the future's callback
            work.wait()
        _callers.add(threading.get_ident())
        trigger.set_result(None)
        _callers.discard(threading.get_ident())
        with self._changed:
            self.unsettled -= goes_first
            self._changed.notify_all()


@forks.after_fork_in_child
def _leave_to_parent() -> None:
    for completer in list(_open):
        completer.begin_anew()
    _open.clear()
    _callers.clear()


def _outputs(work: Work) -> list[torch.Tensor]:
    work.wait()
    return work.result()
