"""Warm processes for ranks: reused from run to run, and never unless they are clean."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

from phalanx import leftovers, logs
from phalanx.errors import DistError
from phalanx.launch import life, outcomes, processes
from phalanx.launch.life import Brief, Group
from phalanx.launch.outcomes import GRACE, Failure, as_error, settle, story
from phalanx.launch.parcels import main_as_it_is, pack
from phalanx.launch.processes import UNDECIDED, Processes, Rank, pack_task
from phalanx.launch.start_state import StartState, random_state, same_random_state
from phalanx.process import Stat

T = TypeVar("T")
Serve = Callable[[], None]
Hear = Callable[[int, Any], Any]

_log = logs.area("launch")

# What a warm process sends: the first byte of each message.
_BEGUN, _SAYING, _OUTCOME, _CLEAN, _UNCLEAN = b"b", b"s", b"o", b"c", b"u"

# What it is sent instead of a job: that there will be none.
_NO_MORE = b""


class _Job(NamedTuple):
    """What a warm process is asked to do; the rest is what a new process takes over."""

    rank: int
    brief: Brief
    directory: str
    path: list[str]
    arguments: list[str]


class Pool:
    """Processes that stay when their ranks have returned, to be ranks again.

    `run` means what `run_processes` means: a run in a process that has served before starts in the
    state of a new one: environment, working directory, `sys.path`, random streams (torch's bit for
    bit; `random` and NumPy are seeded by the system in both), torch's settings, debug level, and no
    process group. Only modules that have been imported stay so. A process that died, was stopped or
    overran its deadline, or cannot be brought back to that state because it has left threads or
    child processes, say, is ended; the next run starts another in its place.

    Close it when done, or use it as a context manager. It can be used by one thread at a time.
    Processes end with the one that made the pool, however that ends.
    """

    def __init__(self, inside: Callable[[Serve], None] | None = None) -> None:
        """Make an empty pool; each process calls `inside(serve)`, which must call `serve()`."""
        self._inside = b"" if inside is None else pack(inside)
        self._idle: list[_Warm] = []
        self.directory = leftovers.new_directory()
        # At exit multiprocessing waits for its processes: these must not wait for another run.
        self._close = Finalize(self, _end, (self._idle, self.directory), exitpriority=10)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., T],
        size: int,
        *args: object,
        backend: str = "phalanx",
        timeout: float | timedelta | None = None,
        deadline: float | None = None,
        return_exceptions: bool = False,
        **kwargs: object,
    ) -> list[T]:
        """Run `fn(*args, **kwargs)` on `size` ranks, as `run_processes` does, in warm processes."""
        if size < 1:
            raise ValueError(f"a pool runs at least 1 rank, got {size}")
        task = pack_task(fn, args, kwargs)
        with self.ranks(size, task, Group(backend, timeout)) as ranks:
            ranks.see_through(deadline, return_exceptions)
        return settle(ranks.results, ranks.failures, return_exceptions)

    def ranks(
        self, size: int, task: bytes, group: Group | None, hear: Hear | None = None
    ) -> Processes:
        """Start a task on ranks of this pool; what they `say` is answered by `hear(rank, it)`."""
        if not self._close.still_active():
            raise RuntimeError("the pool is closed: make another")
        directory = _directory()  # before there are processes that would fail to enter it
        while len(self._idle) < size:  # they start while the first are told what to do
            self._idle.append(_Warm(self.directory, self._inside))
        environment = processes.environment_of(size)
        hire = partial(_Hired, pool=self, hear=hear, directory=directory)
        return Processes(size, task, environment, group=group, hire=hire, within=self.directory)

    def take(self) -> _Warm:
        """Return an idle process, or a new one."""
        while self._idle:
            warm = self._idle.pop(0)
            if warm.is_ready():
                return warm
            warm.end(0)
        return _Warm(self.directory, self._inside)

    def give_back(self, warm: _Warm) -> None:
        """Keep a clean process for the next run."""
        if self._close.still_active():
            self._idle.append(warm)
            self._idle.sort(key=lambda each: each.number)  # the oldest serves first
        else:
            warm.end(GRACE)

    def pids(self) -> list[int]:
        """Return the process ids of those that wait for a run."""
        return [warm.process.pid or 0 for warm in self._idle]

    def close(self) -> None:
        """End all processes. Can be called again."""
        self._close()


def _end(idle: list[_Warm], directory: str) -> None:
    for warm in idle:
        warm.dismiss()
    limit = time.monotonic() + GRACE
    for warm in idle:
        warm.end(max(limit - time.monotonic(), 0))
    idle.clear()
    shutil.rmtree(directory, ignore_errors=True)


_numbers = itertools.count()


class _Warm:
    """A process that waits for jobs, seen from the pool."""

    def __init__(self, directory: str, inside: bytes) -> None:
        context = processes.starting("forkserver")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_main, args=(directory, inside, theirs), name="warm"
        )
        with main_as_it_is():
            processes.start(self.process)
        theirs.close()
        self.number = next(_numbers)
        self.has_served = False
        _log.info("started pid %d for ranks", self.process.pid)

    def is_ready(self) -> bool:
        """Say whether the process lives, and has not been stopped."""
        return self.process.is_alive() and not Stat(f"/proc/{self.process.pid}").stopped

    def dismiss(self) -> None:
        """Let the process end by itself. Can be called again."""
        with suppress(OSError):  # it has ended, or knows
            self.connection.send_bytes(_NO_MORE)
        self.connection.close()

    def end(self, seconds: float) -> None:
        """End the process: it has so long to end by itself."""
        self.dismiss()
        self.process.join(seconds)
        processes.kill(self.process)


class _Hired(Rank):
    """A warm process while it is a rank."""

    def __init__(
        self, rank: int, brief: Brief, pool: Pool, hear: Hear | None, directory: str
    ) -> None:
        self._pool, self._hear = pool, hear
        self._job = pickle.dumps(_Job(rank, brief, directory, sys.path, sys.argv))
        self._warm = pool.take()
        self._delivered = self._clean = False
        self._has_answered = False
        super().__init__(rank, brief, self._warm.process, self._warm.connection)
        self._send()

    @property
    def has_begun(self) -> bool:
        """Whether the deadline counts: one that has served need not import anything first."""
        return self._has_answered or self._warm.has_served

    def _send(self) -> None:
        try:
            self.outcome.send_bytes(self._job)
        except OSError:  # it has just died, which is what waiting for it tells
            return
        _log.info("pid %d is rank %d", self.pid, self.rank)

    def receive(self) -> Any:
        outcome = super().receive()
        if not self._delivered and not self._has_answered and self._warm.has_served:
            # It has died since its last run: that is no matter of this one.
            self._warm.end(0)
            self._warm = self._pool.take()
            self.process, self.outcome = self._warm.process, self._warm.connection
            self.pid = self.process.pid or 0
            self._send()
            return UNDECIDED
        return outcome

    def take(self, outcome: bytes) -> Any:
        kind, content = outcome[:1], outcome[1:]
        if kind == _OUTCOME:
            self._delivered = True
            return super().take(content)
        if kind == _BEGUN:
            self._has_answered = True
        else:
            answer = self._hear(self.rank, pickle.loads(content)) if self._hear else None
            self.outcome.send_bytes(pickle.dumps(answer))
        return UNDECIDED

    def join(self, seconds: float) -> None:
        """Wait for the process to be clean, or to end."""
        if self._clean:
            return
        if not self._delivered:
            self.process.join(seconds)
            return
        try:
            if self.outcome.poll(seconds):
                self._delivered = False
                self._clean = self.outcome.recv_bytes() == _CLEAN
        except (EOFError, OSError):
            self._delivered = False

    def terminate(self) -> None:
        if not self._clean:
            self._delivered = False
            super().terminate()

    def hang_up(self) -> None:
        """Keep the line: it is the pool's."""

    def close(self) -> None:
        if self._clean:
            self.closed = True
            self._warm.has_served = True
            self._pool.give_back(self._warm)
        else:
            _log.info("pid %d is not used again", self.pid)
            self._warm.connection.close()
            super().close()


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise DistError(
            "the working directory no longer exists: ranks that are processes start in it; "
            "enter another, or remove it after them"
        ) from None


def _main(directory: str, inside: bytes, connection: Connection) -> None:
    """Be a warm process: its whole life."""
    global _here
    watch = life.begin(directory, connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs it is the launcher's matter
    _here = server = _Server(connection, watch)
    try:
        if inside:
            pickle.loads(inside)(server.serve)
        else:
            server.serve()
    except BaseException as error:
        server.refuse(error)


def _enter(job: _Job) -> None:
    try:
        os.chdir(job.directory)
    except OSError as error:
        place = f"the working directory {job.directory!r}"
        raise DistError(f"rank {job.rank} cannot enter {place}: {error.strerror}") from None


class _Imports:
    """Finds out whether the imports that a task needs draw random numbers, or seed.

    They do so once in a process: later runs in it would miss what a new process has drawn.
    """

    def __init__(self) -> None:
        self._before = random_state()
        self.have_drawn = False

    def done(self) -> None:
        self.have_drawn = not same_random_state(self._before, random_state())


class _Server:
    """The process's side of the line to the pool."""

    def __init__(self, connection: Connection, watch: threading.Thread) -> None:
        self._connection = connection
        self._watch = watch
        self._lock = threading.Lock()
        self._job: _Job | None = None  # that is not answered yet

    def serve(self) -> None:
        """Be one rank after the other, until the pool is closed or this process is not clean."""
        start = StartState()
        while job := self._next():
            self._send(_BEGUN)
            imports = _Imports()
            _enter(job)
            sys.path[:], sys.argv[:] = job.path, job.arguments
            signal.signal(signal.SIGINT, signal.default_int_handler)
            outcomes.last_word = lambda failure: self._send(_OUTCOME, life.packed(failure))
            outcome = life.live(job.rank, job.brief, imports.done)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._send(_OUTCOME, outcome)
            self._job = None
            os.chdir("/")
            if start.restore() or imports.have_drawn:
                self._send(_UNCLEAN)
                return
            self._send(_CLEAN)

    def refuse(self, error: BaseException) -> None:
        """Answer a job with what kept this process from serving."""
        if job := self._job or self._next():
            failure = Failure(job.rank, as_error(error), story(error))
            self._send(_OUTCOME, life.packed(failure))
            self._send(_UNCLEAN)

    def say(self, content: object) -> Any:
        with self._lock:
            self._send(_SAYING, pack(content))
            return pickle.loads(self._connection.recv_bytes())

    def _next(self) -> _Job | None:
        try:
            received = self._connection.recv_bytes()
        except (EOFError, OSError):  # the launcher is gone: who watches it tidies up and ends this
            self._watch.join()
            return None
        self._job = pickle.loads(received) if received != _NO_MORE else None
        return self._job

    def _send(self, kind: bytes, content: bytes = b"") -> None:
        try:
            self._connection.send_bytes(kind + content)
        except OSError:  # nobody waits for it; there will be no next job either
            _log.info("the pool has hung up")


_here: _Server | None = None


def say(content: object) -> Any:
    """Say something to the launcher of this rank of a pool, and return its answer."""
    if _here is None:
        name = multiprocessing.current_process().name
        raise RuntimeError(f"{name} is no process of a pool: nobody hears it")
    return _here.say(content)
