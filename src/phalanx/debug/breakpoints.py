"""Stopping one rank in pdb while the others wait for it."""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import IO
from weakref import WeakKeyDictionary

from phalanx.collectives import barrier
from phalanx.world import World, here

_NEVER = 1e8  # seconds

# Called on the rank that stops, before it does; set by who has taken the terminal.
on_stop: Callable[[], None] = lambda: None  # noqa: E731
# Where the terminal of this process is not to be used: what to read from, and what to write to.
console: tuple[IO[str], IO[str]] | None = None

_passed: WeakKeyDictionary[World, Counter[tuple[str, int]]] = WeakKeyDictionary()


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop ``rank`` in pdb, in the frame that calls this; the others wait until it continues.

    All ranks of the world must call this. The first ``skip`` calls at this line do nothing.
    The others wait for up to ``timeout_s`` seconds (None: for ever), and from then on the timeout
    of every group is at least that, so that one can also step through what follows. Quitting pdb
    ends ``rank`` by ``bdb.BdbQuit``, of which the others learn. pdb reads from the terminal also in
    processes that were spawned.
    """
    world = here()
    if not 0 <= rank < world.size:
        raise ValueError(f"breakpoint(rank={rank}): there are ranks 0 to {world.size - 1}")
    caller = sys._getframe(1)
    passed = _passed.setdefault(world, Counter())
    line = caller.f_code.co_filename, caller.f_lineno
    passed[line] += 1
    if passed[line] <= skip:
        return
    patience = _NEVER if timeout_s is None else timeout_s
    for group in world.groups.values():
        group.set_timeout(max(group.backend.timeout, patience))
    debugger = None
    if world.rank == rank:
        on_stop()
        debugger = _Debugger(world)
        debugger.ask(caller)
    # A timeout of its own also says that whoever waits here is not deadlocked.
    barrier(timeout=patience)
    if debugger is not None:
        debugger.follow(caller)


class _Debugger(pdb.Pdb):
    """A pdb that is asked for commands first, and traces only once the other ranks have gone on."""

    def __init__(self, world: World) -> None:
        stdin, stdout = console or (_terminal(), None)
        if stdin is not None and stdout is None:
            stdout = sys.stdout
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        self._rank = world.rank
        self.prompt = f"(rank {world.rank}) "

    def ask(self, frame: FrameType) -> None:
        """Take commands, in ``frame``, until one lets the program go on."""
        self.reset()
        self.botframe = list(_outwards(frame))[-1]
        self.interaction(frame, None)
        if self.quitting:
            raise bdb.BdbQuit(f"pdb was quit on rank {self._rank}, or had no more input")

    def follow(self, frame: FrameType) -> None:
        """Trace the program from ``frame`` on, if the last command was to step or there are breaks.

        The same as `set_trace`, which would forget the command.
        """
        if self.stoplineno == -1 and not self.breaks:  # continue
            return
        for each in _outwards(frame):
            each.f_trace = self.trace_dispatch
        sys.settrace(self.trace_dispatch)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _terminal() -> IO[str] | None:
    """Return what to read commands from instead of ``sys.stdin``, None if that will do.

    multiprocessing gives a child /dev/null for ``sys.stdin``, and leaves the terminal at its place.
    """
    try:
        stdin = os.fstat(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or no file
        return None if sys.stdin is not None and not sys.stdin.closed else _inherited()
    return _inherited() if os.path.samestat(stdin, os.stat(os.devnull)) else None


@cache
def _inherited() -> IO[str]:
    """Return the standard input that the process was started with; one, for it reads ahead."""
    return open(0, closefd=False)
