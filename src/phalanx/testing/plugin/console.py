"""pdb in the process of a rank, spoken to from the terminal of the process that runs pytest."""

from __future__ import annotations

import io
import pdb
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

import pytest

from phalanx.debug import breakpoints
from phalanx.launch import pool

PLUGIN = __name__.rpartition(".")[0]


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
        if threading.current_thread() is not threading.main_thread():
            return cast(str, pool.say(Question()))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for who is asked
        try:
            return cast(str, pool.say(Question()))
        finally:
            signal.signal(signal.SIGINT, before)


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

    def stop() -> None:
        pool.say(Stop("", False))

    def set_trace(*_: object, **__: object) -> None:
        frame = sys._getframe().f_back
        stop()
        debugger.set_trace(frame)

    debugger = _Debugger(rank)
    before = pdb.set_trace, pytest.set_trace, sys.breakpointhook
    stops = breakpoints.console, breakpoints.on_stop
    pdb.set_trace = pytest.set_trace = sys.breakpointhook = set_trace
    breakpoints.console = debugger.console, debugger.console
    breakpoints.on_stop = stop
    try:
        yield debugger
    finally:
        debugger.console.flush()
        pdb.set_trace, pytest.set_trace, sys.breakpointhook = before
        breakpoints.console, breakpoints.on_stop = stops


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
            self._tell_others("pytest_leave_pdb")
        else:
            with self.uncaptured():
                if isinstance(said, Question):
                    return self._answer()
                *whole, self._line = (self._line + said.text).split("\n")
                sys.stdout.write("".join(f"{line}\n" for line in whole))
                sys.stdout.flush()
        return True

    def _announce(self, rank: int, stop: Stop) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        with self.uncaptured():
            writer = reporter._tw if reporter else None
            if writer and stop.is_post_mortem:
                writer.line()
                writer.sep(">", "traceback")
                writer.line(stop.why.rstrip())
            if writer:
                writer.sep(">", f"PDB on rank {rank} of {self._size}")
        if stop.is_post_mortem:
            self.has_shown = rank
        self._tell_others("pytest_enter_pdb")

    def _tell_others(self, hook: str) -> None:
        """Tell who measures how long tests take; the plugin itself looks after threads."""
        plugins = self._config.pluginmanager
        own = [each for each in plugins.get_plugins() if getattr(each, "__name__", "") == PLUGIN]
        plugins.subset_hook_caller(hook, own)(config=self._config, pdb=None)

    def _answer(self) -> str:
        prompt, self._line = self._line, ""
        while True:
            try:
                return f"{input(prompt)}\n"
            except EOFError:
                return ""
            except KeyboardInterrupt:
                print("\n--KeyboardInterrupt--")

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Have what is written in a block be seen."""
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
