"""The flight recorder: what this rank has done lately on each of its groups, as JSON."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from phalanx import logs
from phalanx.errors import PeerFailed
from phalanx.groups import ProcessGroup
from phalanx.world import World, here

DIRECTORY_VARIABLE = "PHALANX_FLIGHT_RECORDER"
TORCH_PREFIX_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"

_VERSION = 1
_log = logs.area("debug")

_failures: WeakKeyDictionary[World, deque[dict[str, str]]] = WeakKeyDictionary()


def flight_record() -> dict[str, Any]:
    """Return what this rank has done lately, made of values that JSON knows.

    ``groups`` lists for each group its members and its ``entries``, the oldest first: operation,
    sequence, dtype, shape, call site, state, when it was posted and finished. ``failures`` are the
    errors that this rank has seen. Entries keep the monotonic times, which compare between the
    processes of a machine; the others are UTC.
    """
    return _record(here(), "asked for")


def dump_flight_record(path: str | os.PathLike[str] | None = None) -> str:
    """Write the flight record of this rank as a JSON file and return its name.

    ``path`` is a file or a directory. By default the file goes where PHALANX_FLIGHT_RECORDER, a
    directory, or TORCH_FR_DUMP_TEMP_FILE, the beginning of a file name, says, else into the
    directory for temporary files.
    """
    return dump(here(), "asked for", path)


def dump(world: World, reason: str, path: str | os.PathLike[str] | None = None) -> str:
    """Write the flight record of ``world``, say where, and return the file's name."""
    record = _record(world, reason)
    target = _target(world.rank, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.replace(unfinished, target)
    except BaseException:
        os.unlink(unfinished)
        raise
    # A warning, so that it is seen where nobody has configured logging.
    _log.warning("flight record written to %s (%s)", target, reason, extra={"rank": world.rank})
    return str(target)


def is_wanted() -> bool:
    """Say whether the environment asks for a record of every failure."""
    return any(os.environ.get(name) for name in (DIRECTORY_VARIABLE, TORCH_PREFIX_VARIABLE))


def add_failure(world: World, error: BaseException) -> bool:
    """Keep an error for later records; False if it only repeats or quotes one that is known."""
    known = _failures.setdefault(world, deque(maxlen=16))
    message = str(error)
    # A broken group goes on to say, below a line of its own, what broke it.
    cause = message.partition("\n")[2] if isinstance(error, PeerFailed) else ""
    cause = cause.partition("\n  found by ")[0]
    for each in list(known):
        if each["message"] in message or (cause and cause in each["message"]):
            return False
    failure = {"error": type(error).__name__, "message": message, "time": _utc(time.time_ns())}
    known.append(failure)
    return True


def _target(rank: int, path: str | os.PathLike[str] | None) -> Path:
    name = f"phalanx-flight-rank{rank}-pid{os.getpid()}.json"
    if path is not None:
        given = Path(path)
        return given / name if given.is_dir() else given
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        return Path(directory, name)
    if prefix := os.environ.get(TORCH_PREFIX_VARIABLE):
        return Path(f"{prefix}{rank}")
    return Path(tempfile.gettempdir(), name)


def _record(world: World, reason: str) -> dict[str, Any]:
    now, monotonic = time.time_ns(), time.monotonic_ns()
    return {
        "version": _VERSION,
        "reason": reason,
        "written": _utc(now),
        "monotonic_ns": monotonic,
        "rank": world.rank,
        "world_size": world.size,
        "ranks_are": "threads" if world.threads else "processes",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "failures": list(_failures.get(world, ())),
        "groups": [_of_group(group, now - monotonic) for group in list(world.groups.values())],
    }


def _of_group(group: ProcessGroup, epoch: int) -> dict[str, Any]:
    return {
        "name": group.group_name,
        "description": group.group_desc,
        "backend": repr(group.config),
        "ranks": list(group.ranks),
        "rank": group.rank(),
        "timeout": group.backend.timeout,
        "sequence": group.sequence_number(),
        "entries": [_dated(entry, epoch) for entry in group.backend.history()],
    }


def _dated(entry: dict[str, Any], epoch: int) -> dict[str, Any]:
    """Add the time of day to an entry; ``epoch`` is what the monotonic clock started at."""
    posted, finished = entry["posted_ns"], entry["finished_ns"]
    return {
        **entry,
        "posted": _utc(posted + epoch),
        "finished": _utc(finished + epoch) if finished else None,
        "seconds": (finished - posted) / 1e9 if finished else None,
    }


def _utc(nanoseconds: int) -> str:
    moment = datetime.fromtimestamp(nanoseconds // 1000 / 1e6, tz=timezone.utc)
    return moment.isoformat(timespec="microseconds")
