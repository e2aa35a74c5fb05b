"""Reading what `native/trace.hpp` writes: a file per rank, into one table on one clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx import _native

SUFFIX = ".trace"
ASYNC, ON_LANE = 1, 2  # flags of an operation
WAITING, DONE, MISMATCH = 0, 1, 3  # states of an operation

_MAGIC = b"PHXTRACE"
_VERSION = 1
_SLOT = 128
_MOST_RANKS = 1 << 20  # of a world: more is no world
_LATEST = 2**62  # nanoseconds since 1970: in the year 2116
_SITE, _GROUP, _OPERATION, _RANGE = 1, 2, 3, 4  # kinds of slots

_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("slot_bytes", "<u4"),
        ("rank", "<i4"),
        ("size", "<i4"),
        ("pid", "<i4"),
        ("threads", "<u4"),
        ("world", "<u8"),
        ("process_start", "<u8"),
        ("monotonic_ns", "<i8"),
        ("realtime_ns", "<i8"),
        ("lost", "<u8"),
        ("error", "<i4"),
        ("unused", "<i4"),
        ("boot", "S40"),
        ("host", "S64"),
    ]
)
_HEAD_BYTES = 4 * _SLOT
_SITE_SLOT = np.dtype(
    {
        "names": ["site", "api"],
        "formats": ["S80", "S24"],
        "offsets": [1, 81],
        "itemsize": _SLOT,
    }
)
_GROUP_SLOT = np.dtype(
    {
        "names": ["rank", "size", "id", "name"],
        "formats": ["<i4", "<i4", "<u8", "S64"],
        "offsets": [4, 8, 16, 24],
        "itemsize": _SLOT,
    }
)
_OPERATION_SLOT = np.dtype(
    [
        ("kind", "u1"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("reduce", "u1"),
        ("state", "u1"),
        ("ndim", "u1"),
        ("flags", "u1"),
        ("unused", "u1"),
        ("group", "<u4"),
        ("site", "<u4"),
        ("root", "<i4"),
        ("tag", "<i4"),
        ("source", "<i4"),
        ("part", "<u2"),
        ("parts", "<u2"),
        ("sequence", "<u8"),
        ("bytes", "<u8"),
        ("issued", "<i8"),
        ("posted", "<i8"),
        ("finished", "<i8"),
        ("awaited", "<i8"),
        ("shape", "<i8", (6,)),
    ]
)
_RANGE_SLOT = np.dtype(
    {
        "names": ["thread", "started", "finished", "name"],
        "formats": ["<u4", "<i8", "<i8", "S96"],
        "offsets": [4, 8, 16, 24],
        "itemsize": _SLOT,
    }
)
_NO_PLACE = 2**32 - 1  # of a group that cannot be read
_TIMES = ("issued", "posted", "finished", "awaited")


class BrokenFile(Exception):
    """Says why a file cannot be read."""


@dataclass(frozen=True)
class Source:
    """One file: the record of one rank of one world."""

    path: Path
    rank: int
    size: int
    pid: int
    threads: bool
    world: int
    process: tuple[str, int, int]
    host: str
    boot: str
    epoch: int  # nanoseconds from the monotonic clock to the time of day
    began: int  # nanoseconds since 1970
    lost: int
    error: int
    cut: bool  # the end of the file is missing
    slots: NDArray[Any] = field(repr=False)


@dataclass(frozen=True)
class Group:
    """A group as its members' files describe it; ``members`` maps world ranks to its own."""

    name: str
    size: int
    members: dict[int, int]


@dataclass
class Trace:
    """All that was recorded. Times are nanoseconds since ``began``, the first of them.

    ``operations`` and ``ranges`` are structured arrays in the order of time, with a column
    ``rank``; ``group`` and ``site`` are places in ``groups`` and ``sites``.
    """

    sources: list[Source]
    groups: list[Group]
    sites: list[tuple[str, str]]
    operations: NDArray[Any]
    ranges: NDArray[Any]
    began: int  # nanoseconds since 1970
    length: int
    problems: list[str]
    words: dict[str, list[str]]

    @property
    def ranks(self) -> list[int]:
        return sorted({source.rank for source in self.sources})


def read(path: Path) -> Source:
    """Read one file as far as it was written; BrokenFile if it is none."""
    return parse(path, np.fromfile(path, np.uint8))


def parse(path: Path, data: NDArray[Any]) -> Source:
    """Read the bytes of a file."""
    if not data.any():
        raise BrokenFile("empty: the rank ended before it had written anything")
    if data.size < _HEAD_BYTES or data[:8].tobytes() != _MAGIC:
        raise BrokenFile("not a record of a rank: it does not begin like one")
    head = data[: _HEAD.itemsize].view(_HEAD)[0]
    if head["version"] != _VERSION or head["slot_bytes"] != _SLOT:
        raise BrokenFile(
            f"has format {head['version']}, and this version of phalanx reads format {_VERSION}: "
            "read it with the version that wrote it"
        )
    if not _is_sound(head):
        raise BrokenFile("damaged: what it says of its rank, or of the time, cannot be")
    body = data[_HEAD_BYTES:]
    slots = body[: body.size // _SLOT * _SLOT].reshape(-1, _SLOT)
    unwritten = np.flatnonzero(slots[:, 0] == 0)
    boot, host = _text(head["boot"]), _text(head["host"])
    return Source(
        path,
        int(head["rank"]),
        int(head["size"]),
        int(head["pid"]),
        bool(head["threads"]),
        int(head["world"]),
        (boot, int(head["pid"]), int(head["process_start"])),
        host,
        boot,
        int(head["realtime_ns"]) - int(head["monotonic_ns"]),
        int(head["realtime_ns"]),
        int(head["lost"]),
        int(head["error"]),
        body.size % _SLOT != 0,
        slots[: unwritten[0]] if unwritten.size else slots,
    )


def _is_sound(head: Any) -> bool:
    times = head["monotonic_ns"], head["realtime_ns"]
    return bool(
        0 <= head["rank"] < head["size"] <= _MOST_RANKS and all(0 <= t < _LATEST for t in times)
    )


def read_all(directory: Path) -> tuple[list[Source], list[str]]:
    """Read the files of a directory; return those that can be read, and what is wrong."""
    sources, problems = [], []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            source = read(path)
        except BrokenFile as error:
            problems.append(f"{path.name}: {error}")
            continue
        sources.append(source)
        if source.cut:
            problems.append(f"{path.name}: the end is missing: it was not copied whole")
        if source.error:
            problems.append(
                f"rank {source.rank}: {source.lost} operations are not recorded: "
                f"{os.strerror(source.error)} ({path.name})"
            )
    return sources, problems


def runs(sources: Sequence[Source]) -> list[list[Source]]:
    """Tell apart the runs of programs that have recorded here, the newest last.

    Files belong together if they are of one world or of one process.
    """
    found: list[list[Source]] = []
    for source in sources:
        keys = {source.world, source.process}
        related = [run for run in found if any(keys & {s.world, s.process} for s in run)]
        found = [run for run in found if run not in related]
        found.append([each for run in related for each in run] + [source])
    return sorted(found, key=lambda run: max(s.epoch + _last_time(s) for s in run))


def describe_run(run: Sequence[Source]) -> str:
    """Say when a run began, and of which processes: "10:51:02, 2 ranks (process 4711)"."""
    began = datetime.fromtimestamp(min(source.began for source in run) * 1e-9)
    ranks = len({source.rank for source in run})
    pids = sorted({source.pid for source in run})
    several = f"processes {pids[0]} to {pids[-1]}" if len(pids) > 1 else f"process {pids[0]}"
    return f"{began:%H:%M:%S}, {ranks} rank{'s' if ranks > 1 else ''} ({several})"


def assemble(sources: Sequence[Source], problems: Sequence[str] = ()) -> Trace:
    """Put files together: one clock, one list of groups and one of call sites."""
    groups: dict[int, Group] = {}
    places: dict[int, int] = {}
    sites: dict[tuple[str, str], int] = {}
    epochs: dict[str, int] = {}  # one per machine: its ranks share the monotonic clock
    operations, ranges = [], []
    words = _native.trace_words()
    told = list(problems)
    for source in sources:
        epoch = epochs.setdefault(source.boot, source.epoch)
        kinds = source.slots[:, 0]
        group_places = []
        for slot in _of_kind(source.slots, kinds, _GROUP, _GROUP_SLOT):
            if not 0 <= slot["rank"] < slot["size"] <= _MOST_RANKS:
                group_places.append(_NO_PLACE)  # damaged, and so is what refers to it
                continue
            identity = int(slot["id"])
            if identity not in groups:
                groups[identity] = Group(_text(slot["name"]), int(slot["size"]), {})
                places[identity] = len(places)
            groups[identity].members[source.rank] = int(slot["rank"])
            group_places.append(places[identity])
        site_places = [
            sites.setdefault((_text(slot["site"]), _text(slot["api"])), len(sites))
            for slot in _of_kind(source.slots, kinds, _SITE, _SITE_SLOT)
        ]
        found = _with_rank(_of_kind(source.slots, kinds, _OPERATION, _OPERATION_SLOT), source.rank)
        known = (found["group"] < len(group_places)) & (found["site"] < len(site_places))
        sound = _are_sound(found, words)
        damaged = np.count_nonzero(~sound)
        found = found[known & sound]
        found["group"] = np.array(group_places, np.uint32)[found["group"]]
        found = found[found["group"] != _NO_PLACE]
        found["site"] = np.array(site_places, np.uint32)[found["site"]]
        for name in _TIMES:
            found[name][found[name] != 0] += epoch
        operations.append(found)
        stretches = _with_rank(_of_kind(source.slots, kinds, _RANGE, _RANGE_SLOT), source.rank)
        sound = _are_times(stretches, ("started", "finished"))
        damaged += np.count_nonzero(~sound)
        stretches = stretches[sound]
        if damaged:
            told.append(f"{source.path.name}: {damaged} records are damaged and left out")
        for name in ("started", "finished"):
            stretches[name][stretches[name] != 0] += epoch
        ranges.append(stretches)
    return _on_one_clock(
        Trace(
            list(sources),
            list(groups.values()),
            list(sites),
            _joined(operations, "posted", _OPERATION_SLOT),
            _joined(ranges, "started", _RANGE_SLOT),
            0,
            0,
            told,
            words,
        )
    )


def _are_sound(table: NDArray[Any], words: dict[str, list[str]]) -> NDArray[Any]:
    """Tell operations from what damage has left in their place."""
    sound = _are_times(table, _TIMES)
    sound &= table["ndim"] <= table["shape"].shape[1]
    for name, known in words.items():
        sound &= table[name] < len(known)
    for name in ("bytes", "sequence"):
        sound &= table[name] < _LATEST
    return sound


def _are_times(table: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    sound = np.ones(table.size, bool)
    for name in names:
        sound &= (table[name] >= 0) & (table[name] < _LATEST)
    return sound


def _on_one_clock(trace: Trace) -> Trace:
    """Count times from the first one; what has not ended lasts until the last."""
    operations, ranges = trace.operations, trace.ranges
    moments = [operations["posted"], operations["finished"], ranges["started"], ranges["finished"]]
    times = np.concatenate([operations["issued"], *moments])
    times = times[times > 0]
    if not times.size:
        return trace
    trace.began = int(times.min())
    trace.length = int(times.max()) - trace.began
    for table, names in ((operations, _TIMES), (ranges, ("started", "finished"))):
        for name in names:
            table[name] = np.where(table[name] > 0, table[name] - trace.began, -1)
    return trace


def _of_kind(slots: NDArray[Any], kinds: NDArray[Any], kind: int, dtype: Any) -> NDArray[Any]:
    chosen: NDArray[Any] = np.ascontiguousarray(slots[kinds == kind]).view(dtype)
    return chosen.reshape(-1)


def _with_rank(table: NDArray[Any], rank: int) -> NDArray[Any]:
    names = table.dtype.names or ()
    wider = np.empty(table.size, _ranked(table.dtype))
    for name in names:
        wider[name] = table[name]
    wider["rank"] = rank
    return wider


def _ranked(dtype: Any) -> Any:
    fields = [(name, dtype[name].base, dtype[name].shape) for name in dtype.names]
    return np.dtype([*fields, ("rank", "<i4")])


def _joined(tables: Sequence[NDArray[Any]], order: str, dtype: Any) -> NDArray[Any]:
    if not tables:
        return np.empty(0, _ranked(dtype))
    table = np.concatenate(tables)
    return table[np.argsort(table[order], kind="stable")]


def _last_time(source: Source) -> int:
    kinds = source.slots[:, 0]
    operations = _of_kind(source.slots, kinds, _OPERATION, _OPERATION_SLOT)
    return int(operations["posted"].max()) if operations.size else 0


def _text(value: bytes) -> str:
    return bytes(value).decode(errors="replace")
