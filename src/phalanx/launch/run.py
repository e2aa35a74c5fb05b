"""Run a program on several ranks of this machine.

PROGRAM is a Python script, with -m a module, or any executable. Every rank finds torchrun's
environment variables, so that scripts of torch.distributed run as well. There is no port to choose.
The first rank that fails ends the job; its traceback and the cause are printed last, and its exit
code is the job's.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path

from phalanx.commands import CommandError
from phalanx.launch import placement
from phalanx.launch.environment import HeldPort, Job
from phalanx.launch.keeper import Order, become_subreaper
from phalanx.launch.output import Screen, styled
from phalanx.launch.supervisor import End, Outcome, Signals, Supervisor
from phalanx.machine import Machine
from phalanx_autoload import REPLACE, REPLACEABLE

EXAMPLES = [
    ("phalanx run -n 4 train.py --epochs 3", "a script on four ranks"),
    ("phalanx run -n auto -m package.train", "a module, a rank for each core"),
    ("phalanx run -n 2 -- bash -c 'echo $RANK'", "any executable"),
    ("phalanx run -n 2 --replace gloo train.py", "a script of torch's, with gloo replaced"),
    ("phalanx run -n 2 --trace out train.py", "record all operations: phalanx trace out"),
    ("phalanx run -n 4 --max-restarts 3 --log-dir logs train.py", "start again if a rank fails"),
]

TIMED_OUT = 124  # the exit code of timeout(1)
# What nearly every program needs of the package before its first collective.
_PRELOAD = ["torch", "phalanx.collectives", "phalanx.backends.local", "phalanx.stores.rendezvous"]


def configure(parser: ArgumentParser) -> None:
    parser.usage = "phalanx run [options] [-m] PROGRAM [ARGUMENTS ...]"
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        "--nproc_per_node",
        type=_size,
        default=1,
        metavar="RANKS",
        help="how many ranks; auto: one for each core (1)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="PROGRAM is an executable"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=_count,
        default=0,
        metavar="N",
        help="how often to start all ranks again after a failure (0)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="TIME",
        help="end the job after that time, as in 90, 15m or 2h, and say where ranks stand",
    )
    parser.add_argument(
        "--log-dir", "--log_dir", type=Path, metavar="DIR", help="keep the output of each rank"
    )
    parser.add_argument(
        "--pin",
        choices=placement.PINS,
        default="auto",
        help="give each rank cores of its own, or those of a memory node (auto)",
    )
    parser.add_argument(
        "--replace",
        choices=REPLACEABLE,
        metavar="BACKEND",
        help="let this backend of torch.distributed mean phalanx: gloo",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="record every operation of every rank there"
    )
    parser.add_argument(
        "--no-preload",
        action="store_true",
        help="let every rank import torch itself, rather than fork it from one that has",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print what ranks print only")
    # Those that torchrun needs and we do not: accepted where they mean what we do anyway.
    parser.add_argument("--standalone", action="store_true", help="accepted: it is always so")
    parser.add_argument("--nnodes", type=_one_machine, help="accepted if it is 1")
    parser.add_argument("program", metavar="PROGRAM", help="what to run")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=REMAINDER, help="its arguments")


def _size(text: str) -> int:
    if text in ("auto", "cpu"):
        return placement.usable_cores(Machine())
    if not text.isdigit() or not int(text):
        raise ArgumentTypeError(f"a number of ranks is 1 or more, or auto; got {text}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise ArgumentTypeError(f"a number is needed, 0 or more; got {text}")
    return int(text)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", text)
    if not found or not float(found[1]):
        raise ArgumentTypeError(f"a time is a number of seconds, or as in 15m or 2h; got {text}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _one_machine(text: str) -> str:
    if text not in ("1", "1:1"):
        raise ArgumentTypeError(f"phalanx run starts ranks on this machine only; got {text}")
    return text


def run(arguments: Namespace) -> int:
    kind = _kind(arguments)
    job = Job(arguments.nproc_per_node, max_restarts=arguments.max_restarts)
    environment = dict(os.environ)
    if arguments.replace:
        environment[REPLACE] = arguments.replace
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # or torch would not look for us
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        environment["PHALANX_TRACE"] = str(arguments.trace.resolve())
    placed = placement.place(job.size, Machine(), environment, arguments.pin)
    if placed.threads is not None:
        environment[placement.THREADS_VARIABLE] = str(placed.threads)
    if kind == "executable":
        environment.setdefault("PYTHONUNBUFFERED", "1")  # should it be Python after all
    order = Order(
        program=arguments.program,
        arguments=arguments.arguments,
        kind=kind,
        preload=_PRELOAD if _wants_torch(arguments, kind) else [],
        environments=[environment] * job.size,
        cpus=placed.cpus,
    )
    launcher = _Launcher(job, order, arguments)
    launcher.say(f"job {job.name}: {_count_of(job.size, 'rank')}, {placed.describe(environment)}")
    return launcher.run()


def _kind(arguments: Namespace) -> str:
    """Say what PROGRAM is, or why it cannot be run."""
    if arguments.program == "--" and arguments.arguments:
        arguments.program = arguments.arguments.pop(0)
    program = arguments.program
    if arguments.module:
        return "module"
    is_file = Path(program).is_file()
    if not arguments.no_python:
        if is_file and (program.endswith(".py") or not os.access(program, os.X_OK)):
            return "script"
        if program.endswith(".py"):
            raise CommandError(f"there is no file {program}")
    if shutil.which(program) is None:
        what = "it is not executable" if is_file else "there is no such file or command"
        raise CommandError(f"cannot run {program}: {what}")
    return "executable"


def _wants_torch(arguments: Namespace, kind: str) -> bool:
    """Guess whether importing torch beforehand pays: all that is lost otherwise is time."""
    if arguments.no_preload or kind == "executable":
        return False
    if kind == "module":
        return True
    return bool(re.search(rb"\b(torch|phalanx)\b", Path(arguments.program).read_bytes()))


class _Launcher:
    def __init__(self, job: Job, order: Order, arguments: Namespace) -> None:
        self._job, self._order, self._arguments = job, order, arguments
        self._screen = Screen()
        self._start = time.monotonic()
        self._logs = arguments.log_dir / job.name if arguments.log_dir else None

    def say(self, text: str, style: int = 2) -> None:
        """Print a line of our own, unless the user wants none."""
        if not self._arguments.quiet:
            self._print(f"phalanx run: {text}", style)

    def run(self) -> int:
        """Run the job, again if it may fail, and return its exit code."""
        become_subreaper()
        machine = Machine()
        limit = self._arguments.timeout
        deadline = None if limit is None else self._start + limit
        with Signals() as signals:
            for attempt in range(self._job.max_restarts + 1):
                killed = machine.oom_kills()
                outcome = self._attempt(attempt, signals, deadline)
                starved = machine.oom_kills() > killed
                code = self._tell(outcome, starved, machine)
                left = self._job.max_restarts - attempt
                if not code or outcome.interrupted or outcome.timed_out or not left:
                    break
                self.say(f"starting all ranks again ({_count_of(left, 'restart')} left)")
        return code

    def _attempt(self, attempt: int, signals: Signals, deadline: float | None) -> Outcome:
        port = HeldPort()
        try:
            common = self._job.variables(port.number, attempt)
            environments = [
                {**environment, **common, **self._job.rank_variables(rank)}
                for rank, environment in enumerate(self._order.environments)
            ]
            order = replace(self._order, environments=environments)
            logs = self._logs / f"attempt_{attempt}" if self._logs else None
            supervisor = Supervisor(
                order, self._screen, logs, signals, self.say, deadline, self._overdue
            )
            return supervisor.run()
        finally:
            port.close()

    def _tell(self, outcome: Outcome, starved: bool, machine: Machine) -> int:
        """Print what became of the ranks, the cause last, and return the exit code."""
        if outcome.left:
            self.say("ended processes that ranks had left behind: " + ", ".join(outcome.left))
        if outcome.interrupted:
            name = signal.Signals(outcome.interrupted).name
            self.say(f"ended by {name} after {self._age()}")
            return 128 + outcome.interrupted
        if outcome.timed_out:
            ranks = _ranks(outcome.timed_out)
            limit = self._arguments.timeout
            self._fail(f"{ranks} did not end within {limit:g} s and had to be ended")
            return TIMED_OUT
        first = outcome.first
        if first is None:
            if outcome.keeper:
                code = outcome.keeper
                how = signal.Signals(-code).name if code < 0 else f"code {code}"
                self._fail(f"the process that keeps the ranks ended by {how}, and they with it")
                return 1
            return 0
        self._tell_of_others(outcome, first)
        if first.last_words:
            self._print(f"rank {first.rank}:", "1")
            self._print(first.last_words)
        cause = f"rank {first.rank} of {self._job.size} {_how(first)}"
        if first.signal == signal.SIGKILL and starved:
            cause += ": it was the kernel's out-of-memory killer" + _memory(machine)
        self._fail(f"{cause}, after {self._age()}")
        return first.code

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
        if not pids or self._order.kind == "executable":
            return
        command = [sys.executable, "-m", "phalanx", "why", str(pids[0])]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return
        if told.returncode == 0:
            self._print(told.stdout.rstrip(), None)

    def _fail(self, text: str) -> None:
        self._print(f"phalanx run: {text}", "1;31")

    def _print(self, text: str, style: int | str | None = None) -> None:
        self._screen.line(sys.stderr, styled(text, style, sys.stderr) if style else text)

    def _age(self) -> str:
        return f"{time.monotonic() - self._start:.1f} s"


def _how(end: End) -> str:
    if not end.signal:
        return f"exited with code {end.code}"
    return f"was killed by {signal.Signals(end.signal).name}"


def _memory(machine: Machine) -> str:
    limit = machine.memory_limit()
    return "" if limit is None else f" (the limit of this group is {limit / 2**30:.2g} GiB)"


def _ranks(ranks: list[int]) -> str:
    from phalanx import _native

    return _native.rank_list(sorted(ranks))


def _count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
