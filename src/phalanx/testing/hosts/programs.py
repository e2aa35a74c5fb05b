"""A program that runs on a host, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from phalanx.errors import DistError
from phalanx.process import signal_name
from phalanx.testing.hosts import namespaces

ALL = ("net", "uts", "ipc", "pid", "mnt")
_SHOWN = 100  # lines of a program's output in an error


class HostError(DistError):
    """Hosts could not be made, or what was asked of one could not be done."""


def script(module: Any, *words: object) -> list[str]:
    """Return how a module of this package runs as a script, without what else is installed."""
    return [sys.executable, "-I", "-S", module.__file__, *map(str, words)]


def inside(
    pid: int,
    kinds: Sequence[str],
    words: Sequence[str],
    told: int | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return how a program is run in namespaces of a process.

    Its pid is written to the descriptor `told`.
    """
    order = {
        "pid": pid,
        "kinds": list(kinds),
        "told": told,
        "directory": os.fspath(cwd or Path.cwd()),
        "words": list(words),
    }
    return script(namespaces, "enter", json.dumps(order))


def environment() -> dict[str, str]:
    """Return this process's environment, with the place where Debian keeps `ip` in its path."""
    return {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"}


def scratch() -> IO[bytes]:
    """Return a file without a name, which other processes can be given."""
    return tempfile.TemporaryFile()


def content(file: IO[bytes]) -> bytes:
    """Return what a file holds that another process writes to, which shares its position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


class Process(Protocol):
    """What a program is run by."""

    @property
    def sentinel(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class Program:
    """A program on a host.

    `pid` is what this process knows it by, also when the host knows it by another. Its output is
    kept: `stdout` and `stderr` are what it has printed so far.
    """

    def __init__(self, words: Sequence[str], where: str) -> None:
        self.words = list(words)
        self.where = where
        self._files = [scratch() for _ in range(2)]
        self._texts: list[str] | None = None
        told, teller = os.pipe()
        try:
            self._process = self._start(teller, *self._files)
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(teller)
        with os.fdopen(told) as answer:
            said = answer.read()
        if not said:
            self._process.wait()
            self.close()
            raise HostError(f"cannot run {self.words[0]} on {where}: {self.stderr.strip()}")
        self.pid = int(said)

    def _start(self, told: int, stdout: IO[bytes], stderr: IO[bytes]) -> Process:
        """Start the process that starts the program and ends as it does."""
        raise NotImplementedError

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read from once it has ended."""
        return self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """The exit code, negative if a signal ended it, or None while it runs."""
        return self._process.poll()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._text(0)

    @property
    def stderr(self) -> str:
        """What it has printed to stderr so far."""
        return self._text(1)

    def _text(self, stream: int) -> str:
        if self._texts is not None:
            return self._texts[stream]
        return content(self._files[stream]).decode(errors="replace")

    @property
    def ending(self) -> str:
        """How it has ended, in words."""
        code = self.returncode
        if code is None:
            return "is still running"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"

    def wait(self, timeout: float = 60) -> int:
        """Wait until it has ended and return its exit code; TimeoutError if it takes longer."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self} did not end within {timeout:g} s{self.told()}") from None

    def check(self, timeout: float = 60) -> Program:
        """Wait until it has ended well; otherwise raise HostError with what it has printed."""
        if self.wait(timeout) != 0:
            raise HostError(f"{self} {self.ending}{self.told()}")
        return self

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it as it is, without a word to anybody."""
        self.send_signal(signal.SIGKILL)

    def told(self) -> str:
        """Return what it has printed, for the end of a message."""
        parts = []
        for name in ("stdout", "stderr"):
            lines = getattr(self, name).splitlines()
            if len(lines) > _SHOWN:
                lines = [f"... {len(lines) - _SHOWN} lines more", *lines[-_SHOWN:]]
            parts += [f"  {self.where}, {name}:", *(f"    {line}" for line in lines)] * bool(lines)
        return "".join(f"\n{line}" for line in parts)

    def close(self) -> None:
        """Kill it if it still runs; what it has printed can still be read."""
        if self._texts is None:
            self.kill()
            self._process.wait()
            self._process.close()
            self._texts = [self.stdout, self.stderr]
            for file in self._files:
                file.close()

    def __str__(self) -> str:
        return f"{' '.join(self.words)[:200]} on {self.where}"


class Command(Program):
    """A command on a host."""

    def __init__(
        self,
        pid: int,
        words: Sequence[str | os.PathLike[str]],
        where: str,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        self._host, self._env, self._cwd = pid, {**environment(), **(env or {})}, cwd
        super().__init__([os.fspath(word) for word in words], where)

    def _start(self, told: int, stdout: IO[bytes], stderr: IO[bytes]) -> Process:
        return _Spawned(
            inside(self._host, ALL, self.words, told, self._cwd),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=self._env,
            pass_fds=[told],
            start_new_session=True,  # Ctrl-C is for whoever made the hosts
        )


class _Spawned(subprocess.Popen[bytes]):
    """A process that can be waited for beside others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sentinel = os.pidfd_open(self.pid)

    def close(self) -> None:
        os.close(self.sentinel)
