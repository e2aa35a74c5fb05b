"""Run a program on several ranks of this machine.

PROGRAM is a Python script, with -m a module, or any executable. Every rank finds torchrun's
environment variables, so that scripts of torch.distributed run as well. There is no port to choose.
The first rank that fails ends the job; its traceback and the cause are printed last, and its exit
code is the job's.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
import zipfile
from argparse import PARSER, SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.commands import CommandError
from phalanx.launch import placement
from phalanx.launch.environment import HeldPort, Job
from phalanx.launch.keeper import Order, become_subreaper
from phalanx.launch.output import Screen, styled
from phalanx.launch.supervisor import End, Outcome, Signals, Supervisor, signal_name
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

_TORCHRUN_OPTIONS = [f"rdzv-{what}" for what in ("backend", "endpoint", "id", "conf")]
_TORCHRUN_OPTIONS += ["master-addr", "master-port", "local-addr", "role", "monitor-interval"]
_TORCHRUN_OPTIONS += ["start-method", "tee", "redirects"]

TIMED_OUT = 124  # the exit code of timeout(1)
# So many seconds whoever reads our output may take for the last of it.
PATIENCE = 5.0
# What changes how torch is imported, or what it says then.
_SETTING = rb"\b(environ|putenv|filterwarnings|simplefilter|load_dotenv)\b"
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
    torchrun = parser.add_argument_group(
        "options of torchrun", "accepted, and without effect: ranks of one machine need none"
    )
    torchrun.add_argument("--standalone", action="store_true", help="it is always so")
    torchrun.add_argument("--nnodes", type=_one_machine, metavar="N", help="1")
    torchrun.add_argument("--node-rank", "--node_rank", type=_first_machine, metavar="N", help="0")
    for name in _TORCHRUN_OPTIONS:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        torchrun.add_argument(*sorted(spellings), metavar="X", help=SUPPRESS)
    # Takes all that follows as it is; a plain remainder would lose a "--" of the program's.
    parser.add_argument(
        "words", metavar="PROGRAM", nargs=PARSER, help="what to run, with arguments"
    )


def _size(text: str) -> int:
    if text in ("auto", "cpu"):
        return placement.usable_cores(Machine())
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"a number of ranks is 1 or more, or auto; got {text}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
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


def _first_machine(text: str) -> str:
    if text != "0":
        raise ArgumentTypeError(f"phalanx run starts ranks on this machine only; got {text}")
    return text


def run(arguments: Namespace) -> int:
    words = arguments.words[1:] if arguments.words[0] == "--" else arguments.words
    if not words:
        raise CommandError("no PROGRAM is given")
    arguments.program, *arguments.arguments = words
    _open_streams()
    kind = _kind(arguments)
    job = Job(arguments.nproc_per_node, max_restarts=arguments.max_restarts)
    environment = dict(os.environ)
    if arguments.replace:
        environment[REPLACE] = arguments.replace
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # or torch would not look for us
    if arguments.trace:
        _make(arguments.trace, "--trace")
        environment["PHALANX_TRACE"] = str(arguments.trace.resolve())
    if arguments.log_dir:
        _make(arguments.log_dir, "--log-dir")
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
        descriptors=_allow_descriptors(job.size),
    )
    about = f"job {job.name}: {_count_of(job.size, 'rank')}, {placed.describe(environment)}"
    # Before there is a thread that could be sent one of the signals.
    with _terminal_kept(), Signals() as signals:
        return _Launcher(job, order, arguments, signals).run(about)


def _open_streams() -> None:
    """Open the standard streams that are closed, lest a pipe takes the place of one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number


def _make(directory: Path, option: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {directory}: {error.strerror}") from None


def _allow_descriptors(size: int) -> int:
    """Let this process open as many files as the pipes of ranks take; returns what it was."""
    needed = 6 * size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise CommandError(
            f"{size} ranks need {needed} open files, but the limit is {hard}: ulimit -Hn {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    return soft


def _kind(arguments: Namespace) -> str:
    """Say what PROGRAM is, or why it cannot be run."""
    program = arguments.program
    if arguments.module:
        return "module"
    is_file = Path(program).is_file()
    if not arguments.no_python:
        if Path(program, "__main__.py").is_file() or (is_file and zipfile.is_zipfile(program)):
            return "archive"
        if is_file and (program.endswith(".py") or not os.access(program, os.X_OK)):
            return "script"
        if program.endswith(".py"):
            raise CommandError(f"there is no file {program}")
    if is_file:
        arguments.program = os.path.abspath(program)
    elif shutil.which(program) is None:
        raise CommandError(f"cannot run {program}: there is no such file or command")
    return "executable"


def _wants_torch(arguments: Namespace, kind: str) -> bool:
    """Guess whether importing torch beforehand pays: all that is lost otherwise is time.

    It does not where a script first sets something that torch looks at when it is imported.
    """
    if arguments.no_preload or kind in ("executable", "archive"):
        return False
    if kind == "module":
        return True
    source = Path(arguments.program).read_bytes()
    imported = re.search(rb"^\s*(import|from)\s.*\b(torch|phalanx)\b", source, re.MULTILINE)
    return imported is not None and not re.search(_SETTING, source[: imported.start()])


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
    def __init__(self, job: Job, order: Order, arguments: Namespace, signals: Signals) -> None:
        self._job, self._order, self._arguments, self._signals = job, order, arguments, signals
        self._screen = Screen()
        self._start = time.monotonic()
        self._logs = arguments.log_dir / job.name if arguments.log_dir else None

    def say(self, text: str, style: int = 2) -> None:
        """Print a line of our own, unless the user wants none."""
        if not self._arguments.quiet:
            self._print(f"phalanx run: {text}", style)

    def run(self, about: str) -> int:
        """Run the job, again if it may fail, and return its exit code."""
        self.say(about)
        become_subreaper()
        code = self._attempts()
        if not self._screen.close(PATIENCE):  # nobody reads what is left to say
            os._exit(code)
        return code

    def _attempts(self) -> int:
        machine = Machine()
        limit = self._arguments.timeout
        deadline = None if limit is None else self._start + limit
        for attempt in range(self._job.max_restarts + 1):
            killed = machine.oom_kills()
            outcome = self._attempt(attempt, deadline)
            starved = machine.oom_kills() > killed
            code = self._tell(outcome, starved, machine)
            over = outcome.interrupted or outcome.timed_out or outcome.unread
            if not code or over or attempt == self._job.max_restarts:
                break
            self.say(f"starting all ranks again ({attempt + 1} of {self._job.max_restarts})")
        return code

    def _attempt(self, attempt: int, deadline: float | None) -> Outcome:
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
                order, self._screen, logs, self._signals, self.say, deadline, self._overdue
            )
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
