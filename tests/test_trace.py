"""Recording: what ranks do ends up in their files, whatever becomes of them."""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as theirs
from torch_ranks import run_torch

import phalanx as dist
from phalanx import cli, trace
from phalanx.errors import PeerFailed
from phalanx.testing import run_ranks
from phalanx.trace import files, joins


def read(directory):
    sources, problems = files.read_all(directory)
    assert problems == []
    return files.assemble(sources)


def told(recorded, rank, *names):
    """Return some facts of a rank's operations, in their order."""
    words = recorded.words
    mine = recorded.operations[recorded.operations["rank"] == rank]
    facts = {
        "op": [words["op"][code] for code in mine["op"]],
        "dtype": [words["dtype"][code] for code in mine["dtype"]],
        "reduce": [words["reduce"][code] for code in mine["reduce"]],
        "state": [words["state"][code] for code in mine["state"]],
        "group": [recorded.groups[place].name for place in mine["group"]],
        "site": [recorded.sites[place][0] for place in mine["site"]],
        "api": [recorded.sites[place][1] for place in mine["site"]],
        "shape": [tuple(row["shape"][: row["ndim"]].tolist()) for row in mine],
    }
    columns = [facts.get(name) or mine[name].tolist() for name in names]
    return list(zip(*columns, strict=True)) if len(names) > 1 else columns[0]


def everything():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2, 3)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.broadcast(x, src=1)
    dist.all_gather([torch.empty(4, dtype=torch.int64) for _ in range(size)], torch.arange(4))
    dist.reduce_scatter_single(torch.empty(3), torch.ones(3 * size))
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(5, dtype=torch.float64), 1, tag=7)
    elif rank == 1:
        dist.recv(torch.empty(5, dtype=torch.float64), None, tag=7)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_every_operation_is_recorded(tmp_path, monkeypatch, ranks):
    if ranks == "processes":
        monkeypatch.setenv("PHALANX_TRACE", str(tmp_path / "out"))
        run_ranks(everything, 2, ranks=ranks)
    else:
        with trace.record(tmp_path / "out"):
            run_ranks(everything, 2)
    recorded = read(tmp_path / "out")
    assert recorded.ranks == [0, 1]
    names = ("op", "dtype", "shape", "bytes", "state", "group", "sequence")
    assert told(recorded, 0, *names) == [
        ("all_reduce", "float32", (2, 3), 24, "done", "world", 1),
        ("broadcast", "float32", (2, 3), 24, "done", "world", 2),
        ("all_gather", "int64", (4,), 64, "done", "world", 3),
        ("reduce_scatter", "float32", (3,), 24, "done", "world", 4),
        ("barrier", "uint8", (), 0, "done", "world", 5),
        ("send", "float64", (5,), 40, "done", "world", 1),
    ]
    assert told(recorded, 0, "reduce")[0] == "MAX"
    assert told(recorded, 1, "root")[1] == 1
    assert told(recorded, 0, "root", "tag")[5] == (1, 7)
    assert told(recorded, 1, "op", "root", "source", "tag")[5] == ("recv", -1, 0, 7)
    line = everything.__code__.co_firstlineno + 3
    assert told(recorded, 0, "site")[0] == f"test_trace.py:{line} in everything"
    assert (recorded.operations["finished"] >= recorded.operations["posted"]).all()


def meanwhile():
    rank = dist.get_rank()
    x = torch.ones(8)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)
    works = [dist.isend(x, 1)] if rank == 0 else [dist.irecv(torch.empty(8), 0)]
    for work in works:
        work.wait()
    dist.all_gather_object([None, None], "text")


def test_asynchronous_and_coalesced_operations(tmp_path):
    with trace.record(tmp_path):
        run_ranks(meanwhile, 2)
    recorded = read(tmp_path)
    facts = told(recorded, 1, "op", "part", "parts")
    assert facts[:4] == [
        ("all_reduce", 0, 0),
        ("all_reduce", 1, 2),
        ("all_reduce", 2, 2),
        ("recv", 0, 0),
    ]
    first = recorded.operations[recorded.operations["sequence"] == 1]
    first = first[first["op"] == recorded.words["op"].index("all_reduce")]
    assert (first["flags"] & files.ASYNC).all()
    assert (first["issued"] >= 0).all()
    assert (first["issued"] <= first["posted"]).all()
    assert (first["awaited"] >= 0).all()
    assert "all_gather_object" in told(recorded, 0, "api")


def come_late(directory):
    # The record itself says when rank 1 is there.
    while dist.get_rank() == 0 and not files.assemble(files.read_all(directory)[0]).operations.size:
        time.sleep(0.001)
    dist.barrier()


def test_who_waits_for_whom(tmp_path):
    with trace.record(tmp_path):
        run_ranks(come_late, 2, tmp_path)
    recorded = read(tmp_path)
    joined = joins.join(recorded)
    assert recorded.operations["rank"].tolist() == [1, 0]
    assert joined.last.tolist() == [1]
    assert joined.lost[0] == joined.wait[0] == joined.late[0] > 0
    assert joined.lost[1] == 0


def in_groups():
    pair = dist.new_group([0, 2], group_desc="pair")
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()


def test_groups_are_told_apart(tmp_path):
    with trace.record(tmp_path):
        run_ranks(in_groups, 3)
    recorded = read(tmp_path)
    by_size = {group.size: group for group in recorded.groups}
    assert by_size[2].members == {0: 0, 2: 1}
    assert by_size[3].members == {0: 0, 1: 1, 2: 2}
    assert told(recorded, 2, "op", "sequence", "root") == [
        ("all_reduce", 1, -1),
        ("barrier", 1, -1),
    ]


def count(number):
    for _ in range(number):
        dist.barrier()


def test_nothing_is_lost_however_many_there_are(tmp_path):
    with trace.record(tmp_path):
        run_ranks(count, 2, 20_000)
    recorded = read(tmp_path)
    assert recorded.operations.size == 40_000
    for rank in (0, 1):
        assert told(recorded, rank, "sequence") == list(range(1, 20_001))


def stop_at(number):
    count(number)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_is_killed_leaves_its_record(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_TRACE", str(tmp_path))
    outcomes = run_ranks(stop_at, 2, 100, ranks="processes", return_exceptions=True)
    assert isinstance(outcomes[0], PeerFailed)
    recorded = read(tmp_path)
    assert told(recorded, 1, "op") == ["barrier"] * 100
    assert told(recorded, 0, "op", "state")[-1] == ("all_reduce", "failed")
    # It waited in vain: for the whole of its last operation.
    joined = joins.join(recorded)
    assert joined.wait[-1] == joined.duration[-1] > 0


def test_what_was_under_way_when_a_rank_was_killed(tmp_path):
    program = f"""
import os, pathlib, signal, threading, time, torch, phalanx, phalanx.trace, phalanx as dist
from phalanx.trace import files
directory = pathlib.Path({str(tmp_path)!r})
def end():
    while not files.assemble(files.read_all(directory)[0]).operations.size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
def main():
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    else:
        end()
with phalanx.trace.record(directory):
    dist.run_threads(main, 2)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    recorded = read(tmp_path)
    assert told(recorded, 0, "op", "state") == [("recv", "waiting")]


def too_much(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, 3 << 19))
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("phalanx").addHandler(handler)
    with trace.record(directory):
        count(10_000)
    logging.getLogger("phalanx").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_a_full_disk_is_told(tmp_path):
    (messages,) = run_ranks(too_much, 1, str(tmp_path), ranks="processes")
    room = ((1 << 20) - 512) // 128 - 2  # less the group and the call site
    assert len(messages) == 1
    assert "rank 0" in messages[0]
    assert str(10_000 - room) in messages[0]
    sources, problems = files.read_all(tmp_path)
    assert files.assemble(sources).operations.size == room
    assert len(problems) == 1
    assert str(10_000 - room) in problems[0]


def mistakes(given_up):
    x = torch.ones(1 + dist.get_rank())
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(x)
    group = dist.new_group([0, 1])
    group.set_timeout(0.05)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistTimeout):
            dist.barrier(group)
        given_up.set()
    else:
        given_up.wait()
        with pytest.raises(dist.DistTimeout):
            dist.barrier(group)


def test_failures_are_recorded(tmp_path):
    with trace.record(tmp_path):
        run_ranks(mistakes, 2, threading.Event())
    recorded = read(tmp_path)
    assert told(recorded, 0, "op", "state") == [
        ("all_reduce", "mismatch"),
        ("barrier", "timed out"),
    ]
    assert told(recorded, 1, "op", "state") == told(recorded, 0, "op", "state")


def on_and_off(directory):
    count(3)
    with trace.record(f"{directory}/first"):
        count(2)
        dist.barrier()
    dist.barrier()
    if dist.get_rank() == 0:
        assert not trace.is_recording()
        trace.start(f"{directory}/second")
    count(1)
    with trace.range("named"):
        count(4)
    if dist.get_rank() == 0:
        trace.stop()


def test_recording_can_begin_and_end_at_any_time(tmp_path):
    run_ranks(on_and_off, 2, tmp_path)
    first, second = read(tmp_path / "first"), read(tmp_path / "second")
    # The last one may be recorded or not on the rank that is not the last to stop.
    assert told(first, 0, "sequence")[:3] == [4, 5, 6]
    assert set(told(second, 0, "sequence")[-4:]) == {9, 10, 11, 12}
    assert {bytes(stretch["name"]) for stretch in second.ranges} == {b"named"}


def test_off_means_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not trace.is_recording()
    run_ranks(everything, 2)
    with trace.range("nothing"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_recording_at_a_time(tmp_path):
    with trace.record(tmp_path / "a"):
        with pytest.raises(ValueError, match=str(tmp_path / "a")):
            trace.start(tmp_path / "b")
        with trace.record(tmp_path / "a"):
            pass
        assert trace.is_recording()
    assert not trace.is_recording()
    with pytest.raises(ValueError, match="start was not called"):
        trace.stop()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="cannot record a trace"):
        trace.start(tmp_path / "file")
    assert not trace.is_recording()


@trace.range("decorated")
def nested():
    with trace.range("inner"):
        dist.barrier()


def test_ranges(tmp_path):
    with trace.record(tmp_path):
        run_ranks(nested, 2)
    recorded = read(tmp_path)
    for rank in (0, 1):
        mine = recorded.ranges[recorded.ranges["rank"] == rank]
        outer, inner = mine
        assert (outer["name"], inner["name"]) == (b"decorated", b"inner")
        (barrier,) = recorded.operations[recorded.operations["rank"] == rank]
        times = [
            outer["started"],
            inner["started"],
            barrier["posted"],
            barrier["finished"],
            inner["finished"],
            outer["finished"],
        ]
        assert times == sorted(times)


def test_a_forked_child_leaves_the_record_alone(tmp_path):
    program = """
import os, sys, phalanx as dist
from phalanx.stores import HashStore
dist.init_process_group(store=HashStore(), rank=0, world_size=1)
dist.barrier()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
dist.barrier()
"""
    environment = {**os.environ, "PHALANX_TRACE": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment, timeout=60, check=True)
    recorded = read(tmp_path)
    assert told(recorded, 0, "op") == ["barrier", "barrier"]
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 512 + 5 * 128  # the group, two call sites, two operations


def through_torch():
    x = torch.ones(4)
    theirs.all_reduce(x)
    theirs.all_reduce(x, async_op=True).wait()
    if theirs.get_rank() == 0:
        theirs.send(x, 1)
    else:
        theirs.recv(x, 0)
    pair = theirs.new_group([0, 1])
    theirs.broadcast(x, 0, group=pair)


def test_the_backend_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_TRACE", str(tmp_path))
    run_torch(through_torch, 2)
    sources, problems = files.read_all(tmp_path)
    assert problems == []
    recorded = files.assemble(sources)
    for rank, message in ((0, "send"), (1, "recv")):
        made = told(recorded, rank, "op", "site", "api")
        ops = [op for op, site, api in made if "through_torch" in site and api != "new_group"]
        assert ops == ["all_reduce", "all_reduce", message, "broadcast"], made


def test_only_the_user_can_read_records(tmp_path):
    before = os.umask(0)
    try:
        with trace.record(tmp_path / "made"):
            run_ranks(count, 2, 1)
        assert cli.main(["trace", str(tmp_path / "made")]) == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "made").iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {0o600}, modes
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


def test_files_say_who_wrote_them(tmp_path):
    with trace.record(tmp_path):
        run_ranks(count, 2, 1)
        run_ranks(count, 2, 1)
    sources, _ = files.read_all(tmp_path)
    assert sorted(source.rank for source in sources) == [0, 0, 1, 1]
    assert len({source.world for source in sources}) == 2
    assert {source.pid for source in sources} == {os.getpid()}
    assert all(source.threads and source.size == 2 for source in sources)
    now = time.time_ns() - time.monotonic_ns()
    assert all(abs(source.epoch - now) < 60e9 for source in sources)
    assert len(files.runs(sources)) == 1  # of one process
    recorded = files.assemble(sources)
    assert len(recorded.groups) == 2  # not joined, though they have one name
    assert np.unique(joins.join(recorded).came).tolist() == [2]


_SLOTS = 4 * 128  # where they begin in a file


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    with trace.record(directory):
        run_ranks(everything, 2)
    return next(directory.glob("rank1-*.trace")).read_bytes()


def damaged(tmp_path, data, at, value):
    tmp_path.joinpath("rank1-1.trace").write_bytes(data[:at] + value + data[at + len(value) :])
    return files.read_all(tmp_path)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (16, b"\xff\xff\xff\xff"),  # rank
        (16, b"\x02\0\0\0"),
        (20, b"\0\0\0\x70"),  # size
        (20, b"\0\0\0\0"),
        (48, b"\xff" * 8),  # monotonic_ns
        (56, b"\xff" * 7 + b"\x7f"),  # realtime_ns
    ],
)
def test_a_file_whose_head_cannot_be_is_told_from_a_record(tmp_path, recorded_file, at, value):
    sources, problems = damaged(tmp_path, recorded_file, at, value)
    assert sources == []
    assert "damaged" in problems[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (1, b"\xff"),  # op
        (2, b"\xff"),  # dtype
        (3, b"\xff"),  # reduce
        (4, b"\x07"),  # state
        (5, b"\x07"),  # ndim
        (40, b"\xff" * 8),  # bytes
        (56, b"\xff" * 8),  # posted
    ],
)
def test_a_record_that_cannot_be_is_left_out_and_the_others_are_shown(
    tmp_path, recorded_file, field, value
):
    slots = range(_SLOTS, len(recorded_file), 128)
    first = next(at for at in slots if recorded_file[at] == 3)
    sources, problems = damaged(tmp_path, recorded_file, first + field, value)
    assert problems == []
    shown = files.assemble(sources)
    assert shown.problems == ["rank1-1.trace: 1 records are damaged and left out"]
    assert told(shown, 1, "op") == ["broadcast", "all_gather", "reduce_scatter", "barrier", "recv"]
    assert cli.main(["trace", str(tmp_path)]) == 0


def test_operations_of_a_group_that_cannot_be_are_left_out(tmp_path, recorded_file):
    group = next(at for at in range(_SLOTS, len(recorded_file), 128) if recorded_file[at] == 2)
    sources, _ = damaged(tmp_path, recorded_file, group + 8, b"\0\0\0\x70")  # its size
    assert told(files.assemble(sources), 1, "op") == ["recv"]  # messages have a record of their own
