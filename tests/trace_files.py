"""Records of ranks that never ran, for tests of what reads them."""

from pathlib import Path

import numpy as np

from phalanx import _native
from phalanx.trace import files

WORDS = _native.trace_words()
WORLD = 7
PATH = Path("rank0.trace")


def head(rank, size, *, pid=100, world=WORLD, boot="boot", epoch=0, error=0, lost=0):
    """Return the beginning of a rank's file."""
    entry = np.zeros(1, files._HEAD)
    entry["magic"] = b"PHXTRACE"
    entry["version"], entry["slot_bytes"] = 1, 128
    entry["rank"], entry["size"], entry["pid"] = rank, size, pid + rank
    entry["world"], entry["process_start"] = world, 1
    entry["monotonic_ns"], entry["realtime_ns"] = 0, epoch
    entry["boot"], entry["host"] = boot.encode(), b"box"
    entry["error"], entry["lost"] = error, lost
    return entry.tobytes().ljust(512, b"\0")


def site(text, api=""):
    """Return the slot of a call site; they are counted from 0."""
    return _slot(files._SITE, files._SITE_SLOT, site=text.encode(), api=api.encode())


def group(identity, name, rank, size):
    """Return the slot of a group; they are counted from 0."""
    return _slot(
        files._GROUP, files._GROUP_SLOT, id=identity, name=name.encode(), rank=rank, size=size
    )


def operation(op, sequence, posted, finished, **fields):
    """Return the slot of an operation; `finished` 0 leaves it open."""
    values = {"root": -1, "source": -1, "dtype": 11, "ndim": 1, "bytes": 4, **fields}
    values.setdefault("state", files.DONE if finished else files.WAITING)
    return _slot(
        files._OPERATION,
        files._OPERATION_SLOT,
        op=WORDS["op"].index(op),
        sequence=sequence,
        posted=posted,
        finished=finished,
        **values,
    )


def stretch(name, started, finished):
    """Return the slot of a range."""
    return _slot(
        files._RANGE, files._RANGE_SLOT, name=name.encode(), started=started, finished=finished
    )


def _slot(kind, layout, /, **fields):
    entry = np.zeros(1, layout)
    for name, value in fields.items():
        entry[name] = value
    data = bytearray(entry.tobytes().ljust(128, b"\0"))
    data[0] = kind
    return bytes(data)


def write(directory, rank, size, slots, name=None, **facts):
    """Write a rank's file and return its path."""
    path = directory / (name or f"rank{rank}-{100 + rank}.trace")
    path.write_bytes(head(rank, size, **facts) + b"".join(slots))
    return path


def trace_of(directory, *ranks, size=None, **facts):
    """Write a file per list of slots, on a group "world" and one call site, and read them."""
    size = len(ranks) if size is None else size
    for rank, slots in enumerate(ranks):
        start = [site("train.py:1 in step"), group(1, "world", rank, size)]
        write(directory, rank, size, start + list(slots), **facts)
    sources, problems = files.read_all(directory)
    return files.assemble(sources, problems)


def many(directory, ranks, meetings, seed=0):
    """Write a job of that many ranks and meetings, with messages and ranges between them."""
    random = np.random.default_rng(seed)
    ops = [WORDS["op"].index(op) for op in ("all_reduce", "all_gather", "broadcast")]
    shift = np.cumsum(random.integers(20_000, 60_000, meetings))
    for rank in range(ranks):
        table = np.zeros(meetings, files._OPERATION_SLOT)
        table["kind"] = files._OPERATION
        table["op"] = np.resize(ops, meetings)
        table["state"], table["dtype"], table["ndim"] = files.DONE, 11, 1
        table["root"], table["source"] = -1, -1
        table["site"] = np.arange(meetings) % 5
        table["sequence"] = np.arange(1, meetings + 1)
        table["shape"][:, 0] = 1 << (np.arange(meetings) % 20)
        table["bytes"] = table["shape"][:, 0] * 4
        late = np.random.default_rng(seed + rank + 1).exponential(4000, meetings).astype(np.int64)
        table["posted"] = 1 + shift + np.minimum(late, 15_000)
        table["finished"] = shift + 18_000
        slots = [site(f"train.py:{10 + i} in step{i}") for i in range(5)]
        slots.append(group(1, "world", rank, ranks))
        slots += [
            stretch(f"epoch {i}", *shift[[i * 10, i * 10 + 9]]) for i in range(meetings // 10)
        ]
        write(directory, rank, ranks, [*slots, table.tobytes()])
