"""The process that keeps the ranks of a job: it starts them, and leaves none behind.

It stands between the launcher, which talks to the user, and the ranks. All that a rank starts, and
whatever becomes of the rank, stays below the keeper (which is a subreaper), so it can end all of
it; it does so as soon as the launcher is gone, however that went. Should the keeper itself be
killed, so are the ranks (PR_SET_PDEATHSIG), and the launcher, a subreaper too, ends the rest.

It also imports torch once for all: ranks are forked from it, and so they start at once and share
the memory. Forking is safe here because nothing has used torch yet: there are no threads.

The launcher sends an `Order` as JSON, later `{"signal": number}`. The keeper answers with what
happens, one JSON object each: `{"pids": [...]}`, `{"rank": r, "status": s, "when": t}` when a rank
ends, and `{"left": [...]}` with the names of processes that ranks had left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

# How long what ranks have left behind may take to end by itself, and then once it is asked to.
_PATIENCE = 2.0

# Makes a rank that runs Python show the stacks of its threads; others do not get it.
STACKS = signal.SIGUSR2

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Order:
    """What to run on every rank, as the launcher tells it; the lists have an entry per rank."""

    program: str
    arguments: list[str]
    kind: str  # "script", "module" or "executable"
    preload: list[str]
    environments: list[dict[str, str]]
    cpus: list[list[int] | None]
    pipes: list[list[int]] = field(default_factory=list)  # stdout, stderr and reports
    ignored: list[int] = field(default_factory=list)  # signals, as by nohup


def main(descriptor: int) -> NoReturn:
    """Keep one job; the launcher is at the other end of a socket."""
    connection = Connection(descriptor)
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    order = Order(**json.loads(connection.recv_bytes()))
    gc.disable()  # all that is imported stays: looking for garbage would take a tenth of the time
    for name in order.preload:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    keeper = _Keeper(connection, order)
    rank = keeper.start()
    if rank is None:
        keeper.keep()
        sys.exit(0)
    sys.exit(_be(rank, order))


def become_subreaper() -> None:
    """Make what a process below this one leaves behind a child of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def kill_below(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to all processes below one; a fatal one again until there are none."""
    while below := descendants(pid):
        for each in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)
        if number != signal.SIGKILL:
            return
        time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class _Keeper:
    def __init__(self, connection: Connection, order: Order) -> None:
        self._connection, self._link = connection, connection.fileno()
        self._order = order
        self._ranks: dict[int, int] = {}  # by process id
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def start(self) -> int | None:
        """Fork the ranks. Returns None here, and in each of them its rank."""
        me = os.getpid()
        for rank in range(len(self._order.environments)):
            pid = os.fork()
            if pid == 0:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != me:
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.set_wakeup_fd(-1)
                self._connection.close()
                return rank
            self._ranks[pid] = rank
        for pipes in self._order.pipes:
            for descriptor in pipes:
                os.close(descriptor)
        self._say({"pids": list(self._ranks)})
        return None

    def keep(self) -> None:
        """Look after the ranks until the last of them has ended."""
        while self._ranks:
            self._wait(None)
        limit = time.monotonic() + _PATIENCE
        while descendants(os.getpid()) and time.monotonic() < limit:
            self._wait(0.05)
        if left := descendants(os.getpid()):
            self._say({"left": [_name(pid) for pid in left]})
            kill_below(os.getpid(), signal.SIGTERM)
            limit = time.monotonic() + _PATIENCE
            while descendants(os.getpid()) and time.monotonic() < limit:
                self._wait(0.05)
        kill_below(os.getpid())

    def _wait(self, seconds: float | None) -> None:
        ready, _, _ = select.select([self._wake, self._link], [], [], seconds)
        if self._link in ready:
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
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif number != STACKS or self._order.kind != "executable":
            for pid in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

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
    cpus = order.cpus[rank]
    if cpus:
        os.sched_setaffinity(0, cpus)
    if order.kind == "executable":
        try:
            os.execvp(order.program, [order.program, *order.arguments])
        except OSError as error:
            print(f"cannot run {order.program}: {error.strerror}", file=sys.stderr)
            return 127
    import faulthandler

    from phalanx.launch import script

    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:  # as if it had been imported by each rank
        sys.modules["numpy.random"].seed()
    return script.run(order.program, order.arguments, order.kind == "module", report)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return str(pid)
    return f"{pid} ({' '.join(words).strip()[:60]})"
