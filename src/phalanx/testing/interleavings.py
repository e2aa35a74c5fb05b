"""The orders in which thread ranks can run, tried by seed."""

from __future__ import annotations

import _thread
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

from phalanx.groups import ProcessGroup
from phalanx.launch import outcomes, threads
from phalanx.patches import Patch, Shared, patched
from phalanx.testing.operations import site_of
from phalanx.testing.postings import Model
from phalanx.testing.scheduler import Scheduler, State, Step
from phalanx.world import World, here

T = TypeVar("T")

_models: dict[Scheduler, Model] = {}  # of the runs that go on

_SHOWN = 12  # steps of a schedule that are told with a failure


@dataclass(frozen=True)
class Run(Generic[T]):
    """What one seed led to."""

    seed: int
    results: list[T]
    steps: list[Step]


def explore(
    fn: Callable[..., T],
    size: int,
    *args: object,
    seeds: Iterable[int] = range(100),
    timeout: float | None = 60,
    group_timeout: float | timedelta | None = None,
    buffered: bool | None = None,
    launch: Callable[..., list[T]] | None = None,
    replay: str | None = None,
    **kwargs: object,
) -> list[Run[T]]:
    """Run `fn(*args, **kwargs)` on `size` thread ranks once per seed, each time in another order.

    Only one rank runs at a time. Whenever it posts an operation, waits for a work or looks at one,
    the seed decides who goes on: the same seed gives the same order. It also decides when an
    asynchronous operation completes, as early as it can or not before somebody waits for it, which
    message a receive from any rank gets, and whether a send of up to 64 KiB returns before its
    message is received (`buffered` says that all do, or none; larger ones never do).

    Threads that a rank starts take turns as well. A thread that waits where this is not seen (in a
    store, or in a lock that was made before) is passed over; orders are then not exactly
    repeatable. `time.sleep` takes no time.

    The first failure is raised, with its seed, the last turns before it, and how to run it again.
    Whether results of different seeds agree is for the caller to compare: they are returned.
    `timeout` is each run's, `group_timeout` the default group's. `launch` is what runs ranks, if
    not `run_threads`, and `replay` what is said to run one seed again.
    """
    if replay is None:
        given = [getattr(fn, "__name__", repr(fn)), str(size), *["..."] * bool(args or kwargs)]
        given += [f"buffered={buffered}"] * (buffered is not None)
        replay = f"explore({', '.join(given)}, seeds=[{{seed}}])"
    return [
        schedule(
            fn,
            size,
            *args,
            seed=seed,
            timeout=timeout,
            group_timeout=group_timeout,
            buffered=buffered,
            launch=launch,
            replay=replay,
            **kwargs,
        )
        for seed in seeds
    ]


def schedule(
    fn: Callable[..., T],
    size: int,
    *args: object,
    seed: int,
    timeout: float | None = 60,
    group_timeout: float | timedelta | None = None,
    buffered: bool | None = None,
    launch: Callable[..., list[T]] | None = None,
    replay: str | None = None,
    **kwargs: object,
) -> Run[T]:
    """Run a function in the order that one seed gives, as `explore` does with many."""
    scheduler = Scheduler(seed, size)
    model = _models[scheduler] = Model(scheduler, buffered)
    run: Callable[..., list[T]] = launch or partial(_run_threads, timeout, group_timeout)

    def body(*args: object, **kwargs: object) -> T:
        return _take_turns(scheduler, model, fn, args, kwargs)

    with _patched, scheduler.watching():
        try:
            results = run(body, size, *args, **kwargs)
        except BaseException as error:
            outcomes.label(error, _told(seed, scheduler.steps, replay))
            raise
        finally:
            del _models[scheduler]
    return Run(seed, results, scheduler.steps)


def _run_threads(
    deadline: float | None,
    timeout: float | timedelta | None,
    body: Callable[..., T],
    size: int,
    *args: Any,
    **kwargs: Any,
) -> list[T]:
    return threads.run_threads(body, size, *args, deadline=deadline, timeout=timeout, **kwargs)


def _told(seed: int, steps: Sequence[Step], replay: str | None) -> str:
    again = (replay or "schedule(..., seed={seed})").replace("{seed}", str(seed))
    alike = [(step, len(list(same))) for step, same in itertools.groupby(steps)][-_SHOWN:]
    num_shown = sum(times for _, times in alike)
    lines = [f"in the order of seed {seed}; to run it again: {again}"]
    lines.append(f"the last {num_shown} of {len(steps)} turns, and what each went on with:")
    lines += [f"  {step}" + f" (x{times})" * (times > 1) for step, times in alike]
    return "\n".join(lines)


def _take_turns(
    scheduler: Scheduler,
    model: Model,
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    """Be a rank that runs only in its turn."""
    rank = threads.current_rank()
    if rank is None:
        raise ValueError("explore needs ranks that are threads")
    model.put_on(here())
    rank.scheduler = scheduler
    task = scheduler.enter(rank.rank)
    try:
        result = fn(*args, **kwargs)
        world = rank.slot.world
        for group in [] if world is None else list(world.groups.values()):
            model.drain(group)
        return result
    except BaseException:
        scheduler.has_failed = True
        raise
    finally:
        rank.scheduler = None
        scheduler.end(task)


def _scheduler() -> Scheduler | None:
    """Return who decides when the calling thread runs, if anybody does."""
    rank = threads.current_rank()
    found = None if rank is None else rank.scheduler
    if not isinstance(found, Scheduler) or found.current() is None:
        return None
    return found


_join = threading.Thread.join
_wait = threading.Condition.wait
_sleep = time.sleep
_add_group = World.add_group
_remove_group = World.remove_group


def _join_in_turn(self: threading.Thread, timeout: float | None = None) -> None:
    scheduler = _scheduler()
    task = None if scheduler is None else scheduler.task_of(self)
    if scheduler is not None and task is not None:
        scheduler.pause(
            f"join of {task.who}",
            site_of(sys._getframe(1)),
            lambda: task.state is State.DONE,
            is_patient=timeout is None,
            is_seen=False,
        )
    _join(self, timeout)


def _wait_in_turn(self: threading.Condition, timeout: float | None = None) -> bool:
    scheduler = _scheduler()
    if scheduler is None:
        return _wait(self, timeout)
    condition: Any = self
    waiter = _thread.allocate_lock()
    waiter.acquire()
    condition._waiters.append(waiter)
    state = condition._release_save()
    try:
        scheduler.pause(
            "wait for another thread",
            site_of(sys._getframe(1)),
            lambda: not waiter.locked(),
            is_patient=timeout is None,
            is_seen=False,
        )
        notified = not waiter.locked()
        if not notified and scheduler.is_free:
            notified = waiter.acquire(True, -1 if timeout is None else timeout)
    finally:
        condition._acquire_restore(state)
    if not notified and waiter in condition._waiters:
        condition._waiters.remove(waiter)
    return notified


class _LockInTurn:
    """A lock that passes the turn on while somebody else holds it."""

    make: Callable[[], Any] = staticmethod(_thread.allocate_lock)

    def __init__(self) -> None:
        self._lock = self.make()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = _scheduler() if blocking else None
        site = site_of(sys._getframe(1))
        while scheduler is not None and scheduler.current() is not None:
            if self._lock.acquire(False):
                return True
            came = scheduler.pause(
                "wait for a lock", site, self._is_free, is_patient=timeout < 0, is_seen=False
            )
            if not came and not scheduler.is_free:
                return False
        return bool(self._lock.acquire(blocking, timeout))

    def _is_free(self) -> bool:
        if self._lock.acquire(False):
            self._lock.release()
            return True
        return False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class _RLockInTurn(_LockInTurn):
    make = staticmethod(_thread.RLock)


def _sleep_in_turn(seconds: float) -> None:
    scheduler = _scheduler()
    if scheduler is None:
        _sleep(seconds)
    else:
        scheduler.pause(f"sleep for {seconds:g} s", site_of(sys._getframe(1)), gives_way=True)


def _add_group_in_turn(self: World, name: str, ranks: Any, *args: Any) -> ProcessGroup:
    scheduler = _scheduler()
    make = partial(_add_group, self, name, ranks, *args)
    if scheduler is None:
        return make()
    made: ProcessGroup = _models[scheduler].make(self, name, list(ranks), make)
    return made


def _remove_group_in_turn(self: World, group: ProcessGroup) -> None:
    scheduler = _scheduler()
    if scheduler is not None:
        _models[scheduler].drain(group)
    _remove_group(self, group)


_PATCHES: list[Patch] = [
    (threading.Thread, "join", _join_in_turn),
    (threading.Condition, "wait", _wait_in_turn),
    (threading, "Lock", _LockInTurn),
    (threading, "RLock", _RLockInTurn),
    (time, "sleep", _sleep_in_turn),
    (World, "add_group", _add_group_in_turn),
    (World, "remove_group", _remove_group_in_turn),
]
_patched = Shared(lambda: patched(*_PATCHES))
