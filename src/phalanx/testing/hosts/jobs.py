"""The ranks of a function or a command on several hosts."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, cast

from phalanx.launch.outcomes import GRACE, Failure, label, overdue, settle
from phalanx.testing.hosts.programs import HostError, Program
from phalanx.testing.hosts.rank import FunctionProgram


class Job:
    """Ranks on several hosts that were started together.

    `programs` are theirs, by rank: to signal one, or to read what it has printed.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = list(programs)
        for rank, program in enumerate(self.programs):
            program.where = f"rank {rank} on {program.where}"
        self._running = {program.sentinel: rank for rank, program in enumerate(self.programs)}
        self._results: list[Any] = [None] * len(self.programs)
        self._failures: list[Failure] = []

    def wait(self, timeout: float = 60, *, return_exceptions: bool = False) -> list[Any]:
        """Wait until all ranks have ended and return their results by rank.

        A function's result is what it returned, a command's what it has printed to stdout. The
        first real failure is raised, with what all ranks have printed; a command fails unless it
        exits with code 0. Ranks that still run after `timeout` seconds, or some seconds after the
        first failure, are ended. With `return_exceptions` errors take the place of results, and the
        others may go on after a failure.
        """
        limit = time.monotonic() + timeout
        try:
            while self._running and (left := limit - time.monotonic()) > 0:
                for sentinel in wait(list(self._running), left):
                    failed = self._receive(cast("int", sentinel))
                    if failed and not return_exceptions:
                        limit = min(limit, time.monotonic() + GRACE)
            if self._running and (return_exceptions or not self._failures):
                stacks = {rank: _where(self.programs[rank]) for rank in self._running.values()}
                self._failures += overdue(stacks, len(self.programs), timeout)
        finally:
            self.close()
        try:
            return settle(self._results, self._failures, return_exceptions)
        except BaseException as error:
            if printed := "".join(program.told() for program in self.programs):
                label(error, f"what the ranks have printed:{printed}")
            raise

    def _receive(self, sentinel: int) -> bool:
        """Keep what came of a rank that has ended; return whether it failed."""
        rank = self._running.pop(sentinel)
        outcome = _outcome(rank, self.programs[rank])
        if isinstance(outcome, Failure):
            self._failures.append(outcome)
            return True
        self._results[rank] = outcome
        return False

    def close(self) -> None:
        """End what still runs. What was printed can still be read."""
        self._running.clear()
        for program in self.programs:
            program.close()


def _outcome(rank: int, program: Program) -> Any:
    """Return the result of a rank or its Failure, once its program has ended."""
    if isinstance(program, FunctionProgram) and (result := program.result()):
        return pickle.loads(result)
    if isinstance(program, FunctionProgram) or program.returncode != 0:
        error = HostError(f"{program.where} {program.ending}")
        return Failure(rank, error, from_outside=True)
    return program.stdout


def _where(program: Program) -> str:
    """Say where a rank stands, as far as it can be known."""
    if isinstance(program, FunctionProgram):
        return program.stacks()
    return f"  pid {program.pid}"
