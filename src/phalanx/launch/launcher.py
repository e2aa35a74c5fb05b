"""One job from its start to what is said of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import termios
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

from phalanx.launch.descendants import become_subreaper
from phalanx.launch.environment import HeldPort, Job
from phalanx.launch.keeper import Order
from phalanx.launch.output import Screen, styled
from phalanx.launch.placement import Placement
from phalanx.launch.start import Started
from phalanx.launch.supervisor import End, Outcome, Signals, Supervisor
from phalanx.machine import Machine
from phalanx.process import signal_name

TIMED_OUT = 124  # the exit code of timeout(1)
# So many seconds whoever reads our output may take for the last of it.
PATIENCE = 5.0


class Plan(NamedTuple):
    """What is to be run, and where."""

    job: Job
    words: list[str]  # the program and its arguments
    kind: str  # of the program: see Order
    environment: dict[str, str]
    placed: Placement
    descriptors: int  # how many a rank may have open
    begin: Callable[[], Started]  # starts a keeper for one attempt


def launch(plan: Plan, started: Started, arguments: Namespace) -> int:
    """Run a job whose first keeper has been started; returns the exit code."""
    # Signals are taken before there is a thread that could be sent one.
    with _terminal_kept(), Signals() as signals:
        return _Launcher(plan, arguments, signals).run(started)


@contextlib.contextmanager
def _terminal_kept() -> Iterator[None]:
    """Give back the terminal as it was: a rank may have been ended at a password prompt."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        before = None
    try:
        yield
    finally:
        if before is not None and os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSADRAIN, before)


class _Launcher:
    def __init__(self, plan: Plan, arguments: Namespace, signals: Signals) -> None:
        self._plan, self._arguments, self._signals = plan, arguments, signals
        self._job = job = plan.job
        self._screen = Screen()
        self._start = time.monotonic()
        self._logs = arguments.log_dir / job.name if arguments.log_dir else None

    def say(self, text: str, style: int = 2) -> None:
        """Print a line of our own, unless the user wants none."""
        if not self._arguments.quiet:
            self._print(f"phalanx run: {text}", style)

    def run(self, started: Started) -> int:
        """Run the job, again if it may fail, and return its exit code."""
        job, placed = self._job, self._plan.placed.describe(self._plan.environment)
        self.say(f"job {job.name}: {_count_of(job.size, 'rank')}, {placed}")
        become_subreaper()
        code = self._attempts(started)
        if not self._screen.close(PATIENCE):  # nobody reads what is left to say
            os._exit(code)
        return code

    def _attempts(self, started: Started) -> int:
        machine = Machine()
        limit = self._arguments.timeout
        deadline = None if limit is None else self._start + limit
        for attempt in range(self._job.max_restarts + 1):
            killed = machine.oom_kills()
            if attempt:
                started = self._plan.begin()
            outcome = self._attempt(attempt, started, deadline)
            starved = machine.oom_kills() > killed
            code = self._tell(outcome, starved, machine)
            over = outcome.interrupted or outcome.timed_out or outcome.unread
            if not code or over or attempt == self._job.max_restarts:
                break
            self.say(f"starting all ranks again ({attempt + 1} of {self._job.max_restarts})")
        return code

    def _attempt(self, attempt: int, started: Started, deadline: float | None) -> Outcome:
        plan, port = self._plan, HeldPort()
        common = plan.environment | self._job.variables(port.number, attempt)
        order = Order(
            program=plan.words[0],
            arguments=plan.words[1:],
            kind=plan.kind,
            environments=[common | self._job.rank_variables(r) for r in range(self._job.size)],
            cpus=plan.placed.cpus,
            descriptors=plan.descriptors,
        )
        logs = self._logs / f"attempt_{attempt}" if self._logs else None
        supervisor = Supervisor(
            started, order, self._screen, logs, self._signals, self.say, deadline, self._overdue
        )
        try:
            return supervisor.run()
        finally:
            port.close()

    def _tell(self, outcome: Outcome, starved: bool, machine: Machine) -> int:
        """Print what became of the ranks, the cause last, and return the exit code."""
        if outcome.left:
            self.say("ended processes that ranks had left behind: " + ", ".join(outcome.left))
        if outcome.unread:
            if not isinstance(outcome.unread, BrokenPipeError):
                self._fail(f"the output cannot be written: {outcome.unread.strerror}")
            return 128 + signal.SIGPIPE
        first = outcome.first
        if first is None:
            return self._tell_of_end(outcome)
        self._tell_of_others(outcome, first)
        if first.last_words:
            wrote = "" if first.record else ", which last wrote"
            self._print(f"rank {first.rank}{wrote}:", "1")
            self._print(first.last_words)
        cause = f"rank {first.rank} of {self._job.size} {_how(first)}"
        if first.signal == signal.SIGKILL and starved:
            cause += ": it was the kernel's out-of-memory killer" + _memory(machine)
        self._fail(f"{cause}, after {self._age()}")
        return first.code

    def _tell_of_end(self, outcome: Outcome) -> int:
        """Print how a job ended of which no rank had failed by itself."""
        if outcome.interrupted:
            places: dict[str, list[int]] = {}
            for end in outcome.ends:
                places.setdefault(end.record.get("where", ""), []).append(end.rank)
            for place, ranks in places.items():
                if place:
                    self.say(f"{_ranks(ranks)} stopped at {place}")
            self.say(f"ended by {signal_name(outcome.interrupted)} after {self._age()}")
            return 128 + outcome.interrupted
        if outcome.timed_out:
            who, limit = _ranks(outcome.timed_out), self._arguments.timeout
            self._fail(f"{who} did not end within {limit:g} s and had to be ended")
            return TIMED_OUT
        if outcome.unable:
            self._fail(outcome.unable)
            return 1
        if outcome.keeper:
            how = f"code {outcome.keeper}"
            if outcome.keeper < 0:
                how = signal_name(-outcome.keeper)
            self._fail(f"the process that keeps the ranks ended by {how}, and they with it")
            return 1
        return 0

    def _tell_of_others(self, outcome: Outcome, first: End) -> None:
        """Print what the other ranks have to add to the failure of the first."""
        others = [end for end in outcome.ends if end.status and end is not first]
        failed = [end for end in others if not end.is_echo and end.rank in outcome.unasked]
        parties: dict[str, list[int]] = {}
        for end in failed:
            alike = end.record and end.record.get("error") == first.record.get("error")
            error = f"as rank {first.rank} did" if alike else end.record.get("error", _how(end))
            parties.setdefault(error, []).append(end.rank)
        for error, ranks in parties.items():
            self._print(f"{_ranks(ranks)} failed too: {error}")
        if first.signal:  # it could not speak for itself: one that waited for it can
            for echo in [end for end in others if end.is_echo][:1]:
                self._print(f"rank {echo.rank}, which waited for it:", "1")
                self._print(echo.last_words)
        if ended := [end.rank for end in others if end not in failed]:
            self._print(f"{_ranks(ended)} had to end with it")

    def _overdue(self, pids: list[int]) -> None:
        """Print what the job waits for, as ``phalanx why`` sees it."""
        if not pids or self._plan.kind == "executable":
            return
        command = [sys.executable, "-m", "phalanx", "why", str(pids[0])]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return
        if told.returncode == 0:
            self._print(told.stdout.rstrip())

    def _fail(self, text: str) -> None:
        self._print(f"phalanx run: {text}", "1;31")

    def _print(self, text: str, style: int | str | None = None) -> None:
        errors = self._screen.errors
        self._screen.line(errors, styled(text, style, errors) if style else text)

    def _age(self) -> str:
        return f"{time.monotonic() - self._start:.1f} s"


def _how(end: End) -> str:
    if not end.signal:
        return f"exited with code {end.code}"
    return f"was killed by {signal_name(end.signal)}"


def _memory(machine: Machine) -> str:
    limit = machine.memory_limit()
    return "" if limit is None else f" (the limit of this group is {limit / 2**30:.2g} GiB)"


def _ranks(ranks: list[int]) -> str:
    from phalanx import _native

    return _native.rank_list(sorted(ranks))


def _count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
