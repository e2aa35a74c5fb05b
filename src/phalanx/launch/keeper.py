"""The process that keeps the ranks of a job: it starts them, and leaves none behind.

It stands between the launcher, which talks to the user, and the ranks. All that a rank starts, and
whatever becomes of the rank, stays below the keeper (which is a subreaper), so it can end all of
it; it does so as soon as the launcher is gone, however that went. Should the keeper itself be
killed, so are the ranks (PR_SET_PDEATHSIG), and the launcher, a subreaper too, ends the rest.

It also imports torch once for all: ranks are forked from it, and so they start at once and share
the memory. Forking is safe here because nothing has used torch yet: the only threads that there may
be are those of NumPy's BLAS, which stops and starts them around a fork by itself.

The launcher sends an `Order` as JSON, later `{"signal": number}`. The keeper answers with what
happens, one JSON object each: `{"unpinned": why}` if the system refuses the cores that ranks
were to run on, `{"unable": why}` if it cannot start them and ends, `{"pids": [...]}`,
`{"rank": r, "status": s, "when": t}` when a rank ends, and `{"left": [...]}` with the names of
processes that ranks had left behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from phalanx.launch.descendants import (
    become_subreaper,
    descendants,
    die_with_parent,
    kill_below,
    signal_below,
)
from phalanx.launch.start import command
from phalanx.machine import spell_cpus

# How long what ranks have left behind may take to end by itself, and then once it is asked to.
_PATIENCE = 2.0

# What ends a job when it is sent to the launcher.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Makes a rank that runs Python show the stacks of its threads. Hardly any program uses this one.
STACKS = signal.SIGRTMAX - 3


@dataclass(frozen=True)
class Order:
    """What to run on every rank, as the launcher tells it; the lists have an entry per rank."""

    program: str
    arguments: list[str]
    kind: str  # "script", "module", "archive" or "executable"
    environments: list[dict[str, str]]
    cpus: list[list[int] | None]
    pipes: list[list[int]] = field(default_factory=list)  # stdout, stderr and reports
    ignored: list[int] = field(default_factory=list)  # signals, as by nohup
    descriptors: int = 0  # how many a rank may have open


def main(descriptor: int, preload: list[str], told: int = -1) -> NoReturn:
    """Keep one job; the launcher is at the other end of a socket, or its order in a file.

    The modules of `preload` are imported first, while the launcher still prepares its order.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    become_subreaper()
    gc.disable()  # all that is imported stays: looking for garbage would take a tenth of the time
    try:
        for name in preload:
            importlib.import_module(name)
        failed = False
    except Exception:
        failed = True
    gc.freeze()
    gc.enable()
    connection = Connection(descriptor)
    try:
        data = connection.recv_bytes() if told < 0 else os.pread(told, 1 << 28, 0)
    except EOFError:  # the launcher is gone already
        sys.exit(1)
    order = Order(**json.loads(data))
    if failed:
        _start_over(descriptor, order, data)
    keeper = _Keeper(connection, order)
    rank = keeper.start()
    if rank is None:
        keeper.keep()
        sys.exit(0)
    try:
        code = _be(rank, order)
    except KeyboardInterrupt:  # that had waited for the program to begin
        code = 128 + signal.SIGINT
    sys.exit(code)


def _start_over(descriptor: int, order: Order, data: bytes) -> NoReturn:
    """Begin anew without what cannot be imported: a rank that needs it will say so, and where."""
    told = os.memfd_create("order")
    os.write(told, data)
    for each in (descriptor, told):
        os.set_inheritable(each, True)
    words = [order.program, *order.arguments]
    os.execv(sys.executable, command(descriptor, [], words, told))


class _Keeper:
    def __init__(self, connection: Connection, order: Order) -> None:
        self._connection, self._link = connection, connection.fileno()
        self._order = order
        self._ranks: dict[int, int] = {}  # by process id
        self._wake, wake = os.pipe()
        self._poll = select.poll()
        for descriptor in (self._wake, self._link):
            self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def start(self) -> int | None:
        """Fork the ranks. Returns None here, and in each of them its rank."""
        me = os.getpid()
        # What is sent to a rank before it has handlers of its own waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, [*ENDING, STACKS])
        usual, refusal = os.sched_getaffinity(0), ""
        for rank, cpus in enumerate(self._order.cpus):
            if cpus and not refusal and (why := _pin(cpus)):
                refusal = f"ranks from {rank} on are not pinned to cores: {why}"
            if refusal or not cpus:
                _pin(usual)
            try:
                pid = os.fork()
            except OSError as error:
                self._give_up(f"cannot fork rank {rank}: {error.strerror}")
            if pid == 0:
                die_with_parent(me)
                signal.set_wakeup_fd(-1)
                self._connection.close()
                return rank
            self._ranks[pid] = rank
        _pin(usual)
        if refusal:
            self._say({"unpinned": refusal})
        for pipes in self._order.pipes:
            for descriptor in pipes:
                os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._say({"pids": list(self._ranks)})
        return None

    def _give_up(self, why: str) -> NoReturn:
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "unlimited" if most == resource.RLIM_INFINITY else str(most)
        self._say(
            {"unable": f"{why} (processes of this user: ulimit -u {limit}; also pids.max, memory)"}
        )
        kill_below(os.getpid())
        os._exit(1)

    def keep(self) -> None:
        """Look after the ranks until the last of them has ended."""
        while self._ranks:
            self._wait(None)
        limit = time.monotonic() + _PATIENCE
        while descendants(os.getpid()) and time.monotonic() < limit:
            self._wait(0.05)
        if left := descendants(os.getpid()):
            self._say({"left": [_name(pid) for pid in left]})
            signal_below(os.getpid(), signal.SIGTERM)
            limit = time.monotonic() + _PATIENCE
            while descendants(os.getpid()) and time.monotonic() < limit:
                self._wait(0.05)
        kill_below(os.getpid())

    def _wait(self, seconds: float | None) -> None:
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        if any(descriptor == self._link for descriptor, _ in ready):
            self._obey()
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                rank = self._ranks.pop(pid, None)  # or something that a rank had left behind
                if rank is not None:
                    self._say({"rank": rank, "status": status, "when": time.monotonic()})

    def _obey(self) -> None:
        try:
            number = json.loads(self._connection.recv_bytes())["signal"]
        except (EOFError, OSError):  # the launcher is gone
            kill_below(os.getpid())
            os._exit(1)
        if number == signal.SIGKILL:
            signal_below(os.getpid(), number)
            return
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                if number == STACKS:
                    if _catches(pid, number):  # others would die of it
                        os.kill(pid, number)
                else:
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)  # one that is stopped would not notice

    def _say(self, event: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # a launcher that is gone is noticed when it is read
            self._connection.send_bytes(json.dumps(event).encode())


def _be(rank: int, order: Order) -> int:
    """Be one rank from here on; returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for ignored in order.ignored:
        signal.signal(ignored, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (order.descriptors, most))
    output, errors, report = order.pipes[rank]
    if rank:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in {each for pipes in order.pipes for each in pipes} - {report}:
        os.close(descriptor)
    os.set_inheritable(report, False)  # what the rank starts shall not speak for it
    os.environ.clear()
    os.environ.update(order.environments[rank])
    if order.kind == "executable":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            os.execvp(order.program, [order.program, *order.arguments])
        except OSError as error:
            print(f"cannot run {order.program}: {error.strerror}", file=sys.stderr)
            return 127
    import faulthandler

    from phalanx.launch import script

    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:  # as if it had been imported by each rank
        sys.modules["numpy.random"].seed()
    return script.run(order.program, order.arguments, order.kind, report)


def _pin(cpus: Collection[int]) -> str:
    """Have this process, and what it forks, run on some cores; returns why that is refused."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"sched_setaffinity for cpus {spell_cpus(list(cpus))}: {error.strerror}"
    return ""


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return str(pid)
    if "phalanx.launch.keeper" in " ".join(words):
        return f"{pid} (forked by a rank)"
    return f"{pid} ({' '.join(words).strip()[:60]})"
