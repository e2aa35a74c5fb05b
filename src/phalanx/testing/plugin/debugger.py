"""pdb in the body of a test: one rank at a time at the prompt, while nobody's time runs out."""

from __future__ import annotations

import bdb
import pdb
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from _pytest.debugging import pytestPDB

from phalanx.launch import identity, voices
from phalanx.launch.identity import Member

# What ends a rank reaches its thread only between waits.
_LOOK_UP = 0.1  # seconds
# A rank that left the prompt for a step is expected back before another gets it; one that waits
# for other ranks in that step is not.
_STEP = 0.5  # seconds


class Terminal:
    """What the ranks of one body share to talk to whoever debugs them."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._free = threading.Condition()
        self._at_prompt: Member | None = None
        self._last: Member | None = None
        self._left = 0.0  # when the last one left the prompt
        self._is_over = False

    def begin(self) -> None:
        """Let the calling rank be debugged: it takes as long as it likes, and is not captured."""
        from phalanx.launch.threads import lift_limits

        lift_limits()
        voices.let_through(_me())

    def end(self, error: BaseException | None = None) -> None:
        """Debug the calling rank no longer; none at all if it ended by quitting the debugger."""
        voices.hear_again(_me())
        with self._free:
            if self._last is _me():
                self._last = None
            self._is_over |= isinstance(error, (pytest.exit.Exception, bdb.BdbQuit))
            self._free.notify_all()

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Have the terminal for the calling rank alone, not captured."""
        with self._free:
            while self._is_taken():
                self._free.wait(_LOOK_UP)
            if self._is_over:
                pytest.exit("Quitting debugger")
            self._at_prompt = self._last = _me()
        try:
            self.open()
            yield
        finally:
            with self._free:
                self._at_prompt = None
                self._left = time.monotonic()
                self._free.notify_all()

    def stop(self) -> None:
        """Have the terminal for the calling rank, at whose `breakpoint` all others wait."""
        self.begin()
        self.open()

    def open(self) -> None:
        """Suspend pytest's capturing; that of ranks that are not debugged goes on."""
        if self._capture is not None:
            self._capture.suspend(in_=True)
        voices.listen_again()

    def _is_taken(self) -> bool:
        if self._is_over:
            return False
        returns = self._last not in (None, _me()) and time.monotonic() < self._left + _STEP
        return self._at_prompt is not None or returns


def _me() -> Member:
    return identity.ancestry(identity.here.rank)[-1]


_terminals: list[Terminal] = []  # of the bodies that run: one, unless tests run tests


@contextmanager
def ready(config: pytest.Config) -> Iterator[Terminal]:
    """Have ranks that run meanwhile stop in pdb one at a time."""
    from phalanx.debug import breakpoints

    terminal = Terminal(config)
    _terminals.append(terminal)
    before = pdb.set_trace, pytest.set_trace, breakpoints.on_stop
    pdb.set_trace = pytest.set_trace = _set_trace
    breakpoints.on_stop = terminal.stop
    try:
        yield terminal
    finally:
        pdb.set_trace, pytest.set_trace, breakpoints.on_stop = before
        _terminals.remove(terminal)


def _set_trace(*args: Any, **kwargs: Any) -> None:
    frame = sys._getframe().f_back
    if identity.here.rank is None:
        _start(*args, **kwargs).set_trace(frame)
        return
    terminal = _terminals[-1]
    terminal.begin()
    with terminal.prompt():
        debugger = _start(*args, **kwargs)
    debugger.set_trace(frame)


def _start(*args: Any, **kwargs: Any) -> Any:
    """Do what pytest's own set_trace does, which would stop in the frame that calls it."""
    return cast(Any, pytestPDB)._init_pdb("set_trace", *args, **kwargs)


def entered(debugger: Any) -> None:
    """Have a debugger say whose prompt it shows, and wait for the prompt of others."""
    interact = debugger.interaction

    def interaction(*args: Any, **kwargs: Any) -> Any:
        if not _terminals or identity.here.rank is None:
            return interact(*args, **kwargs)
        debugger.prompt = f"(rank {_me().rank}) "
        with _terminals[-1].prompt():
            return interact(*args, **kwargs)

    debugger.interaction = interaction
    voices.listen_again()


def left() -> None:
    """Go on capturing by rank, once pytest has resumed to capture."""
    if _terminals and identity.here.rank is not None:
        _terminals[-1].end()
    voices.listen_again()
