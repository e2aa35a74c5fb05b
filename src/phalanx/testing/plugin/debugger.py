"""pdb in the body of a test: one rank at a time, while nobody's time runs out."""

from __future__ import annotations

import pdb
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
from _pytest.debugging import pytestPDB

from phalanx.launch import identity, voices
from phalanx.launch.identity import Member

# Async exceptions, which end a rank, reach a thread only between waits.
_LOOK_UP = 0.1


class Turn:
    """Who of the ranks talks to the terminal."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: Member | None = None
        self._ending = ExitStack()

    def take(self) -> None:
        """Wait until no other rank is at the prompt, and be the one that is."""
        from phalanx.launch.threads import lift_limits

        me = identity.ancestry(identity.here.rank)[-1]
        lift_limits()
        with self._free:
            while self._owner not in (None, me):
                self._free.wait(_LOOK_UP)
            if self._owner is None:
                self._owner = me
                self._ending.enter_context(voices.unheard())

    def give_up(self) -> None:
        """Let another rank take its turn, if this one has it."""
        members = identity.ancestry(identity.here.rank)
        with self._free:
            if members and self._owner is members[-1]:
                self._ending.close()
                self._owner = None
                self._free.notify_all()


_turns: list[Turn] = []  # of the bodies that run; one, unless tests run tests


@contextmanager
def ready() -> Iterator[Turn]:
    """Have ranks that run meanwhile stop in pdb one after the other."""
    turn = Turn()
    _turns.append(turn)
    before = pdb.set_trace, pytest.set_trace
    pdb.set_trace = pytest.set_trace = _set_trace
    try:
        yield turn
    finally:
        pdb.set_trace, pytest.set_trace = before
        _turns.remove(turn)


def _set_trace(*args: Any, **kwargs: Any) -> None:
    frame = sys._getframe().f_back
    if identity.here.rank is not None:
        _turns[-1].take()
    # What pytest does itself, in the frame of the caller.
    debugger: Any = cast(Any, pytestPDB)._init_pdb("set_trace", *args, **kwargs)
    debugger.set_trace(frame)


def entered(debugger: Any) -> None:
    """Say at the prompt which rank it is of."""
    members = identity.ancestry(identity.here.rank)
    if _turns and members:
        debugger.prompt = f"(rank {members[-1].rank}) "
        voices.listen_again()


def left() -> None:
    """Go on capturing, which pytest has resumed, by rank."""
    if _turns:
        _turns[-1].give_up()
        voices.listen_again()
