"""A rank on a host that runs a function: forked, as other ranks are, from where torch is loaded."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import IO, Any, NamedTuple

import phalanx
from phalanx.launch.life import DUMP_STACKS, failed, heed_environment, packed_result, unpack_task
from phalanx.launch.parcels import main_as_it_is
from phalanx.launch.processes import of_program, settled, starting
from phalanx.testing.hosts import namespaces
from phalanx.testing.hosts.programs import ALL, Process, Program, content, scratch


class Task(NamedTuple):
    """What every rank of a job does."""

    function: bytes  # with its arguments, packed
    name: str
    backend: str | None  # of the default group, if there is to be one
    timeout: float | timedelta | None


class FunctionProgram(Program):
    """A function that runs on a host."""

    def __init__(self, pid: int, where: str, env: dict[str, str], task: Task) -> None:
        self._order = (pid, os.getcwd(), env, task)
        self._result, self._stacks = scratch(), scratch()
        super().__init__([task.name], where)

    def _start(self, told: int, stdout: IO[bytes], stderr: IO[bytes]) -> Process:
        files = [file.fileno() for file in (stdout, stderr, self._result, self._stacks)]
        context = starting("forkserver")
        with main_as_it_is():
            process = context.Process(
                target=_be_rank, args=(_Descriptors([told, *files]), *self._order), daemon=True
            )
            process.start()
        return _Forked(process)

    def result(self) -> bytes:
        """Return what the function has come to, packed; nothing if it did not get that far."""
        return content(self._result)

    def stacks(self) -> str:
        """Return where its threads stand."""
        self.send_signal(DUMP_STACKS)
        text = settled(lambda: content(self._stacks).decode(errors="replace"))
        return of_program(text) or "  (it did not answer)"

    def close(self) -> None:
        super().close()
        self._result.close()
        self._stacks.close()


class _Forked:
    """A process of multiprocessing's, as Popen would show it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.sentinel = process.sentinel
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._process.exitcode
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.close()


class _Descriptors:
    """Descriptors on their way to a process that is being started."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> Any:
        return _received, tuple(map(reduction.DupFd, self._descriptors))


def _received(*senders: Any) -> list[int]:
    return [sender.detach() for sender in senders]


def _be_rank(
    descriptors: list[int], host: int, directory: str, env: dict[str, str], task: Task
) -> None:
    """Be the process of a rank, and its parent outside the host."""
    told, stdout, stderr, result, stacks = descriptors
    os.setsid()  # Ctrl-C is for whoever made the hosts
    for descriptor, stream in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    namespaces.join(host, list(ALL), directory)
    namespaces.fork(told)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    heed_environment()
    faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)
    with os.fdopen(result, "wb") as file:
        file.write(_outcome(task))


def _outcome(task: Task) -> bytes:
    try:
        fn, args, kwargs = unpack_task(task.function)
        if task.backend is not None:
            phalanx.init_process_group(task.backend, timeout=task.timeout)
        value = fn(*args, **kwargs)
        if phalanx.is_initialized():
            phalanx.destroy_process_group()
        return packed_result(value)
    except BaseException as error:
        return failed(int(os.environ["RANK"]), error)
