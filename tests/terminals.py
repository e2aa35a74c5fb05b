"""Terminals for the tests of commands that show something live."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

# What would keep the table from being drawn as on any terminal.
UNWANTED = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
ALTERNATE, MAIN = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
DOWN, ESCAPE = "\x1b[B", "\x1b"


class Terminal:
    """A command on a terminal, as somebody who sits at it sees it."""

    def __init__(
        self,
        *arguments: object,
        command: Sequence[str] = (sys.executable, "-m", "phalanx"),
        columns: int = 120,
        lines: int = 30,
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(theirs)
        self.seen = ""
        environment = {name: v for name, v in os.environ.items() if name not in UNWANTED}
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color"},
        )
        self._theirs = theirs  # kept open, to see how its settings are left

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, *texts: str) -> str:
        """Read on until all of these texts have been shown; return what was shown since."""
        start, limit = len(self.seen), time.monotonic() + 60
        while not all(text in self.seen[start:] for text in texts):
            assert time.monotonic() < limit, f"not shown: {texts} in {self.seen[start:]}"
            if not select.select([self._ours], [], [], 1)[0]:
                continue
            self.seen += os.read(self._ours, 1 << 16).decode(errors="replace")
        return self.seen[start:]

    def end(self) -> int:
        """Wait for the end of the command; check that the terminal is as it was."""
        # What is read meanwhile: a full buffer would keep the command from ending.
        while self.process.poll() is None or select.select([self._ours], [], [], 0.1)[0]:
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 1 << 16).decode(errors="replace")
        assert termios.tcgetattr(self._theirs) == self.before
        for taken, given_back in ((ALTERNATE, MAIN), (HIDE_CURSOR, SHOW_CURSOR)):
            assert self.seen.rfind(taken) <= self.seen.rfind(given_back)
        return self.process.returncode
