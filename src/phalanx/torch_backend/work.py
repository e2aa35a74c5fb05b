"""What torch is given for operations in flight."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd import graph
from torch.futures import Future

from phalanx import bystanders
from phalanx.errors import DistTimeout
from phalanx.torch_backend import theirs
from phalanx.torch_backend.untraced import untraced
from phalanx.work import Work

_BACKWARD = graph._engine_run_backward.__code__  # all that Python sees of a backward pass
_NO_TIMEOUT = timedelta(0)  # torch's way to ask for the default

_callers: set[int] = set()  # threads that run callbacks now, of any group


class Completer:
    """Completes the futures of one group's works.

    Those of collectives, which end in the order in which they were issued, are completed in that
    order, by a thread that is started with the first. Others have a thread each.

    Callbacks may communicate, as those of DistributedDataParallel's hooks do, and all ranks have to
    communicate in the same order: `settle`, before anybody else does, lets them go first.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Work, Future[Any], bool] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self.unsettled = 0  # futures of collectives with callbacks that may not have run

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
            self._start()
            self._queue.put((work, trigger, goes_first))
        else:  # also if a callback asks: it may wait, and not for its own thread
            threading.Thread(
                target=self._complete,
                args=(work, trigger, goes_first),
                name="phalanx-future",
                daemon=True,
            ).start()
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
        """Let the thread end, once it has completed all futures."""
        self._queue.put(None)

    def _start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="phalanx-futures", daemon=True
                )
                self._thread.start()

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


def _outputs(work: Work) -> list[torch.Tensor]:
    work.wait()
    return work.result()


# Works that nobody has waited for, the newest.
_dropped: deque[TorchWork] = deque(maxlen=64)


@untraced
class TorchWork(theirs.Work):  # type: ignore[misc]
    """A work of Phalanx's, as torch sees works."""

    def __init__(self, work: Work, completer: Completer, in_order: bool) -> None:
        super().__init__()
        self._work = work
        self._completer = completer
        self._in_order = in_order
        self._future: Future[Any] | None = None
        self._is_awaited = False

    def __del__(self) -> None:
        # Torch's C++ may be left as the only one who holds it (DistributedDataParallel.join has it
        # keep one from forward to backward), and would find a work without these methods.
        if not self._is_awaited:
            _dropped.append(self)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._is_awaited = True
        return self._work.wait(timeout if timeout > _NO_TIMEOUT else None)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work.source_rank()

    def synchronize(self) -> None:
        self._work.wait()

    def get_future(self) -> Future[Any]:
        self._is_awaited = True
        if self._future is None:
            # Torch's reducer, in C++, has no callbacks that communicate.
            by_reducer = sys._getframe(1).f_code is _BACKWARD
            self._future = self._completer.future(self._work, self._in_order, not by_reducer)
        return self._future


@untraced
class Done(theirs.Work):  # type: ignore[misc]
    """An operation that was over before its work was asked for."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future
