"""Switching the recording on and off, and naming stretches of a program."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path

from phalanx import _native, forks, logs

VARIABLE = "PHALANX_TRACE"

_log = logs.area("trace")
_lock = threading.Lock()
_asking = threading.Lock()  # held while starting, which takes the other
forks.renew(sys.modules[__name__], "_lock", threading.Lock)
forks.renew(sys.modules[__name__], "_asking", threading.Lock)
_directory: Path | None = None
_users = 0
_asked = False


def start(directory: str | os.PathLike[str]) -> None:
    """Record every operation of this process' ranks in files of a directory.

    The directory is made if need be; only this user may read what is recorded. Calls for the same
    directory are counted, so that each rank of a thread world may start and stop; for another one,
    while a recording goes on, it is an error.
    """
    global _directory, _users
    wanted = Path(directory).absolute()
    with _lock:
        if _directory is not None and wanted != _directory:
            raise ValueError(
                f"cannot record a trace in {wanted}: one is being recorded in {_directory} "
                "(a process records one at a time: stop that one first)"
            )
        if _directory is None:
            _prepare(wanted)
            _native.trace_start(str(wanted))
            _directory = wanted
        _users += 1


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        what = f"cannot record a trace: {error.strerror} (it must be a directory to write to)"
        raise type(error)(error.errno, what, str(directory)) from None


def stop() -> None:
    """Record no more, once every `start` has been followed by its `stop`.

    Operations that are under way are completed in the record when they end. What could not be
    recorded, because the disk is full for instance, is logged as a warning.
    """
    global _directory, _users
    with _lock:
        if _users == 0:
            raise ValueError("no trace is being recorded: start was not called")
        _users -= 1
        if _users:
            return
        directory, _directory = _directory, None
        losses = _native.trace_stop()
    for loss in losses:
        _log.warning("the trace in %s is incomplete: %s", directory, loss)


@contextmanager
def record(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record for the length of a block: see `start`."""
    start(directory)
    try:
        yield
    finally:
        stop()


def is_recording() -> bool:
    """Say whether operations are being recorded."""
    return _native.trace_is_on()


class range(ContextDecorator):
    """Show a block, or every call of a function, as a named stretch of its rank.

    Does nothing unless a trace is being recorded, or where the calling thread has no world.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[_native.TraceRange] = []

    def __enter__(self) -> range:
        if _native.trace_is_on():
            from phalanx.world import current

            home = current()
            if home is not None and "roster" in home.shared:
                roster = home.shared["roster"]
                self._open.append(_native.trace_range(roster, home.rank, self.name))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open.pop().end()

    def _recreate_cm(self) -> range:
        return range(self.name)  # calls of one function may overlap


def start_if_asked() -> None:
    """Start the recording that the environment asks for, until this process ends."""
    global _asked
    directory = os.environ.get(VARIABLE)
    with _asking:
        if directory and not _asked:
            start(directory)
            _asked = True
            atexit.register(stop)
