"""Looking in on the worlds of this process: who joins and leaves, and what fails.

`phalanx.world` tells it of worlds and groups. Every failure that a rank learns of passes through
`failed`, which logs it and, if asked to, writes the flight record.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx import _native, errors, forks, logs
from phalanx.backends import shapes
from phalanx.debug import detail, layers, levels, recorder
from phalanx.errors import DistBackendError, DistStoreError
from phalanx.groups import ProcessGroup
from phalanx.trace import recorder as trace_recorder
from phalanx.world import World, current

_world_log = logs.area("world")
_group_log = logs.area("group")
_log = logs.area("debug")

_worlds: set[World] = set()
_SIGNAL = signal.SIGUSR1


def joining() -> None:
    """Make visible what the environment asks for; ValueError if that cannot be read."""
    logs.show(levels.log_level())
    trace_recorder.start_if_asked()


def joined(world: World) -> None:
    """Begin to look after a world."""
    trace_recorder.start_if_asked()  # torch's worlds come without having said so before
    errors.observer = failed
    _worlds.add(world)
    _listen()
    _world_log.info(
        "joined a world of %d %s (%r, pid %d on %s)",
        world.size,
        "threads" if world.threads else "processes",
        world.default.config,
        os.getpid(),
        socket.gethostname(),
        extra={"rank": world.rank},
    )


def grouped(world: World, group: ProcessGroup) -> None:
    """Put on a new group what is to stand before its transport."""
    _group_log.info(
        "created group %r (%s) of ranks %s",
        group.group_name,
        group.group_desc,
        group.ranks,
        extra={"rank": world.rank},
    )
    if _level() is levels.DebugLevel.DETAIL:
        detail.look_into(world, group)
    layers.dress(world, group)


def ungrouped(world: World, group: ProcessGroup) -> None:
    """Log that a group is gone."""
    _group_log.debug("destroyed group %r", group.group_name, extra={"rank": world.rank})


def left(world: World) -> None:
    """Look after a world no longer."""
    detail.look_away(world)
    if world not in _worlds:  # it failed before it was complete
        return
    _worlds.discard(world)
    if not _worlds:
        shapes.forget()
        _stop_listening()
    _world_log.info("left the world", extra={"rank": world.rank})


def level_changed() -> None:
    """Have the worlds that exist follow the debug level."""
    if not _worlds:
        return
    logs.show(levels.log_level())
    wanted = _level() is levels.DebugLevel.DETAIL
    for world in list(_worlds):
        if not wanted:
            detail.look_away(world)
            continue
        for group in list(world.groups.values()):
            detail.look_into(world, group)


def _level() -> levels.DebugLevel:
    """Return the debug level, once the engine knows it, too."""
    level = levels.get_debug_level()
    _native.set_debug_level(level)
    return level


def failed(error: DistBackendError) -> None:
    """Log an error that the calling thread's rank has learnt of, and write its flight record."""
    world = current()
    # Running out of time in a store is how ranks poll it.
    if world is None or isinstance(error, DistStoreError) or not recorder.add_failure(world, error):
        return
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Where nobody listens Python would print it, just above the exception that says the same.
    if _log.logger.hasHandlers():
        _log.error("%s", reason)
    if recorder.is_wanted():
        _dump(world, reason)


def _dump(world: World, reason: str) -> None:
    try:
        recorder.dump(world, reason)
    except Exception as error:
        # A record that cannot be written must not hide, or cause, a failure.
        _log.error("cannot write the flight record: %s", error, extra={"rank": world.rank})


def _on_signal(number: int, frame: FrameType | None) -> None:
    worlds = list(_worlds)  # ranks that are threads come and go meanwhile
    for world in sorted(worlds, key=lambda world: world.rank):
        _dump(world, signal.Signals(number).name)


@contextmanager
def listening() -> Iterator[None]:
    """Answer the signal for the length of a block, in whose threads there will be worlds."""
    _listen()
    try:
        yield
    finally:
        if not _worlds:
            _stop_listening()


# Only the main thread can change handlers.
def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _listen() -> None:
    if _is_main_thread() and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _on_signal)


def _stop_listening() -> None:
    if _is_main_thread() and signal.getsignal(_SIGNAL) is _on_signal:
        signal.signal(_SIGNAL, signal.SIG_DFL)


@forks.after_fork_in_child
def _forget() -> None:
    _worlds.clear()
    _stop_listening()


def _rank_here() -> int:
    world = current()
    return -1 if world is None else world.rank


logs.set_identity(_rank_here)
