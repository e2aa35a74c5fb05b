"""Living ranks, seen from the coordinator: how they are started, commanded and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from phalanx import leftovers
from phalanx.bench.cells import start_line_file
from phalanx.bench.peers import Peer, environment_of_ranks
from phalanx.bench.ranks import TIMEOUT, be_rank
from phalanx.launch.processes import run_processes

START_SECONDS = 120
ANSWER_SECONDS = 150  # longer than any library's own timeout, so that its message arrives first
PATIENCE = 10.0  # how long ranks that are told to stop may take


class TeamFailed(RuntimeError):
    """A rank raised, died or did not answer."""


class Crew(Protocol):
    """The processes of a team."""

    def ended(self) -> str | None:
        """Say how they ended before they were told to, None while they live."""
        ...

    def join(self, seconds: float) -> bool:
        """Wait for them to end; tell whether they have."""
        ...

    def kill(self, pids: Collection[int]) -> None:
        """End them; `pids` are those that have called in."""
        ...


class Launched:
    """Processes started by the package's launcher, which waits for them in a thread."""

    def __init__(self, peer: Peer, size: int, directory: Path, pinned: bool) -> None:
        self._error: BaseException | None = None
        task = (peer.world, str(directory), size, pinned)
        number = 1 if peer.one_process else size
        self._thread = threading.Thread(target=self._live, args=(number, task), daemon=True)
        self._thread.start()

    def _live(self, number: int, task: tuple[str, str, int, bool]) -> None:
        try:
            run_processes(be_rank, number, *task, timeout=TIMEOUT)
        except BaseException as error:
            self._error = error

    def ended(self) -> str | None:
        if self._thread.is_alive():
            return None
        return str(self._error or "its ranks ended early")

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self, pids: Collection[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Commanded:
    """Processes that another launcher starts: mpirun."""

    def __init__(self, peer: Peer, size: int, directory: Path, pinned: bool) -> None:
        with (directory / "log").open("ab") as log:
            rank = [
                peer.python,
                "-m",
                "phalanx.bench.ranks",
                str(directory),
                str(size),
                str(pinned),
            ]
            self._process = subprocess.Popen(
                [*peer.launcher, "-n", str(size), *rank],
                env={**environment_of_ranks(), "OMP_NUM_THREADS": "1", **peer.environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"it ended early, with exit code {code}"

    def join(self, seconds: float) -> bool:
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin:
            self._process.stdin.close()
        return True

    def kill(self, pids: Collection[int]) -> None:
        # mpirun takes its ranks with it on SIGTERM, not on SIGKILL.
        for force in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, force)
            if self.join(5):
                return


Hire = Callable[[Peer, int, Path, bool], Crew]


class Team:
    """The living ranks of one peer; blocked in a read whenever nothing is asked of them.

    They and the coordinator meet in a new directory, `within` another one if that is given. Who
    starts them follows from the peer, unless somebody else is asked to `hire` them.
    """

    def __init__(
        self,
        peer: Peer,
        size: int,
        *,
        pinned: bool = False,
        hire: Hire | None = None,
        within: Path | None = None,
    ) -> None:
        self.peer, self.size = peer, size
        self._connections: list[Connection] = []
        self._pids: set[int] = set()
        self._place = tempfile.TemporaryDirectory(
            prefix=leftovers.prefix() if within is None else "phalanx-bench-", dir=within
        )
        directory = Path(self._place.name)
        self._log = directory / "log"
        start_line_file(directory, size)
        start = hire or (Commanded if peer.launcher else Launched)
        self._crew: Crew | None = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(directory / "socket"))
                listener.listen(size)
                self._crew = start(peer, size, directory, pinned)
                self._connections = self._accept(listener)
        except BaseException:
            self.close(patience=0)
            raise

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
            rank, pid = connection.recv()
            ranks[rank] = connection
            self._pids.add(pid)
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
        if self._crew and (how := self._crew.ended()) is not None:
            raise self._failure(f"{self.peer.title}: {how}")

    def _failure(self, what: str) -> TeamFailed:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return TeamFailed("\n  ".join([what, *text.strip().splitlines()[-5:]]))

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the ranks: by asking, and by force where that does not help."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(("stop",))
        if self._crew and not self._crew.join(patience):
            self._crew.kill(self._pids)
            self._crew.join(START_SECONDS)
        for connection in self._connections:
            connection.close()
        self._crew, self._connections = None, []
        self._place.cleanup()
