"""A terminal taken over for a live display, and given back whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.control import Control
from rich.screen import Screen as Frame

# What ends a display. Ctrl-C is a way to quit; of the others the process ends after the terminal
# has been restored.
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*_ENDS, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)

_NAMES = {
    b"\n": "enter",
    b"\r": "enter",
    b" ": "space",
    b"\x1b": "escape",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}
_SEQUENCES = {
    b"A": "up",
    b"B": "down",
    b"C": "right",
    b"D": "left",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "page up",
    b"6~": "page down",
}
_PATIENCE = 0.05  # seconds in which the rest of a key's sequence comes


class Screen:
    """A display on all of the terminal: ``with Screen(console) as screen``.

    Signals are taken note of, not acted upon, until `key` is asked: nothing is torn in the middle.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._input = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._typed = b""
        self._ended = 0

    def __enter__(self) -> Screen:
        self._settings = None if self._input is None else termios.tcgetattr(self._input)
        self._notes, write_end = os.pipe()
        self._pipe = (self._notes, write_end)
        for end in self._pipe:
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {n: signal.signal(n, _note) for n in _SIGNALS}
        try:
            self._take()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()
        if self._ended not in (0, signal.SIGINT):
            signal.raise_signal(self._ended)

    def _release(self) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        for end in self._pipe:
            os.close(end)

    def _take(self) -> None:
        if self._input is not None:
            tty.setcbreak(self._input, termios.TCSADRAIN)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)

    def _give_back(self) -> None:
        # Where this fails, the terminal itself is gone.
        with contextlib.suppress(OSError):
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        if self._input is not None and self._settings is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._settings)

    def draw(self, frame: RenderableType) -> None:
        """Show a frame instead of the one before."""
        with self.console:  # one write, so that nothing flickers
            self.console.print(Control.home(), end="")
            self.console.print(Frame(frame), end="")

    def key(self, timeout: float) -> str | None:
        """Return the next key: "q", "up", "enter"; None after `timeout` seconds.

        "quit" is returned when something asks for the end, "resize" when a frame is to be drawn
        again. Where the input is no terminal there are no other keys.
        """
        limit = time.monotonic() + timeout
        while True:
            while self._typed:
                if key := self._next():
                    return key
            sources = [self._notes] if self._input is None else [self._notes, self._input]
            left = max(limit - time.monotonic(), 0)
            ready, _, _ = select.select(sources, [], [], left)
            if self._notes in ready:
                asked = self._signalled()
                if asked:
                    return asked
            elif ready:
                typed = self._read()
                if not typed:
                    return "quit"  # nobody is at the terminal any more
                self._typed += typed
            elif time.monotonic() >= limit:
                return None

    def _read(self) -> bytes:
        assert self._input is not None
        try:
            return os.read(self._input, 1024)
        except OSError:
            return b""

    def _signalled(self) -> str | None:
        asked = None
        for number in os.read(self._notes, 1024):
            if number in _ENDS:
                self._ended = self._ended or number
                return "quit"
            if number == signal.SIGTSTP:
                self._give_back()
                os.kill(os.getpid(), signal.SIGSTOP)  # until somebody lets it go on
                self._take()
            elif number == signal.SIGCONT:
                self._take()
            if number in _SIGNALS:
                asked = "resize"
        return asked

    def _next(self) -> str | None:
        """Take one key from what was typed; None if that was nothing known."""
        if self._typed[:1] == b"\x1b":
            return self._sequence()
        first, self._typed = self._typed[:1], self._typed[1:]
        return _NAMES.get(first) or (first.decode() if b" " < first < b"\x7f" else None)

    def _sequence(self) -> str | None:
        """Take an escape sequence, or the key Escape: nothing follows that soon enough."""
        assert self._input is not None
        while not _complete(self._typed):
            if not select.select([self._input], [], [], _PATIENCE)[0]:
                self._typed = self._typed[1:]
                return "escape"
            more = self._read()
            if not more:
                return "quit"
            self._typed += more
        if self._typed[1:2] not in (b"[", b"O"):
            self._typed = self._typed[1:]
            return "escape"
        end = _end(self._typed)
        body, self._typed = self._typed[2:end], self._typed[end:]
        return _SEQUENCES.get(body)


def _end(typed: bytes) -> int:
    """Return where an escape sequence ends, 0 if it is not all there."""
    for i in range(2, len(typed)):
        if 0x40 <= typed[i] <= 0x7E:
            return i + 1
    return 0


def _complete(typed: bytes) -> bool:
    return len(typed) > 1 and (typed[1:2] not in (b"[", b"O") or _end(typed) > 0)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number comes through the pipe."""
