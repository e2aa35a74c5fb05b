"""Thread ranks that run one at a time, in an order that a seed decides.

A rank that is about to post an operation *pauses*: it says what it waits for, and the scheduler
passes its turn to one of those that need not wait. All that it looks at is what the ranks have
posted, never a clock, so the same seed gives the same order. A thread that blocks elsewhere (in a
lock, or a store) is passed over after a while, and runs beside the others until it pauses again.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from phalanx import bystanders
from phalanx.errors import Deadlock
from phalanx.launch.threads import current_rank
from phalanx.testing.operations import site_of

_LOOK = 0.02  # seconds between looks at the thread that runs
_NUM_LOOKS = 5  # after which one that has not moved is taken to be blocked
_PART = 4.0  # seconds that ranks which have all come may take for an operation
_ASKS = 1000  # turns of those who only ask, after which time must pass for an answer
_SLICE = 0.5  # seconds, after which a thread that is to be stopped notices


class Step(NamedTuple):
    """One decision: who ran, and what it was about to do."""

    who: str
    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}" + f" at {self.site}" * bool(self.site)


class State(Enum):
    PAUSED = "paused"
    RUNNING = "running"
    OUTSIDE = "outside"  # blocked where the scheduler does not see it, or not started yet
    DONE = "done"


class Task:
    """One thread of a rank."""

    def __init__(self, rank: int, number: int, priority: float) -> None:
        self.rank = rank
        self.who = f"rank {rank}" + f" (thread {number})" * bool(number)
        self.priority = priority
        self.state = State.PAUSED
        self.what, self.site = "start", ""
        self.is_ready: Callable[[], bool] | None = None
        self.is_patient = self.is_seen = True
        self.has_expired = self.gives_way = False
        self.part: Callable[[], None] | None = None
        self.is_of_pool = False  # which may have no thread for it for long
        self.ident = self.native = 0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()

    def pass_baton(self) -> None:
        if self.baton.locked():
            self.baton.release()


class _Current(threading.local):
    task: Task | None = None


_current = _Current()


class Scheduler:
    """Decides, at each pause of a thread, who runs next."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.steps: list[Step] = []
        self.is_free = False  # all run as they like: there is nothing left to decide
        self.has_failed = False  # whether a rank has: then the engine tells its peers
        self.verdict: str | None = None
        self.when_stuck: Callable[[list[Task]], str | None] = lambda blocked: None
        self.when_free: Callable[[], None] = lambda: None
        self._size = size
        # With priorities one rank can be far ahead of the others, which random turns hardly give.
        self._has_priorities = self.random.random() < 0.5
        self._tasks: list[Task] = []
        self._by_thread: dict[threading.Thread, Task] = {}
        self._running: Task | None = None
        self._turn = 0
        self._asked = 0  # turns in which nobody did anything but ask
        self._lock = threading.RLock()
        self._is_busy = False  # with what several do together, and may wait in
        self._parts = 0
        self._parts_done = _thread.allocate_lock()
        self._parts_done.acquire()

    def current(self) -> Task | None:
        """Return the calling thread's task while turns are being decided."""
        if self.is_free or current_rank() is None:
            return None
        task = _current.task
        return task if task in self._tasks else None

    def enter(self, rank: int) -> Task:
        """Have the calling thread be a rank's first; return when all are here and it may run."""
        with self._lock:
            task = Task(rank, 0, 0)
            self._tasks.append(task)
            if len(self._tasks) == self._size:
                self._tasks.sort(key=lambda each: each.rank)
                for each in self._tasks:
                    each.priority = self.random.random()
                self._choose()
        self._adopt(task)
        return task

    def expect(self, rank: int, thread: threading.Thread | None) -> Task:
        with self._lock:
            number = sum(task.rank == rank for task in self._tasks)
            task = Task(rank, number, self.random.random())
            task.is_of_pool = thread is None
            self._tasks.append(task)
            if thread is not None:
                self._by_thread[thread] = task
        return task

    def started(self, task: Task) -> None:
        self.pause(f"start of {task.who}", site_of(sys._getframe(1)))

    def begin(self, task: Task) -> None:
        with self._lock:
            if task.state is State.OUTSIDE:  # its turn has come, and passed, before
                self._pause(task)
        self._adopt(task)

    def _adopt(self, task: Task) -> None:
        _current.task = task
        task.ident, task.native = threading.get_ident(), threading.get_native_id()
        self._attend(task)

    def end(self, task: Task) -> None:
        with self._lock:
            state, task.state = task.state, State.DONE
            if _current.task is task:
                _current.task = None
            if not self.is_free and (state is State.RUNNING or self._running is None):
                self._choose()

    def ended(self) -> set[int]:
        """Return the ranks whose first thread has ended."""
        return {task.rank for task in self._tasks[: self._size] if task.state is State.DONE}

    def task_of(self, thread: threading.Thread) -> Task | None:
        """Return the task of a thread that a rank has started."""
        return self._by_thread.get(thread)

    def pause(
        self,
        what: str,
        site: str,
        is_ready: Callable[[], bool] | None = None,
        is_patient: bool = True,
        is_seen: bool = True,
        gives_way: bool = False,
    ) -> bool:
        """Let the seed decide who runs next; return when it is the calling thread, and it is ready.

        Return False if it is not: then all run freely, or the wait was not `is_patient` and has
        come to its end. `is_seen` says that the engine would know of the wait as well. One that
        `gives_way` does nothing but ask again and again.
        """
        task = self.current()
        if task is None:
            return is_ready is None or is_ready()
        with self._lock:
            task.what, task.site = what, site
            task.is_ready, task.has_expired = is_ready, False
            task.is_patient, task.is_seen = is_patient, is_seen
            task.gives_way = gives_way
            if gives_way:
                task.priority = min(each.priority for each in self._tasks) - 1
            self._pause(task)
        self._attend(task)
        if self.verdict is not None:  # even if another, by failing, has let go of what it needs
            raise Deadlock(self.verdict)
        return not task.has_expired and (is_ready is None or is_ready())

    def _pause(self, task: Task) -> None:
        held = task is self._running or self._running is None
        task.state = State.PAUSED
        if held and not self.is_free:
            self._choose()

    def _attend(self, task: Task) -> None:
        """Wait for the calling thread's turn; do its part in what others do meanwhile."""
        while True:
            # In slices: an exception that is to end this thread comes between them.
            while not task.baton.acquire(timeout=_SLICE):
                pass
            if task.part is None:
                return
            part, task.part = task.part, None
            try:
                part()
            finally:
                with self._lock:
                    self._parts -= 1
                    if self._parts == 0 and self._parts_done.locked():
                        self._parts_done.release()

    def _choose(self) -> None:
        """Pass the turn on."""
        self._running = None
        self._turn += 1
        expired = False
        paused = [task for task in self._tasks if task.state is State.PAUSED]
        ready = [task for task in paused if task.is_ready is None or task.is_ready()]
        if not ready:
            if any(task.state is State.OUTSIDE for task in self._tasks) or not paused:
                return  # whoever comes back goes on
            ready = [task for task in paused if not task.is_patient]
            if not ready:
                self.verdict = self.when_stuck(paused)
                self.go_free()
                return
            expired = True
        chosen = self._pick(ready)
        chosen.has_expired = expired
        self._asked = self._asked + 1 if chosen.gives_way else 0
        if self._asked > _ASKS:
            self.go_free()
            return
        self.steps.append(Step(chosen.who, chosen.what, chosen.site))
        chosen.state = State.RUNNING
        self._running = chosen
        chosen.pass_baton()

    def _pick(self, ready: list[Task]) -> Task:
        if not self._has_priorities:
            return self.random.choice(ready)
        first = max(ready, key=lambda task: task.priority)
        if self.random.random() < 0.1:
            first.priority = min(task.priority for task in self._tasks) - 1
            first = max(ready, key=lambda task: task.priority)
        return first

    @contextmanager
    def together(self, parts: dict[Task, Callable[[], None]]) -> Iterator[None]:
        """Have paused threads do something each while the calling one does its own in a block."""
        self._parts = len(parts)
        self._is_busy = True
        for task, part in parts.items():
            task.part = part
            task.pass_baton()
        try:
            yield
        finally:
            if parts and not self._parts_done.acquire(timeout=_PART):
                self.go_free()
            self._is_busy = False

    def go_free(self) -> None:
        """Decide no more: all go on, and the engine alone says who waits for whom."""
        with self._lock:
            if self.is_free:
                return
            self.is_free = True
            self.when_free()
            for task in self._tasks:
                if task.state is State.PAUSED:
                    task.state = State.RUNNING
                    task.pass_baton()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Pass over threads that are blocked elsewhere, for the length of a block."""
        stop = _thread.allocate_lock()
        stop.acquire()
        thread = threading.Thread(
            target=self._watch, args=(stop,), name="phalanx-turns", daemon=True
        )
        bystanders.mark(thread).start()
        try:
            yield
        finally:
            stop.release()
            thread.join()

    def _watch(self, stop: _thread.LockType) -> None:
        seen: object = None
        times = 0
        while not stop.acquire(timeout=_LOOK):
            task, now = self._running, None
            if task is not None and not self.is_free and not self._is_busy:
                now = (self._turn, _position(task))
            times = times + 1 if now is not None and now == seen else 0
            seen = now
            if times >= _NUM_LOOKS and task is not None:
                times = 0
                self._pass_over(task, self._turn)

    def _pass_over(self, task: Task, turn: int) -> None:
        with self._lock:
            if self._running is task and self._turn == turn and not (self.is_free or self._is_busy):
                self.steps.append(Step(task.who, "is blocked elsewhere, and passed over", ""))
                task.state = State.OUTSIDE
                if task.ident == 0:
                    task.baton.acquire(blocking=False)  # it is to wait for another turn
                self._choose()


def _position(task: Task) -> object:
    """Say where a thread stands; something else each time while it is not blocked."""
    if task.ident == 0:  # it has not begun
        return "nowhere" if task.is_of_pool else object()
    frame = sys._current_frames().get(task.ident)
    facts = _facts(task)
    if frame is None or not facts.get("State", "").startswith("S"):
        return object()
    # One that waits for the interpreter is woken again and again, one in a lock is not.
    return id(frame), frame.f_lasti, facts["voluntary_ctxt_switches"]


def _facts(task: Task) -> dict[str, str]:
    """Return what the system knows of a thread."""
    try:
        with open(f"/proc/self/task/{task.native}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return {}
