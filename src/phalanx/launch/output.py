"""What ranks print: labelled, line by line, on this process' own output and in files."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from phalanx import bystanders
from phalanx.launch import notebook

# One colour per rank: readable on dark and on light ground, and never red, which means failure.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_LINE = "\r\x1b[K"

_Part = tuple[IO[str] | None, str]  # a line so far, and where it goes
_NOTHING: _Part = (None, "")

# So much of what a rank has last written to stderr is kept, to be shown if it fails.
_KEPT_LINES = 200
# A line that is longer, in bytes, is passed on in parts.
_LONGEST = 1 << 20
# So many characters may wait to be written before ranks have to wait as well.
_MOST_WAITING = 1 << 20

_TRACEBACK = re.compile(
    r"(Traceback \(most recent|  \+ Exception Group Traceback|Fatal Python error)"
)
_CHAINED = re.compile(r"(The above exception was the direct|During handling of the above) ")
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


def label(rank: int, stream: IO[str]) -> str:
    """Return what stands before a line of a rank."""
    return styled(f"[rank {rank}] ", _COLOURS[rank % len(_COLOURS)], stream)


class Screen:
    """Standard output and error, shared by all ranks.

    On a terminal and in a notebook an unfinished line (a progress bar, a question) stays below what
    is printed meanwhile; elsewhere only what became of it is printed. A thread does the writing:
    whoever decides on the life of ranks must not wait for somebody to read. The streams are
    `borrowed` if a program goes on to use them: then they stay as they are.
    """

    def __init__(self, borrowed: bool = False) -> None:
        self.output, self.errors = _present(sys.stdout), _present(sys.stderr)
        self.problem: OSError | None = None  # why one of them can no longer be written to
        self._borrowed = borrowed
        self._terminal = self.output.isatty() and self.errors.isatty()
        self._notebook = borrowed and notebook.is_here()
        self._shown = _NOTHING
        self._erasable = False  # whether what is shown still is the last line
        self._unfinished: dict[object, _Part] = {}  # of those who write, the latest last
        self._queue: SimpleQueue[tuple[IO[str], str] | None] = SimpleQueue()
        self._put = self._written = 0  # characters; each is counted by one thread alone
        self._writer = bystanders.mark(threading.Thread(target=self._write_all, daemon=True))
        self._writer.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more should be read from ranks."""
        return self._put - self._written > _MOST_WAITING

    @property
    def is_due(self) -> bool:
        """Whether there is an unfinished line to `show`, should it stay so for a moment."""
        return self._latest != self._shown

    @property
    def _latest(self) -> _Part:
        return next(reversed(self._unfinished.values()), _NOTHING)

    def line(self, stream: IO[str], text: str) -> None:
        """Print a line."""
        self._erase(stream)
        self._write(stream, text + "\n")

    def unfinished(self, whose: object, stream: IO[str], label: str, text: str) -> None:
        """Keep the line that somebody has not finished; an empty one is finished."""
        self._unfinished.pop(whose, None)
        if text and self._notebook:
            self._unfinished[whose] = stream, label + text
        elif text and self._terminal:
            width = shutil.get_terminal_size().columns
            text = text[: max(0, width - len("[rank 1000] "))]
            self._unfinished[whose] = self.errors, label + text

    def show(self) -> None:
        """Print the unfinished line."""
        stream, text = latest = self._latest
        self._erase(stream or self.errors)
        self._shown, self._erasable = latest, bool(text)
        if stream:
            self._write(stream, text)

    def close(self, seconds: float | None) -> bool:
        """Wait for all to be written; returns whether it was, in that time."""
        self._queue.put(None)
        self._writer.join(seconds)
        return not self._writer.is_alive()

    def _erase(self, stream: IO[str]) -> None:
        """Take back the unfinished line, to print to a stream."""
        shown, text = self._shown
        if shown is None or not self._erasable:
            return
        self._erasable = False
        if self._notebook and shown is not stream:
            return  # a stream begins below the other there, and what is above stays
        self._write(shown, f"\r{' ' * len(text)}\r" if self._notebook else _CLEAR_LINE)
        self._shown = _NOTHING

    def _write(self, stream: IO[str], text: str) -> None:
        self._put += len(text)
        self._queue.put((stream, text))

    def _write_all(self) -> None:
        while entry := self._queue.get():
            stream, text = entry
            try:
                _print(stream, text)
            except OSError as error:
                self.problem = self.problem or error
                if not self._borrowed:
                    # What is left in its buffer must not fail once more when Python ends.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self._written += len(text)


def _print(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except ValueError as error:  # it is closed
        raise OSError(str(error)) from error
    stream.flush()


def _present(stream: IO[str] | None) -> IO[str]:
    """Return the stream; one that is not there swallows all."""
    return open(os.devnull, "w") if stream is None else stream


class Speaker:
    """One stream of one rank: cuts what it writes into lines and passes them on."""

    def __init__(self, rank: int, screen: Screen, stream: IO[str], log: Path | None = None) -> None:
        self._screen = screen
        self._stream = stream
        self._label = label(rank, stream)
        self._log = log.open("wb") if log else None
        self._rest = b""
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)

    def write(self, data: bytes) -> None:
        """Take what the rank has written."""
        self.note(data)
        *lines, rest = data.split(b"\n")
        if lines:
            self._print(self._rest + lines[0])
            for line in lines[1:]:
                self._print(line)
            self._rest = b""
        # What a carriage return lets the rest overwrite is never seen.
        self._rest += rest
        self._rest = self._rest[self._rest.rfind(b"\r", 0, -1) + 1 :]
        if len(self._rest) > _LONGEST:
            self._print(self._rest)
            self._rest = b""
        self._screen.unfinished(self, self._stream, self._label, _shown(self._rest[-4096:]))

    def note(self, data: bytes) -> None:
        """Write to the rank's file only."""
        if self._log:
            self._log.write(data)
            self._log.flush()

    def end(self) -> None:
        """Print what is left."""
        self._screen.unfinished(self, self._stream, "", "")
        if self._rest:
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
    """Return the last traceback among the lines of a rank that could not report by itself.

    With those it was chained to; or the last few lines if there is none.
    """
    kept = list(lines)
    starts = [i for i, line in enumerate(kept) if _TRACEBACK.match(line)]
    if not starts:
        return "\n".join(kept[-10:])
    start = starts.pop()
    while starts and any(_CHAINED.match(line) for line in kept[max(0, start - 2) : start]):
        start = starts.pop()
    return "\n".join(kept[start:])
