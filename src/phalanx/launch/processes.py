"""Worlds whose ranks are processes of this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from phalanx import bystanders, logs, world
from phalanx.errors import DistError
from phalanx.launch.outcomes import GRACE, Failure, as_error, overdue, reason, settle, story
from phalanx.stores import FileStore

T = TypeVar("T")

_log = logs.area("launch")

# Asks a rank to write down where each of its threads stands.
_DUMP_STACKS = signal.SIGUSR2


class _Job(NamedTuple):
    """All that a rank's process needs to know."""

    size: int
    task: bytes
    backend: str
    timeout: float | timedelta | None
    directory: str
    environment: dict[str, str]


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
    pickled (tensors by value), so `fn` must be importable: defined at the top level of a module.
    A script must start its ranks under `if __name__ == "__main__":`.

    `timeout` is the default group's; `deadline` is how many seconds the whole run may take. The
    first real failure is raised as on its rank, labelled with it; the death of a process is one
    too. Then, or when the deadline passes, or if this call is interrupted, the other ranks are
    ended: no process stays. With `return_exceptions` failures are returned in their rank's place.
    """
    if size < 1:
        raise ValueError(f"run_processes needs a size of at least 1, got {size}")
    try:
        task = pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"cannot send {fn!r} and its arguments to other processes: {error}; "
            "define the function at the top level of a module, or use thread ranks"
        ) from error
    with tempfile.TemporaryDirectory(prefix="phalanx-") as directory:
        job = _Job(size, task, backend, timeout, directory, dict(os.environ))
        results, failures = _run(job, deadline, return_exceptions)
    return settle(results, failures, return_exceptions)


class _Rank:
    """One rank's process, seen from its launcher."""

    def __init__(self, rank: int, job: _Job) -> None:
        context = multiprocessing.get_context("forkserver")
        # Forking a server that has imported torch but never used it is both fast and safe.
        context.set_forkserver_preload(["torch", "phalanx"])
        self.rank = rank
        self.stacks = Path(job.directory, f"stacks{rank}")
        self.outcome, sender = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_main, args=(rank, job, sender), name=f"rank{rank}"
        )
        self.process.start()
        sender.close()
        _log.info("started rank %d of %d as pid %d", rank, job.size, self.process.pid or 0)

    def receive(self) -> Any:
        """Return the result of the rank or its Failure, once there is one or the process ended."""
        try:
            if self.outcome.poll():
                return pickle.loads(self.outcome.recv_bytes())
        except EOFError:
            pass
        self.process.join()
        code = self.process.exitcode or 0
        if code < 0:
            error = DistError(f"rank {self.rank} was killed by {signal.Signals(-code).name}")
        else:
            error = DistError(f"rank {self.rank} exited with code {code} before its function ended")
        return Failure(self.rank, error, from_outside=True)

    def where(self) -> str:
        """Return the stacks of the threads of the process."""
        os.kill(self.process.pid or 0, _DUMP_STACKS)
        text, limit = "", time.monotonic() + 1
        # It is all there when it stops growing.
        while time.monotonic() < limit and (not text or text != self.stacks.read_text()):
            text = self.stacks.read_text()
            time.sleep(0.02)
        return text or "  (it did not answer)"

    def end(self, grace: float) -> None:
        """Wait a while for the process to end by itself, then kill it."""
        self.process.join(grace)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.outcome.close()


def _run(job: _Job, deadline: float | None, patient: bool) -> tuple[list[Any], list[Failure]]:
    """Start the ranks and gather their outcomes; if `patient`, even after a failure."""
    results: list[Any] = [None] * job.size
    failures: list[Failure] = []
    limit = float("inf") if deadline is None else time.monotonic() + deadline
    ranks: list[_Rank] = []
    grace = 0.0
    try:
        ranks += (_Rank(rank, job) for rank in range(job.size))
        running = set(ranks)
        while running:
            left = limit - time.monotonic()
            events = [r.outcome for r in running] + [r.process.sentinel for r in running]
            ready = wait(events, None if left == float("inf") else max(left, 0))
            if not ready:
                break
            for rank in [r for r in running if r.outcome in ready or r.process.sentinel in ready]:
                outcome = rank.receive()
                running.remove(rank)
                if not isinstance(outcome, Failure):
                    results[rank.rank] = outcome
                    continue
                _log.info("rank %d failed: %s", rank.rank, outcome)
                failures.append(outcome)
                if not patient:
                    limit = min(limit, outcome.when + GRACE)
        if running and (patient or not failures):
            stacks = {rank.rank: rank.where() for rank in running}
            failures += overdue(stacks, job.size, deadline or 0)
        grace = 0.0 if running else GRACE
    finally:
        for rank in ranks:
            rank.end(grace)
    return results, failures


def _main(rank: int, job: _Job, sender: Connection) -> None:
    """Be one rank: the whole life of its process."""
    watch = threading.Thread(target=_end_with_launcher, args=(job.directory,), daemon=True)
    bystanders.mark(watch).start()
    os.environ.clear()
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(job.size), LOCAL_WORLD_SIZE=str(job.size))
    with open(Path(job.directory, f"stacks{rank}"), "w") as stacks:
        faulthandler.register(_DUMP_STACKS, file=stacks, all_threads=True)
        outcome = _outcome(rank, job)
        faulthandler.unregister(_DUMP_STACKS)
    sender.send_bytes(outcome)
    sender.close()


def _outcome(rank: int, job: _Job) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(job.task)
        store = FileStore(str(Path(job.directory, "store")), job.size)
        world.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.size, timeout=job.timeout
        )
        result = fn(*args, **kwargs)
        if world.is_initialized():
            world.destroy_process_group()
        return pickle.dumps(result)
    except BaseException as error:
        failure = Failure(rank, as_error(error), story(error))
        world.current_slot().fail(reason(failure))
        return _pickled(failure)


def _pickled(failure: Failure) -> bytes:
    """Pickle a failure; an error that cannot be moved between processes travels as text."""
    try:
        data = pickle.dumps(failure)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(replace(failure, error=DistError(str(failure))))
    return data


def _end_with_launcher(directory: str) -> None:
    """Once the launcher is gone, however that ended, leave nothing behind either."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)
