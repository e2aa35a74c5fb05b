"""Worlds whose ranks are processes of this machine."""

from __future__ import annotations

import enum
import errno
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

from phalanx import leftovers, logs
from phalanx.errors import DistError
from phalanx.launch import life, notebook
from phalanx.launch.descendants import descendants
from phalanx.launch.life import Brief, Group
from phalanx.launch.outcomes import GRACE, Failure, overdue, settle
from phalanx.launch.parcels import main_as_it_is, pack
from phalanx.launch.relay import Relay
from phalanx.process import Stat, signal_name

T = TypeVar("T")

_log = logs.area("launch")

# How long ranks that are asked to end (SIGTERM) may take before they are killed.
_ASKED = 2.0

# How long a process may run on that can no longer send a result, before it counts as failed.
_HUNG_UP = 1.0

# What multiprocessing takes for the exit code of a process whose fork server has ended.
_UNKNOWN = 255

# How the process of a rank exits that starts ranks itself while it imports the main module.
_UNGUARDED = 97


def run_processes(
    fn: Callable[..., T],
    size: int,
    *args: object,
    backend: str = "phalanx",
    timeout: float | timedelta | None = None,
    deadline: float | None = None,
    return_exceptions: bool = False,
    **kwargs: object,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `size` ranks, each a new process, and return what each returned.

    In every process the default group is initialised before `fn` and destroyed after it, and RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set. `fn`, its arguments and its results are
    pickled (tensors by value), so `fn` must be importable, defined at the top level of a module,
    unless cloudpickle is installed. A script must start its ranks under
    `if __name__ == "__main__":`.

    `backend` and `timeout` are the default group's; `deadline` is how many seconds the whole run
    may take. The first real failure is raised as on its rank, labelled with it; the death of a
    process is one too. Then, or when the deadline passes, or if this call is interrupted, the other
    ranks are ended: no process stays. With `return_exceptions` failures are returned in their
    rank's place.
    """
    if size < 1:
        raise ValueError(f"run_processes needs a size of at least 1, got {size}")
    task = pack_task(fn, args, kwargs)
    with Processes(size, task, environment_of(size), group=Group(backend, timeout)) as ranks:
        ranks.see_through(deadline, return_exceptions)
    return settle(ranks.results, ranks.failures, return_exceptions)


def environment_of(size: int) -> dict[str, str]:
    """Return what the ranks of a world of processes are told, beside their own numbers."""
    return {**os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


def pack_task(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> bytes:
    """Pack a function and its arguments, and where it is from, for other processes."""
    try:
        return pack((fn, args, kwargs or {}, notebook.sources()))
    except TypeError as error:
        raise TypeError(
            f"cannot send {fn!r} and its arguments to other processes: {error}; "
            "define the function at the top level of a module, or use thread ranks"
        ) from None


class Processes:
    """The processes of one job, seen from their launcher.

    Unless somebody else is asked to `hire` them, they are new ones. As a context manager it leaves
    nothing behind: no process of its own, no file.
    """

    def __init__(
        self,
        size: int,
        task: bytes,
        environment: dict[str, str],
        *,
        group: Group | None = None,
        start_method: str = "forkserver",
        daemon: bool | None = None,
        hire: Callable[[int, Brief], Rank] | None = None,
        within: str | None = None,
        relay: Relay | None = None,
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)  # the launcher says what is wrong, once
        self.results: list[Any] = [None] * size
        self.failures: list[Failure] = []
        self.ranks: list[Rank] = []
        self.running: set[Rank] = set()
        self._limit = float("inf")  # when nobody waits any longer
        self._ending = float("inf")  # when the others have had their time after a failure
        directory = leftovers.new_directory(within)
        # At exit multiprocessing waits for ranks that nobody has waited for: they must not wait in
        # turn for somebody to take their results. What they need goes after that.
        self._stop_listening = Finalize(self, _close, (self.ranks,), exitpriority=10)
        self._tidy = Finalize(None, shutil.rmtree, (directory, True), exitpriority=-10)
        self._hush = Finalize(None, relay.close, exitpriority=-5) if relay else None
        brief = Brief(size, task, environment, group, directory)
        hire = hire or partial(NewRank, context=starting(start_method), daemon=daemon, relay=relay)
        try:
            with main_as_it_is():
                for rank in range(size):
                    self.ranks.append(hire(rank, brief))
                    self.running.add(self.ranks[-1])
            if relay:
                relay.start()
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise _explained(error, size) from None
            raise

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, timeout: float | None, patient: bool = False) -> bool:
        """Gather outcomes until all ranks have ended, or for `timeout` seconds after they began.

        Return whether it is over: after a failure the others get a while to end by themselves,
        unless this is `patient`, and if they do not it is over with them still running.
        """
        self._limit = float("inf")
        while self.running:
            if not self._have_begun():  # or one that had is replaced
                self._limit = float("inf")
            elif timeout is not None and self._limit == float("inf"):
                self._limit = time.monotonic() + timeout
            left = min(self._limit, self._ending) - time.monotonic()
            events = {rank.outcome: rank for rank in self.running}
            events |= {rank.process.sentinel: rank for rank in self.running}
            ready = wait(events, None if left == float("inf") else max(left, 0))
            if not ready:
                return time.monotonic() >= self._ending
            for rank in {events[event] for event in ready}:
                self._receive(rank, patient)
        return True

    def _have_begun(self) -> bool:
        return all(rank.has_begun for rank in self.running)

    def _receive(self, rank: Rank, patient: bool) -> None:
        before = time.monotonic()
        outcome = rank.receive()
        if outcome is UNDECIDED:  # it has said something, which may have taken its time
            spent = time.monotonic() - before
            self._limit += spent
            self._ending += spent
            return
        self.running.remove(rank)
        if not isinstance(outcome, Failure):
            self.results[rank.rank] = outcome
            return
        _log.info("rank %d failed: %s", rank.rank, outcome)
        self.failures.append(outcome)
        if not patient and not outcome.is_wanted:
            self._ending = min(self._ending, outcome.when + GRACE)

    def see_through(self, deadline: float | None, patient: bool) -> None:
        """Gather outcomes until it is over; what runs after `deadline` seconds has failed."""
        self.wait(deadline, patient)
        self.give_up(deadline or 0, patient)

    def give_up(self, after: float, patient: bool = False) -> None:
        """Count ranks that still run after so many seconds as failed, if nobody else has."""
        if self.running and (patient or all(each.is_wanted for each in self.failures)):
            stacks = {rank.rank: rank.where() for rank in self.running}
            self.failures += overdue(stacks, len(self.ranks), after)

    def end(self) -> None:
        """End what still runs, and leave nothing behind. Can be called again."""
        patience = 0.0 if self.running else GRACE
        if not self.failures:
            self.failures += (
                Failure(rank.rank, DistError(f"rank {rank.rank} was ended"), from_outside=True)
                for rank in self.running
            )
        self.running.clear()
        left = [rank for rank in self.ranks if not rank.closed]
        try:
            _join(left, patience)
            for rank in left:
                rank.terminate()
            _join(left, _ASKED)
        finally:  # at once if this is interrupted
            for rank in left:
                rank.close()
            self._stop_listening()
            self._tidy()
            if self._hush:
                self._hush()


def starting(start_method: str) -> Any:
    """Return the multiprocessing context that starts processes so."""
    context = multiprocessing.get_context(start_method)
    if isinstance(context, ForkServerContext):
        _start_fork_server(context)
    return context


def _start_fork_server(context: ForkServerContext) -> None:
    """Have ranks be forked from a process that has imported torch but never used it.

    That is both fast and safe. A Ctrl-C that comes while it imports is for this process alone.
    """
    # Ranks of tests need pytest as well.
    known = [name for name in ("pytest",) if name in sys.modules]
    context.set_forkserver_preload(["torch", *known, __name__, "phalanx.launch.unblocking"])
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def dead_fork_server() -> str:
    """Say that the process from which ranks are forked has ended; "" if it lives."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    # One that ends closes its files, by which this is noticed, a moment before it counts as dead.
    limit = time.monotonic() + _HUNG_UP
    while pid is None or Stat(f"/proc/{pid}").alive:
        if pid is None or time.monotonic() > limit:
            return ""
        time.sleep(0.01)
    return f"the process from which ranks are forked (pid {pid}) was killed or has failed"


def start(process: BaseProcess) -> None:
    """Start a process of a rank."""
    try:
        process.start()
    except (EOFError, ConnectionError) as error:  # what is left of an answer that did not come
        # It says more on stderr if it failed by itself, over a file that it could not open say.
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        told = dead_fork_server() or "the process from which ranks are forked does not answer"
        raise DistError(
            f"cannot start {process.name}: {told}; look above for what it wrote, at the limits of "
            f"open files (ulimit -n: {files} of {most}) and processes (ulimit -u), and at "
            "dmesg for a lack of memory"
        ) from error


def _explained(error: OSError, size: int) -> OSError:
    """Add to an error over starting ranks what to do, where that is known."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = f"this process may open {files} files: raise that (ulimit -n), or start fewer"
    elif error.errno == errno.EAGAIN:
        processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        advice = f"this user may have {processes} processes: raise that (ulimit -u)"
    else:
        return error
    return OSError(error.errno, f"cannot start {size} ranks: {error.strerror}; {advice}")


def _join(ranks: list[Rank], seconds: float) -> None:
    limit = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(limit - time.monotonic(), 0))


def _close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.hang_up()


class _Undecided(enum.Enum):
    UNDECIDED = "it has neither returned nor failed yet"


UNDECIDED = _Undecided.UNDECIDED


class Rank:
    """The process of one rank, seen from its launcher."""

    def __init__(self, rank: int, brief: Brief, process: BaseProcess, outcome: Any) -> None:
        self.rank = rank
        self.stacks = Path(brief.directory, f"stacks{rank}")
        self.outcome = outcome
        self.process = process
        self.pid = process.pid or 0
        self._start_time = Stat(f"/proc/{self.pid}").start_time
        self.closed = False

    @property
    def has_begun(self) -> bool:
        """Whether the deadline counts: for a new process as soon as it is started."""
        return True

    def join(self, seconds: float) -> None:
        """Wait for the process to end by itself."""
        self.process.join(seconds)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def hang_up(self) -> None:
        """Listen no more."""
        self.outcome.close()

    def receive(self) -> Any:
        """Return the result of the rank or its Failure, once there is one or the process ended."""
        try:
            if self.outcome.poll():
                return self.take(self.outcome.recv_bytes())
        except (EOFError, ConnectionResetError):
            pass
        self.process.join(_HUNG_UP)
        if (now := self.stat()).alive and self.process.exitcode is None:
            error = DistError(
                f"rank {self.rank} closed its line to the launcher before its function ended, by "
                f"exec or with other open files: no result can come, and its process {self.pid}, "
                f"which now runs '{now.name}', has been ended"
            )
            self.process.terminate()
            return Failure(self.rank, error, from_outside=True)
        self.process.join()
        code = self.process.exitcode or 0
        if code == _UNGUARDED:
            error = DistError(
                f"rank {self.rank} started ranks while it imported the main module\n"
                'every rank imports that first: start ranks under `if __name__ == "__main__":`'
            )
        elif code == _UNKNOWN and (server := dead_fork_server()):
            error = DistError(
                f"how rank {self.rank} ends cannot be known: {server}; look at what it wrote, and "
                "at dmesg for a lack of memory"
            )
        elif code < 0:
            error = DistError(f"rank {self.rank} was killed by {signal_name(-code)}")
        else:
            error = DistError(f"rank {self.rank} exited with code {code} before its function ended")
        return Failure(self.rank, error, from_outside=True)

    def take(self, outcome: bytes) -> Any:
        """Unpack what the rank has sent."""
        try:
            return pickle.loads(outcome)
        except Exception as error:
            problem = DistError(
                f"rank {self.rank} returned what this process cannot unpickle: "
                f"{type(error).__name__}: {error}"
            )
            return Failure(self.rank, problem, from_outside=True)

    def where(self) -> str:
        """Return the stacks of the threads of the process."""
        if Stat(f"/proc/{self.pid}").stopped:
            return "  (it is stopped, by a signal or a debugger)"
        if not self.stacks.exists():  # nor does it know the signal yet
            return "  (it has not begun yet)"
        with suppress(ProcessLookupError):
            os.kill(self.pid, life.DUMP_STACKS)
        return of_program(settled(self.stacks.read_text)) or "  (it did not answer)"

    def stat(self) -> Stat:
        """Return what the system says of the process; of another with its number, nothing."""
        now = Stat(f"/proc/{self.pid}")
        return now if now.start_time == self._start_time else Stat("")

    def close(self) -> None:
        """Kill the process if it still runs, with what it has started."""
        self.closed = True
        if self.process.exitcode == _UNKNOWN and self.stat().alive:  # multiprocessing has lost it
            _kill(self.pid)
            limit = time.monotonic() + GRACE
            while self.stat().alive and time.monotonic() < limit:
                time.sleep(0.01)
        kill(self.process)


# The frame that calls the function of a rank, in what faulthandler writes.
_CALLER = re.compile(
    r'/phalanx/((launch/life|testing/hosts/rank)\.py", line \d+ in _outcome'
    r'|testing/plugin/rank_process\.py", line \d+ in do)$'
)


def settled(read: Callable[[], str]) -> str:
    """Return what can be read once it has begun and grows no longer; what there is after a while.

    Stacks are written in many pieces.
    """
    text, times, limit = "", 0, time.monotonic() + 5
    while times < 5 and time.monotonic() < limit:
        now = read()
        times = times + 1 if now and now == text else 0
        text = now
        time.sleep(0.02)
    return text


def of_program(stacks: str) -> str:
    """Leave out of the stacks of a rank's threads what is about running it."""
    kept = []
    for stack in stacks.split("\n\n"):
        lines = stack.splitlines()
        outer = next((i for i, line in enumerate(lines) if _CALLER.search(line)), len(lines))
        if not any(line.endswith(" in _end_with_launcher") for line in lines):
            kept.append("\n".join(lines[:outer]))
    return "\n\n".join(kept)


def kill(process: BaseProcess) -> None:
    """Kill a process if it still runs, with what it has started, and forget it."""
    if process.is_alive():
        _kill(process.pid or 0)
    process.join()
    process.close()


def _kill(pid: int) -> None:
    for each in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


class NewRank(Rank):
    """A rank whose process lives as long as its function."""

    def __init__(
        self, rank: int, brief: Brief, context: Any, daemon: bool | None, relay: Relay | None
    ) -> None:
        outcome, sender = context.Pipe(duplex=False)
        mouth = relay.mouth(rank, context) if relay else None
        process = context.Process(
            target=life.be, args=(rank, brief, sender, mouth), name=f"rank{rank}", daemon=daemon
        )
        start(process)
        sender.close()
        if mouth:
            mouth.close()
        super().__init__(rank, brief, process, outcome)
        _log.info("started rank %d of %d as pid %d", rank, brief.size, self.pid)
