"""What ranks print: labelled, line by line, on this process' own output and in files."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from pathlib import Path
from typing import IO

# One colour per rank: readable on dark and on light ground, and never red, which means failure.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_LINE = "\r\x1b[K"

# So much of what a rank has last written to stderr is kept, to be shown if it fails.
_KEPT_LINES = 200


_TRACEBACK = re.compile(r"^(Traceback \(most recent call last\)|Fatal Python error)")

# Where the stack of a rank begins: in what runs its program.
_OUR_FRAME = re.compile(
    r'\s+File "(.*/phalanx/launch/(script|keeper)\.py|<string>|<frozen runpy>)", line \d+ in'
)


def wants_colour(stream: IO[str]) -> bool:
    """Say whether to use colours there: on a terminal that has them, unless NO_COLOR is set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and not plain)


def styled(text: str, code: int | str, stream: IO[str]) -> str:
    """Return the text with an ANSI style, where the stream shows it."""
    return f"\x1b[{code}m{text}\x1b[0m" if wants_colour(stream) else text


class Screen:
    """Standard output and error, shared by all ranks.

    On a terminal an unfinished line (a progress bar, a question) stays below what is printed
    meanwhile; elsewhere only what became of it is printed.
    """

    def __init__(self) -> None:
        self._shown = ""
        self._unfinished = ""
        self._terminal = sys.stdout.isatty() and sys.stderr.isatty()

    @property
    def is_due(self) -> bool:
        """Whether there is an unfinished line to `show`, should it stay so for a moment."""
        return self._unfinished != self._shown

    def line(self, stream: IO[str], text: str) -> None:
        """Print a line."""
        self._erase()
        print(text, file=stream, flush=True)

    def unfinished(self, text: str) -> None:
        """Keep a line that is not finished, in place of another such line."""
        if self._terminal:
            self._unfinished = text

    def show(self) -> None:
        """Print the unfinished line."""
        self._erase()
        print(self._unfinished, end="", file=sys.stderr, flush=True)
        self._shown = self._unfinished

    def _erase(self) -> None:
        if self._shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
            self._shown = ""


class Speaker:
    """One stream of one rank: cuts what it writes into lines and passes them on."""

    def __init__(self, rank: int, screen: Screen, stream: IO[str], log: Path | None) -> None:
        self._screen = screen
        self._stream = stream
        self._label = styled(f"[rank {rank}] ", _COLOURS[rank % len(_COLOURS)], stream)
        self._log = log.open("wb") if log else None
        self._rest = b""
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)

    def write(self, data: bytes) -> None:
        """Take what the rank has written."""
        self.note(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._print(line)
        self._screen.unfinished(self._label + _shown(self._rest) if self._rest else "")

    def note(self, data: bytes) -> None:
        """Write to the rank's file only."""
        if self._log:
            self._log.write(data)
            self._log.flush()

    def end(self) -> None:
        """Print what is left."""
        if self._rest:
            self._screen.unfinished("")
            self._print(self._rest)
            self._rest = b""
        if self._log:
            self._log.close()

    def _print(self, line: bytes) -> None:
        text = _shown(line)
        if _OUR_FRAME.match(text):
            return
        self.last.append(text)
        self._screen.line(self._stream, self._label + text)


def _shown(line: bytes) -> str:
    """Return what a terminal would show of a line in which carriage returns overwrite."""
    text = line.decode(errors="replace").rstrip("\r")
    return text.rpartition("\r")[2]


def traceback_in(lines: deque[str]) -> str:
    """Return the last traceback among the lines of a rank that could not report by itself."""
    kept = list(lines)
    starts = [i for i, line in enumerate(kept) if _TRACEBACK.match(line)]
    return "\n".join(kept[starts[-1] :] if starts else kept[-10:])
