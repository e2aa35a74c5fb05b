"""Run a program on several ranks of this machine.

PROGRAM is a Python script, with -m a module, or any executable. Every rank finds torchrun's
environment variables, so that scripts of torch.distributed run as well. There is no port to choose.
The first rank that fails ends the job; its traceback and the cause are printed last, and its exit
code is the job's.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from argparse import PARSER, SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

from phalanx.commands import CommandError
from phalanx.launch import placement
from phalanx.launch.environment import JOB_VARIABLE, Job
from phalanx.launch.start import start
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

_ONE = "phalanx run starts ranks on this machine only; for several use torchrun, mpirun or srun"

# What changes how torch is imported, or what it says then.
_SETTING = rb"\b(environ|putenv|filterwarnings|simplefilter|load_dotenv)\b"
# What nearly every program needs of the package before its first collective.
_PRELOAD = ["torch", "phalanx.collectives", "phalanx.backends.local", "phalanx.stores.rendezvous"]
_PRELOAD += ["phalanx.debug.watch", "phalanx.torch_backend.group"]


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
        raise ArgumentTypeError(f"{_ONE}; got {text}")
    return text


def _first_machine(text: str) -> str:
    if text != "0":
        raise ArgumentTypeError(f"{_ONE}; got {text}")
    return text


def run(arguments: Namespace) -> int:
    words = arguments.words[1:] if arguments.words[0] == "--" else arguments.words
    if not words:
        raise CommandError("no PROGRAM is given")
    _open_streams()
    kind = _kind(words, arguments)
    job = Job(arguments.nproc_per_node, max_restarts=arguments.max_restarts)
    environment = dict(os.environ)
    if arguments.replace:
        environment[REPLACE] = arguments.replace
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # or torch would not look for us
    if arguments.trace:
        _make(arguments.trace, "--trace", 0o700)
        environment["PHALANX_TRACE"] = str(arguments.trace.resolve())
    if arguments.log_dir:
        _make(arguments.log_dir, "--log-dir")
    placed = placement.place(job.size, Machine(), environment, arguments.pin)
    if placed.threads is not None:
        environment[placement.THREADS_VARIABLE] = str(placed.threads)
    if kind == "executable":
        environment.setdefault("PYTHONUNBUFFERED", "1")  # should it be Python after all
    descriptors = _allow_descriptors(job.size)
    preload = [] if arguments.no_preload or not _wants_torch(words[0], kind) else _PRELOAD
    # The name is for those who look at ranks from outside: they see what the keeper was told.
    begin = partial(start, job.size, preload, {**environment, JOB_VARIABLE: job.name}, words)
    started = begin()
    from phalanx.launch import launcher  # while the keeper imports what ranks need

    plan = launcher.Plan(job, words, kind, environment, placed, descriptors, begin)
    return launcher.launch(plan, started, arguments)


def _open_streams() -> None:
    """Open the standard streams that are closed, lest a pipe takes the place of one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number


def _make(directory: Path, option: str, mode: int = 0o777) -> None:
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {directory}: {error.strerror}") from None


def _allow_descriptors(size: int) -> int:
    """Let this process open as many files as the pipes of ranks take; returns what it was."""
    needed = 6 * size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise CommandError(
            f"{size} ranks need {needed} open files, but the hard limit is {hard}; "
            f"have it raised (ulimit -Hn {needed})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    return soft


def _kind(words: list[str], arguments: Namespace) -> str:
    """Say what the first word is, or why it cannot be run."""
    program = words[0]
    if arguments.module:
        return "module"
    is_file = Path(program).is_file()
    if not arguments.no_python:
        if Path(program, "__main__.py").is_file() or (is_file and _is_archive(program)):
            return "archive"
        if is_file and (program.endswith(".py") or not os.access(program, os.X_OK)):
            return "script"
        if program.endswith(".py"):
            raise CommandError(f"there is no file {program}")
    if is_file:
        words[0] = os.path.abspath(program)
    elif shutil.which(program) is None:
        raise CommandError(f"cannot run {program}: there is no such file or command")
    return "executable"


def _is_archive(path: str) -> bool:
    if path.endswith(".py"):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _wants_torch(program: str, kind: str) -> bool:
    """Guess whether importing torch beforehand pays: all that is lost otherwise is time.

    It does not where a script first sets something that torch looks at when it is imported.
    """
    if kind in ("executable", "archive"):
        return False
    if kind == "module":
        return True
    source = Path(program).read_bytes()
    imported = re.search(rb"^\s*(import|from)\s.*\b(torch|phalanx)\b", source, re.MULTILINE)
    return imported is not None and not re.search(_SETTING, source[: imported.start()])
