"""What processes of ranks print, passed on by the process that has started them."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from phalanx import bystanders
from phalanx.launch.output import Screen, Speaker

# As much as a pipe holds.
_PIPE = 1 << 16
# An unfinished line is shown if it stays so that long.
_MOMENT = 0.05
# How often to see whether an output that nobody reads has room again.
_PAUSE = 0.05


class Mouth(NamedTuple):
    """Where a rank's process writes to; it travels to that process."""

    stdout: Connection
    stderr: Connection

    def open(self) -> None:
        """Have all output of this process go there, also what is written below Python."""
        for number, pipe in enumerate(self, 1):
            os.dup2(pipe.fileno(), number)
            pipe.close()
        # Lines leave as they are printed. The streams that were here may not be those of the
        # descriptors: a process that was forked from a notebook still has the notebook's.
        sys.stdout = sys.__stdout__ = _text(1, "strict")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")  # type: ignore[misc]

    def close(self) -> None:
        """Close this process' own ends."""
        for pipe in self:
            pipe.close()


def _text(number: int, errors: str) -> Any:
    return open(number, "w", 1, encoding="utf-8", errors=errors, closefd=False)


class Relay:
    """Prints what ranks write as output of this process, line by line, each with its rank.

    A thread does it from `start` to `close`. The output goes where `sys.stdout` and `sys.stderr`
    lead at the start: in a notebook, to the cell.
    """

    def __init__(self) -> None:
        self._readers: list[tuple[int, Connection, Connection]] = []
        self._wake, self._alarm = os.pipe()
        self._over = False
        self._thread: threading.Thread | None = None
        self._screen: Screen | None = None

    def mouth(self, rank: int, context: Any) -> Mouth:
        """Make the pipes of one rank; to be called before `start`."""
        (out, to_out), (err, to_err) = (context.Pipe(duplex=False) for _ in range(2))
        self._readers.append((rank, out, err))
        return Mouth(to_out, to_err)

    def start(self) -> None:
        """Begin to print; only now are there threads, since ranks may be forks of this process."""
        self._screen = screen = Screen(borrowed=True)
        speakers = {
            pipe: Speaker(rank, screen, stream)
            for rank, out, err in self._readers
            for pipe, stream in ((out, screen.output), (err, screen.errors))
        }
        self._thread = threading.Thread(
            target=self._pass_on, args=(screen, speakers), name="phalanx-relay", daemon=True
        )
        bystanders.mark(self._thread).start()

    def close(self) -> None:
        """Print what ranks have written up to now, and stop. Can be called again.

        What a process that they have left behind writes later is lost.
        """
        if self._over:
            return
        self._over = True
        os.close(self._alarm)
        if self._thread is not None and self._screen is not None:
            self._thread.join()
            self._screen.close(None)
        os.close(self._wake)
        for _, out, err in self._readers:
            out.close()
            err.close()
        if self._screen is not None and self._screen.problem is not None:
            raise self._screen.problem

    def _pass_on(self, screen: Screen, speakers: dict[Connection, Speaker]) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe, speaker in speakers.items():
                selector.register(pipe, selectors.EVENT_READ, speaker)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._over:
                if screen.is_full:
                    time.sleep(_PAUSE)
                    continue
                ready = selector.select(_MOMENT if screen.is_due else None)
                if not ready:
                    screen.show()
                _read(selector, ready)
            _read(selector, selector.select(0))
        for speaker in speakers.values():
            speaker.end()


def _read(selector: selectors.BaseSelector, ready: list[Any]) -> None:
    """Take all that is in pipes now."""
    for key, _ in ready:
        if key.data is None:  # the alarm
            continue
        data = os.read(key.fd, _PIPE)
        key.data.write(data)
        if not data:
            selector.unregister(key.fileobj)
