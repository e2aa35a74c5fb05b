"""Handles of operations that have been started and may still be running."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from phalanx import bystanders, forks
from phalanx.errors import DistBackendError, DistTimeout
from phalanx.types import Deadline, Timeout, seconds


class Work(ABC):
    """An operation in flight.

    Whoever holds it may wait from any thread, any number of times. Tensors of the operation
    belong to it until it has completed. Dropping a work does not stop it.
    """

    _future: Future[Any] | None = None

    @abstractmethod
    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until done, return True; raise what the operation raised, or DistTimeout.

        ``timeout`` (None: the deadline of the operation itself) bounds this wait, not the
        operation.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Say, without blocking, whether the operation has ended, well or not."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return what the operation raised, None while it runs and when it went well."""

    @abstractmethod
    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of the completed operation."""

    def is_success(self) -> bool:
        """Say whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def source_rank(self) -> int:
        """Return the group rank that a completed receive got its message from."""
        raise ValueError("source_rank() is only known for a receive")

    def _source_rank(self) -> int:  # torch's spelling
        return self.source_rank()

    def synchronize(self) -> None:
        """Block until done, as ``wait()``."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a ``torch.futures.Future`` of the list of output tensors."""
        future = self._future
        if future is None:
            deferral = _deferral.get()
            if deferral is not None:
                future = self._future = deferral.future(self)
                return future
            future = self._future = Future()
            if self.is_completed():
                self._fulfil(future)
            else:
                threading.Thread(
                    target=self._fulfil, args=(future,), name="phalanx-future", daemon=True
                ).start()
        return future

    def _fulfil(self, future: Future[Any]) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(_rootless(error))
        else:
            future.set_result(self.result())


_deferral: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


class Deferral:
    """Futures that are completed by whoever waits for them, one after the other.

    Their callbacks thus run on one thread, in the order in which the futures were asked for, so
    that collectives which callbacks start come in the same order on all ranks.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Work, DeferredFuture]] = deque()
        self._lock = threading.RLock()
        self.called_at: float | None = None

    def future(self, work: Work) -> DeferredFuture:
        """Return a future of ``work``, completed in its turn."""
        future = DeferredFuture(self)
        self._queue.append((work, future))
        return future

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let every ``get_future()`` of this thread come here."""
        token = _deferral.set(self)
        try:
            yield
        finally:
            _deferral.reset(token)

    def complete(self, patiently: bool = True) -> None:
        """Wait for all works in turn, with what their callbacks start.

        If not ``patiently``, only as far as nothing has to be waited for.
        """
        with self._lock, self.collecting():
            while self._queue and (patiently or self._queue[0][0].is_completed()):
                work, future = self._queue.popleft()
                work._fulfil(future)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Collect futures while foreign code runs, which may wait for them in its own way.

        If it stands still for long, perhaps in the wait of a future that is made of ours, they are
        completed by another thread.
        """
        watch = _watch()
        self.called_at = time.monotonic()
        watch.add(self)
        try:
            with self.collecting():
                yield
        finally:
            self.called_at = None


_PATIENCE = 2.0  # seconds that a call may take before its futures are completed for it


@functools.cache
def _watch() -> weakref.WeakSet[Deferral]:
    """Return the set of deferrals that a thread, started with the first, looks after."""
    deferrals: weakref.WeakSet[Deferral] = weakref.WeakSet()

    def look() -> None:
        while True:
            time.sleep(_PATIENCE / 5)
            for deferral in list(deferrals):
                since = deferral.called_at
                if since is not None and time.monotonic() - since > _PATIENCE:
                    deferral.complete()

    # Whom it helps waits as well, so it keeps nobody from being in a deadlock.
    bystanders.mark(threading.Thread(target=look, name="phalanx-futures", daemon=True)).start()
    return deferrals


forks.after_fork_in_child(_watch.cache_clear)  # a child has not the thread


class DeferredFuture(Future[Any]):
    """A future that a ``Deferral`` completes."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def wait(self) -> Any:
        self._deferral.complete()
        return super().wait()

    def done(self) -> bool:
        self._deferral.complete(patiently=False)
        return super().done()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        outcome = DeferredFuture(self._deferral)

        # Weakly: what C++ keeps, the garbage collector does not see.
        super().then(partial(_pass_on, callback, weakref.ref(self), outcome))
        return outcome


def _pass_on(
    callback: Callable[[Future[Any]], Any],
    reference: weakref.ref[Future[Any]],
    outcome: Future[Any],
    completed: Future[Any],
) -> None:
    """Let ``outcome`` become what the callback makes of a future."""
    try:
        value = callback(reference() or completed)
    except Exception as error:
        outcome.set_exception(_rootless(error))
    else:
        outcome.set_result(value)
    finally:
        # The error's traceback leads here, by way of the callback's caller.
        del outcome, completed


def _rootless(error: Exception) -> Exception:
    """Return an error whose traceback does not lead to the frame that keeps it in a future.

    The cycle would go through C++, where the garbage collector does not see it.
    """
    trace = error.__traceback__
    return error.with_traceback(trace.tb_next if trace is not None else None)


def beyond_futures(error: Exception) -> Exception:
    """Return an error that was raised by waiting for a future, without the frames of the wait."""
    trace = error.__traceback__
    trace = trace and trace.tb_next  # of whoever asks
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        torch.futures.__file__,
    ):
        trace = trace.tb_next
    return error.with_traceback(trace)


class CompletedWork(Work):
    """Work that was done by the time it was handed out."""

    def __init__(self, outputs: Sequence[torch.Tensor] = (), source: int | None = None) -> None:
        self._outputs = list(outputs)
        self._source = source

    def wait(self, timeout: Timeout | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source


def check_not_forked(origin: forks.Origin) -> None:
    """Raise unless this is the process that began an operation: others have no thread for it."""
    if not origin.is_here():
        raise DistBackendError(
            "the operation was not done when this process was forked: it is the parent's to "
            "finish, so a child cannot wait for it"
        )


class ThreadWork(Work):
    """A Python call that some thread makes: ``run()`` makes it, ``start()`` in a thread of its own.

    What the call returns, if anything, is the source rank of a receive.
    """

    def __init__(self, call: Callable[[], int | None], outputs: Sequence[torch.Tensor]) -> None:
        self._call: Callable[[], int | None] | None = call
        self._outputs = list(outputs)
        self._source: int | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._origin = forks.Origin()

    def start(self) -> ThreadWork:
        threading.Thread(target=self.run, name="phalanx-work", daemon=True).start()
        return self

    def run(self) -> None:
        assert self._call is not None
        try:
            self._source = self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # frees what the call holds, also while the work is kept
        self._done.set()

    def wait(self, timeout: Timeout | None = None) -> bool:
        limit = None if timeout is None else seconds(timeout)
        if not self._done.is_set():
            check_not_forked(self._origin)
        if not self._done.is_set() and not self._done.wait(limit):
            raise DistTimeout(f"the operation is still running after a wait of {limit} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source


class JoinedWork(Work):
    """Several works, seen as one that is done when all are; its outputs are theirs unless given."""

    def __init__(
        self, works: Sequence[Work], outputs: Sequence[torch.Tensor] | None = None
    ) -> None:
        self._works = list(works)
        self._outputs = outputs

    def wait(self, timeout: Timeout | None = None) -> bool:
        deadline = None if timeout is None else Deadline(seconds(timeout))
        for work in self._works:
            work.wait(None if deadline is None else deadline.left())
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        if self._outputs is not None:
            return list(self._outputs)
        return [tensor for work in self._works for tensor in work.result()]
