"""PyTorch's tests as cases of unittest, whose ranks are processes.

Importing this loads the tests for the settings that were exported. Other than in PyTorch's own
harness, every rank has to end well, what ranks printed is shown if they fail and not otherwise, and
nothing of a test outlives it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import unittest
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pytorch_suite import results, ways
from pytorch_suite.settings import Settings

settings = Settings.imported()
tests: Any = ways.load(settings)

from torch.testing._internal.common_distributed import (  # noqa: E402
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    MultiProcessTestCase,
    logger,
)

logger.setLevel("ERROR")  # it tells of each process that starts

SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

# How long the other ranks get to fail on their own once one has failed, and to end when told to.
GRACE = 2.0
LINES_OF_OUTPUT = 30
ENDING = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class DistributedTests(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    """The tests that have several ranks."""

    exit_codes: list[int | None] | None = None

    def setUp(self) -> None:
        super().setUp()
        self._failures: list[int] = []  # ranks, in the order in which they failed
        # A signal in the middle of this would leave a process that nobody knows of.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._start_processes(multiprocessing.get_context(settings.start_method).Process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    @classmethod
    def _run(
        cls, rank: int, test_name: str, file_name: str, pipe: Connection, **kwargs: Any
    ) -> None:
        end_with_parent(signal.SIGKILL)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        output = os.open(_output(file_name, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        # A rank that is forked has read this before it was set.
        tests.INIT_METHOD = os.environ["INIT_METHOD"]
        super()._run(rank, test_name, file_name, pipe, **kwargs)

    def _join_processes(self, fn: Any) -> None:
        timeout = max(settings.timeout, TIMEOUT_OVERRIDE.get(self._testMethodName, 0))
        try:
            stacks = self._wait(timeout)
            self.exit_codes = [process.exitcode for process in self.processes]
            try:
                skipped = results.judge(self.exit_codes, SKIPS)
            except AssertionError as error:
                raise self.failureException("\n".join([str(error), *self._said(stacks)])) from None
            if skipped:
                raise unittest.SkipTest(skipped)
        finally:
            self._end()

    def _wait(self, timeout: float) -> dict[int, str]:
        """Wait for the ranks; return the stacks of those that are too late."""
        deadline = time.monotonic() + timeout
        while running := [process for process in self.processes if process.exitcode is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            wait([process.sentinel for process in running], left)
            failed = [
                rank
                for rank, process in enumerate(self.processes)
                if process.exitcode not in (None, 0, *SKIPS) and rank not in self._failures
            ]
            if failed and not self._failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            self._failures += failed
        return {} if self._failures else {process.pid: self._stack(process) for process in running}

    def _stack(self, process: BaseProcess) -> str:
        pipe = self.pid_to_pipe[process.pid]
        try:
            pipe.send(MultiProcessTestCase.Event.GET_TRACEBACK)
            return str(pipe.recv()) if pipe.poll(GRACE) else "it does not tell its stack"
        except (EOFError, OSError) as error:
            return f"it does not tell its stack: {error!r}"

    def _said(self, stacks: dict[int, str]) -> list[str]:
        """Return what each rank has to say about its failure, the first to fail last."""
        late = [
            f"rank {rank} is at:\n{stacks[process.pid]}"
            for rank, process in enumerate(self.processes)
            if process.pid in stacks
        ]
        failed = [
            f"rank {rank}:\n{self._error(rank) or self._printed(rank)}"
            for rank in reversed(self._failures)
        ]
        return late + failed

    def _error(self, rank: int) -> str:
        pipe = self.pid_to_pipe[self.processes[rank].pid]
        try:
            return pipe.recv() if pipe.poll() else ""
        except (EOFError, OSError):
            return ""

    def _printed(self, rank: int) -> str:
        path = Path(_output(self.file_name, rank))
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-LINES_OF_OUTPUT:]) or "it printed nothing"

    def _end(self) -> None:
        """Leave no process and no file of this test."""
        for process in self.processes:
            if process.exitcode is None:
                process.terminate()
        for rank, process in enumerate(self.processes):
            process.join(GRACE)
            if process.exitcode is None:
                process.kill()
                process.join()
            self.pid_to_pipe[process.pid].close()
            Path(_output(self.file_name, rank)).unlink(missing_ok=True)
        Path(self.file_name).unlink(missing_ok=True)

    def tearDown(self) -> None:
        self._end()  # of a test that was interrupted
        super().tearDown()


def _output(file_name: str, rank: int) -> str:
    return f"{file_name}.output.{rank}"


def cases() -> list[unittest.TestCase]:
    """Return all of PyTorch's tests, each with the ranks that it needs."""
    classes = [
        DistributedTests,
        *[
            value
            for value in vars(tests).values()
            if isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and not issubclass(value, MultiProcessTestCase)
            and value.__module__ == tests.__name__
        ],
    ]
    loader = unittest.TestLoader()
    return [case for one in classes for case in loader.loadTestsFromTestCase(one)]
