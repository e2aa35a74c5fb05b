"""Worlds whose ranks are threads of this process."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch

from phalanx import bystanders, logs, random, world
from phalanx.debug import in_flight, watch
from phalanx.errors import Deadlock
from phalanx.launch import identity, notebook, voices, warned
from phalanx.launch.identity import here
from phalanx.launch.outcomes import (
    GRACE,
    Failure,
    add_remarks,
    as_error,
    overdue,
    reason,
    settle,
    stack_of_program,
)
from phalanx.patches import Patch, Shared, patched
from phalanx.stores import HashStore

T = TypeVar("T")

_log = logs.area("launch")

_FOR_EVER = 1e8  # seconds


def run_threads(
    fn: Callable[..., T],
    size: int,
    *args: object,
    backend: str = "phalanx",
    timeout: float | timedelta | None = None,
    deadline: float | None = None,
    rng: random.Choice = True,
    return_exceptions: bool = False,
    label: bool | None = None,
    **kwargs: object,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `size` ranks, each a thread, and return what each returned.

    Every rank has a world of its own, initialised before `fn` and destroyed after it: `get_rank()`
    tells them apart, also in threads they start, in tasks they give to a ThreadPoolExecutor and in
    autograd hooks. Unless `rng` is False each also has its own torch random stream, which starts
    where the caller's stands; with "all" also streams of Python's `random` and of NumPy's global
    functions (for what cannot be caught see `phalanx.random.libraries`). Arguments and results are
    shared, not copied.

    `backend` and `timeout` are the default group's; `deadline` is how many seconds the whole run
    may take. The first real failure is raised, labelled with its rank; its peers raise PeerFailed
    as soon as they communicate. Ranks still running a while later, after the deadline, or if this
    call is interrupted, get an exception at their next Python instruction. With `return_exceptions`
    failures are returned in their rank's place.

    With `label` every line that a rank prints begins with "[rank 2]"; unless you say, that is so in
    a notebook.

    Torch's intra-op threads are counted per rank: `torch.set_num_threads(1)` suits many ranks.
    """
    __tracebackhide__ = True
    if size < 1:
        raise ValueError(f"run_threads needs a size of at least 1, got {size}")
    store = HashStore()

    def live(rank: int) -> T:
        __tracebackhide__ = True
        world.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        result = fn(*args, **kwargs)
        if world.is_initialized():
            world.destroy_process_group()
        return result

    return run_as_ranks(live, size, rng, deadline, return_exceptions, label=label)


def run_as_ranks(
    live: Callable[[int], T],
    size: int,
    rng: random.Choice,
    deadline: float | None,
    return_exceptions: bool,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    label: bool | None = None,
) -> list[T]:
    """Run `live(rank)` on threads that are ranks, with no world yet; otherwise as `run_threads`.

    Every thread of a rank, also those that it starts, runs inside a context that `around` makes.
    """
    __tracebackhide__ = True
    labelled = voices.labelled() if notebook.labelling(label) else nullcontext()
    with _ranks_are_known, random.told_apart(rng), watch.listening(), labelled:
        limit = _Limit()
        threads = _Threads(live, [_Rank(rank, rng, limit) for rank in range(size)], limit)
        for rank in threads.ranks:
            rank.around = around
        threads.run(deadline, return_exceptions)
    return settle(threads.results, threads.failures, return_exceptions)


def lift_limits() -> None:
    """Let the calling thread's world, and those around it, take any time: somebody looks into it.

    The timeouts of their groups are lifted too, for operations that begin from now on.
    """
    for rank in identity.ancestry(here.rank):
        cast(_Rank, rank).limit.lift()


class _Stop(BaseException):
    """Raised in a rank thread from outside, to end it."""


class Scheduler(Protocol):
    """Who decides when the threads of ranks run."""

    verdict: str | None  # the deadlock that was raised in all threads, a rank's first as well

    def expect(self, rank: int, thread: threading.Thread | None) -> Any:
        """Return a task for a thread, or for a call that a pool makes, that is about to start."""

    def started(self, task: Any) -> None:
        """Go on, or first let the thread that the calling one has started."""

    def begin(self, task: Any) -> None:
        """Be the task: return when it is its turn."""

    def end(self, task: Any) -> None:
        """Let others run: the task is over."""


class _Slot(world.Slot):
    """A slot whose worlds know how many threads may act for its rank."""

    def __init__(self) -> None:
        self._others = 0  # besides the rank's first thread
        self._lock = threading.Lock()
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:  # so that reading stays fast
        super().__setattr__(name, value)
        if name == "world":
            with self._lock:
                self._tell(self._others)

    def count_threads(self, by: int) -> None:
        with self._lock:
            self._others += by
            self._tell(by)

    def _tell(self, by: int) -> None:
        home = self.world
        if by and home is not None and "roster" in home.shared:
            home.shared["roster"].count_threads(home.rank, by)


class _Limit:
    """Until when the ranks of one world may run."""

    def __init__(self) -> None:
        self._when = float("inf")
        self._is_lifted = False
        self._slots: list[_Slot] = []

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return float("inf") if self._is_lifted else self._when - time.monotonic()

    def add(self, slot: _Slot) -> _Slot:
        """Know the slot of one of the ranks, and return it."""
        self._slots.append(slot)
        return slot

    def bring_forward(self, seconds: float) -> None:
        """Let the ranks run for so long from now on, or less if that was said before."""
        self._when = min(self._when, time.monotonic() + seconds)

    def lift(self) -> None:
        """Let the ranks run for ever, and wait for each other for ever."""
        self._is_lifted = True
        for slot in self._slots:
            for group in [] if slot.world is None else list(slot.world.groups.values()):
                group.set_timeout(_FOR_EVER)

    def restore(self, seconds: float) -> None:
        """Let the ranks run for so long from now on, whatever was said before."""
        self._is_lifted = False
        self._when = time.monotonic() + seconds


class _Rank:
    """Who a thread is: the rank's world and random streams."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext  # of each of its threads

    def __init__(self, rank: int, rng: random.Choice, limit: _Limit) -> None:
        self.rank = rank
        self.outer = here.rank
        self.limit = limit
        self.slot = limit.add(_Slot())
        self.streams = random.Streams(rng)
        self.scheduler: Scheduler | None = None
        self.killed: BaseException | None = None  # how a test has ended it, whatever comes after

    def count_thread(self, by: int) -> None:
        """Count a thread more or less that may act for this rank, in this world and later ones."""
        self.slot.count_threads(by)

    def close(self) -> None:
        """Free what a rank that failed has left behind."""
        if self.slot.world is not None:
            self.slot.world.close()
            self.slot.world = None

    @contextmanager
    def identity(self) -> Iterator[None]:
        """Make the calling thread one of this rank."""
        outer = here.rank
        with ExitStack() as stack:
            stack.enter_context(world.bind(self.slot))
            stack.enter_context(self.streams.drawn_from())
            stack.enter_context(self.around())
            in_flight.follow()
            here.rank = self
            try:
                yield
            finally:
                here.rank = outer


class _Threads:
    """The rank threads of one world while they run."""

    def __init__(self, live: Callable[[int], Any], ranks: list[_Rank], limit: _Limit) -> None:
        self.live = live
        self.ranks = ranks
        self.results: list[Any] = [None] * len(ranks)
        self.failures: list[Failure] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.running: dict[int, threading.Thread] = {}
        self.limit = limit

    def run(self, deadline: float | None, patient: bool) -> None:
        """Start the threads and wait for all; not for long after a failure unless `patient`."""
        if deadline is not None:
            self.limit.bring_forward(deadline)
        try:
            for rank in self.ranks:
                # A daemon: a rank that cannot be stopped must not keep the interpreter alive.
                thread = threading.Thread(
                    target=self._main, args=(rank, patient), name=f"rank{rank.rank}", daemon=True
                )
                self.running[rank.rank] = thread
                with _nobody():
                    thread.start()
            _log.info("started %d ranks as threads of pid %d", len(self.ranks), os.getpid())
            self._wait()
            if self.running and (patient or all(each.is_wanted for each in self.failures)):
                self.failures += overdue(self._stacks(), len(self.ranks), deadline or 0)
        finally:
            self._stop()
            for rank in self.ranks:
                if rank.rank not in self.running:
                    rank.close()

    def _main(self, rank: _Rank, patient: bool) -> None:
        __tracebackhide__ = True
        try:
            with rank.identity():
                result = self.live(rank.rank)
            if rank.killed is not None:
                raise rank.killed
            self.results[rank.rank] = result
        except _Stop:
            pass
        except BaseException as error:
            error = rank.killed or as_error(error)
            failure = Failure(rank.rank, add_remarks(rank.slot.world, error))
            _log.info("rank %d failed: %s", rank.rank, failure)
            self.failures.append(failure)
            if not patient and not failure.is_wanted:
                self.limit.bring_forward(GRACE)
            rank.slot.fail(reason(failure))
        finally:
            self.ended.put(rank.rank)

    def _wait(self) -> None:
        """Wait until all ranks have ended or the limit, which a failure may move, has passed."""
        while self.running and (left := self.limit.left) > 0:
            # A rank that brings the limit closer ends at once, and so wakes this.
            with suppress(queue.Empty):
                rank = self.ended.get(timeout=None if left == float("inf") else left)
                self.running.pop(rank).join()

    def _stacks(self) -> dict[int, str]:
        frames = sys._current_frames()
        return {
            rank: stack_of_program(frames.get(thread.ident or 0))
            for rank, thread in self.running.items()
        }

    def _stop(self) -> None:
        """End what still runs: wake ranks that wait for others, interrupt those that compute."""
        for rank, thread in self.running.items():
            self.ranks[rank].slot.fail("was stopped: the run was given up")
            if thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
                )
        self.limit.restore(GRACE)
        self._wait()


def current_rank() -> _Rank | None:
    """Return who the calling thread is, None if it belongs to no rank that is a thread."""
    return cast("_Rank | None", here.rank)


@contextmanager
def _nobody() -> Iterator[None]:
    """Have threads started meanwhile belong to no rank."""
    outer = here.rank
    here.rank = None
    try:
        yield
    finally:
        here.rank = outer


class _Guest:
    """A thread, or a task of a pool, that acts for a rank besides its first thread."""

    def __init__(self, rank: _Rank, thread: threading.Thread | None = None) -> None:
        self._rank = rank
        self._scheduler = rank.scheduler
        rank.count_thread(1)
        if self._scheduler is not None:
            self._task = self._scheduler.expect(rank.rank, thread)

    def started(self) -> None:
        if self._scheduler is not None:
            self._scheduler.started(self._task)

    def begin(self) -> None:
        if self._scheduler is not None:
            self._scheduler.begin(self._task)

    def is_told(self, error: Deadlock) -> bool:
        """Say whether a rank fails with the same error, so that it need not be told twice."""
        return self._scheduler is not None and self._scheduler.verdict == str(error)

    def end(self) -> None:
        self._rank.count_thread(-1)
        if self._scheduler is not None:
            self._scheduler.end(self._task)


_start = threading.Thread.start
_submit = ThreadPoolExecutor.submit


def _start_as_rank(self: threading.Thread) -> None:
    """Start a thread that belongs to the rank of the thread that starts it."""
    rank = cast("_Rank | None", here.rank)
    if rank is not None and not bystanders.includes(self):
        run = self.run
        guest = _Guest(rank, self)

        def run_as_rank() -> None:
            del self.run
            try:
                with rank.identity():
                    guest.begin()
                    run()
            except Deadlock as error:
                if not guest.is_told(error):
                    raise
            finally:
                guest.end()

        self.run = run_as_rank  # type: ignore[method-assign]
        try:
            with _nobody():
                _start(self)
        except BaseException:
            guest.end()
            raise
        guest.started()
    else:
        _start(self)


def _submit_as_rank(
    self: ThreadPoolExecutor, fn: Callable[..., T], /, *args: Any, **kwargs: Any
) -> Future[T]:
    """Submit a task that belongs to the rank that submits it; a worker may serve several ranks."""
    rank = cast("_Rank | None", here.rank)
    if rank is None:
        return _submit(self, fn, *args, **kwargs)

    guest = _Guest(rank)

    def task() -> T:
        with rank.identity():
            guest.begin()
            return fn(*args, **kwargs)

    try:
        with _nobody():
            future = _submit(self, task)
    except BaseException:
        guest.end()
        raise
    future.add_done_callback(lambda _: guest.end())
    guest.started()
    return future


_PATCHES: list[Patch] = [
    (threading.Thread, "start", _start_as_rank),
    (ThreadPoolExecutor, "submit", _submit_as_rank),
    (torch.random, "default_generator", random.DefaultGenerator()),
]


@contextmanager
def _knowing_ranks() -> Iterator[None]:
    with patched(*_PATCHES):
        warned.begin()
        try:
            yield
        finally:
            warned.end()


# Has threading, warnings and torch.random tell ranks apart while there are thread worlds.
_ranks_are_known = Shared(_knowing_ranks)
