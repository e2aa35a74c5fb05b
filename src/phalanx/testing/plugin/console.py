"""pdb in the process of a rank, spoken to from the terminal of the process that runs pytest."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

import pytest

from phalanx.debug import breakpoints
from phalanx.launch import pool


class Stop(NamedTuple):
    """Said by a rank that is about to ask for commands, and answered with whether it may."""

    why: str  # "" at a breakpoint, else the failure to be looked at
    is_post_mortem: bool


class Lines(NamedTuple):
    """What a rank writes to the console."""

    text: str


class Question(NamedTuple):
    """Asks for a line."""


class Goodbye(NamedTuple):
    """Said when a debugger is left; `quits` if all of pytest is to end."""

    quits: bool


class _Console(io.TextIOBase):
    """The other process's terminal, as a file."""

    def __init__(self) -> None:
        self._pending: list[str] = []

    def write(self, text: str) -> int:
        self._pending.append(text)
        return len(text)

    def flush(self) -> None:
        if self._pending:
            pool.say(Lines("".join(self._pending)))
            self._pending.clear()

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        self.flush()
        return cast(str, pool.say(Question()))


class _Debugger(pdb.Pdb):
    """A pdb that talks to the launcher's terminal."""

    def __init__(self, rank: int) -> None:
        self.console = cast(IO[str], _Console())
        super().__init__(stdin=self.console, stdout=self.console, nosigint=True, readrc=False)
        self.prompt = f"(rank {rank}) "

    def ask(self, traceback: TracebackType | None) -> bool:
        """Take commands where an error was raised; return whether the last was to quit."""
        self.reset()
        self.interaction(None, traceback)
        self.console.flush()
        return bool(self.quitting)


def post_mortem(rank: int, error: BaseException, story: str) -> None:
    """Have the user look into a failure, if this is the first."""
    if pool.say(Stop(story, True)):
        quits = _Debugger(rank).ask(error.__traceback__)
        pool.say(Goodbye(quits))


@contextmanager
def at_hand(rank: int) -> Iterator[Any]:
    """Have breakpoints of the calling process lead to the launcher's terminal."""

    def set_trace(*_: object, **__: object) -> None:
        frame = sys._getframe().f_back
        pool.say(Stop("", False))
        debugger.set_trace(frame)

    debugger = _Debugger(rank)
    before = pdb.set_trace, pytest.set_trace, sys.breakpointhook, breakpoints.console
    pdb.set_trace = pytest.set_trace = sys.breakpointhook = set_trace
    breakpoints.console = debugger.console, debugger.console
    try:
        yield debugger
    finally:
        debugger.console.flush()
        pdb.set_trace, pytest.set_trace, sys.breakpointhook, breakpoints.console = before


class Terminal:
    """The launcher's side: serves one rank at a time."""

    def __init__(self, config: pytest.Config, size: int) -> None:
        self._config, self._size = config, size
        self._line = ""  # that is not finished yet: a prompt
        self.has_shown: int | None = None  # the rank whose failure was looked into
        self.quits = False

    def hear(self, rank: int, said: Any) -> Any:
        """Answer what a rank has said."""
        if isinstance(said, Stop):
            if said.is_post_mortem and self.has_shown is not None:
                return False
            self._announce(rank, said)
        elif isinstance(said, Goodbye):
            self.quits = self.quits or said.quits
            self._config.hook.pytest_leave_pdb(config=self._config, pdb=None)
        else:
            with self._uncaptured():
                if isinstance(said, Question):
                    return self._answer()
                *whole, self._line = (self._line + said.text).split("\n")
                sys.stdout.write("".join(f"{line}\n" for line in whole))
                sys.stdout.flush()
        return True

    def _announce(self, rank: int, stop: Stop) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        with self._uncaptured():
            writer = reporter._tw if reporter else None
            if writer and stop.is_post_mortem:
                writer.line()
                writer.sep(">", "traceback")
                writer.line(stop.why.rstrip())
            if writer:
                writer.sep(">", f"PDB on rank {rank} of {self._size}")
        if stop.is_post_mortem:
            self.has_shown = rank
        # Whoever measures how long tests take is told so.
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)

    def _answer(self) -> str:
        prompt, self._line = self._line, ""
        try:
            return f"{input(prompt)}\n"
        except EOFError:
            return ""

    @contextmanager
    def _uncaptured(self) -> Iterator[None]:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is None:
            yield
            return
        capture.suspend(in_=True)
        try:
            yield
        finally:
            capture.resume()


class Invoke:
    """Takes the place of what pytest does for --pdb, for failures that were looked into already."""

    def __init__(self, beneath: Any) -> None:
        self._beneath = beneath

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        shown = getattr(call.excinfo.value, SHOWN, None)
        if shown is None:
            self._beneath.pytest_exception_interact(node, call, report)
        elif shown.quits:
            pytest.exit("Quitting debugger")

    def pytest_internalerror(self, excinfo: Any) -> None:
        self._beneath.pytest_internalerror(excinfo)


# What an error has that was looked into: the terminal on which.
SHOWN = "_phalanx_shown"


def take_over(config: pytest.Config) -> None:
    """Have --pdb leave out failures that were looked into in their own process."""
    plugins = config.pluginmanager
    beneath = plugins.get_plugin("pdbinvoke")
    if beneath is not None and not isinstance(beneath, Invoke):
        plugins.unregister(beneath)
        plugins.register(Invoke(beneath), "pdbinvoke")
