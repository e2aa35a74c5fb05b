"""The flight recorder: what it holds, and when and where it is written."""

import json
import logging
import os
import signal
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

import phalanx as dist
from phalanx.debug import recorder
from phalanx.testing.ranks import run_ranks

THREADS_AND_PROCESSES = pytest.mark.parametrize("ranks", ["threads", "processes"])


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch):
    for name in (recorder.DIRECTORY_VARIABLE, recorder.TORCH_PREFIX_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def files(directory):
    """Return the records of a directory by rank; there must be nothing else in it."""
    found = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
    assert all(record["version"] == 1 for record in found)
    return {record["rank"]: record for record in found}


def exchange():
    rank = dist.get_rank()
    tensor = torch.ones(2, 3)
    dist.all_reduce(tensor)
    if rank == 0:
        dist.send(tensor, 1, tag=4)
    else:
        dist.recv(tensor, 0, tag=4)
    dist.new_group([1], group_desc="alone")
    return dist.debug.flight_record()


@THREADS_AND_PROCESSES
def test_a_record_holds_the_last_operations_of_all_groups(ranks):
    for rank, record in enumerate(run_ranks(exchange, 2, ranks=ranks, timeout=60)):
        assert json.loads(json.dumps(record)) == record
        assert (record["rank"], record["world_size"], record["ranks_are"]) == (rank, 2, ranks)
        assert (record["pid"] == os.getpid()) == (ranks == "threads")
        world = record["groups"][0]
        assert (world["name"], world["ranks"], world["rank"]) == ("world", [0, 1], rank)
        collective, message = world["entries"]
        assert (collective["op"], collective["sequence"]) == ("all_reduce", 1)
        assert (collective["dtype"], collective["shape"]) == ("float32", [2, 3])
        assert message["op"] == ("recv" if rank else "send")
        assert (message["peer"], message["tag"]) == (1 - rank, 4)
        for entry in world["entries"]:
            assert entry["state"] == "done"
            assert entry["site"].startswith("test_recorder.py:")
            assert entry["site"].endswith("in exchange")
            assert entry["posted"] <= entry["finished"] <= record["written"]
            assert entry["seconds"] >= 0
        alone = [group["description"] for group in record["groups"][1:]]
        assert alone == (["alone"] if rank else [])


def test_times_of_day_come_from_monotonic_ones():
    epoch = time.time_ns() - time.monotonic_ns()
    noon = datetime(2024, 2, 29, 12, tzinfo=timezone.utc)
    posted = round(noon.timestamp() * 1e9) - epoch
    entry = {"op": "barrier", "posted_ns": posted, "finished_ns": posted + 1_500_000_000}
    dated = recorder._dated(entry, epoch)
    assert dated["posted"] == "2024-02-29T12:00:00.000000+00:00"
    assert dated["finished"] == "2024-02-29T12:00:01.500000+00:00"
    assert dated["seconds"] == 1.5
    unfinished = recorder._dated({**entry, "finished_ns": 0}, epoch)
    assert unfinished["finished"] is None
    assert unfinished["seconds"] is None


def test_backends_without_a_history_have_records_too():
    def program():
        dist.barrier()
        return dist.debug.flight_record()

    for record in run_ranks(program, 2, backend="memory", timeout=60):
        assert record["groups"][0]["entries"] == []
        assert record["groups"][0]["sequence"] == 1


def test_there_is_no_record_without_a_world():
    with pytest.raises(ValueError, match="init_process_group"):
        dist.debug.flight_record()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.debug.dump_flight_record()


@pytest.fixture
def world():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_record_goes_where_it_is_wanted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = f"phalanx-flight-rank0-pid{os.getpid()}.json"
    new = tmp_path / "new" / "one"
    assert dist.debug.dump_flight_record() == str(tmp_path / name)
    assert dist.debug.dump_flight_record(new / "x.json") == str(new / "x.json")
    assert dist.debug.dump_flight_record(str(new)) == str(new / name)
    monkeypatch.setenv(recorder.TORCH_PREFIX_VARIABLE, str(tmp_path / "torch" / "rank_"))
    assert dist.debug.dump_flight_record() == str(tmp_path / "torch" / "rank_0")
    monkeypatch.setenv(recorder.DIRECTORY_VARIABLE, str(tmp_path / "mine"))
    assert dist.debug.dump_flight_record() == str(tmp_path / "mine" / name)
    assert dist.debug.dump_flight_record() == str(tmp_path / "mine" / name)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        [name, name, name, "rank_0", "x.json"]
    )
    assert files(tmp_path / "mine")[0]["reason"] == "asked for"
    last = caplog.records[-1]
    assert last.levelno == logging.WARNING
    assert str(tmp_path / "mine" / name) in last.getMessage()


@pytest.mark.usefixtures("world")
def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(f"no room for {target}")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no room"):
        dist.debug.dump_flight_record(tmp_path)
    assert not list(tmp_path.iterdir())


def fail(directory, how):
    os.environ[recorder.DIRECTORY_VARIABLE] = directory
    rank = dist.get_rank()
    dist.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        FAULTS[how](rank)
    dist.monitored_barrier(timeout=30)
    return type(caught.value).__name__


def come_late(rank):
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["given up"])
    dist.group.WORLD.set_timeout(0.3)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        store.set("given up", "")


FAULTS = {
    "CollectiveMismatch": lambda rank: dist.all_reduce(torch.ones(1 + rank)),
    "Deadlock": lambda rank: dist.recv(torch.ones(1), 1 - rank),
    "DistTimeout": come_late,
}


@pytest.mark.parametrize(
    ("how", "op", "state"),
    [
        ("CollectiveMismatch", "all_reduce", "mismatch"),
        ("Deadlock", "recv", "deadlock"),
        ("DistTimeout", "all_reduce", "timed out"),
    ],
)
def test_failures_are_recorded_if_asked_for(tmp_path, how, op, state):
    kinds = run_ranks(fail, 2, str(tmp_path), how, ranks="processes", timeout=60)
    assert kinds == [how, how]
    records = files(tmp_path)
    assert set(records) == {0, 1}
    for rank, record in records.items():
        assert record["reason"].startswith(f"{how}: ")
        (failure,) = record["failures"]
        assert failure["error"] == how
        assert op in failure["message"]
        assert "test_recorder.py" in failure["message"]
        by_op = {entry["op"]: entry for entry in record["groups"][0]["entries"]}
        assert by_op["barrier"]["state"] == "done"
        if how != "DistTimeout" or rank == 0:
            assert by_op[op]["state"] == state


def test_a_failure_is_recorded_once_and_only_if_asked_for(tmp_path, monkeypatch, caplog):
    def program():
        work = dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)
        for _ in range(3):
            with pytest.raises(dist.CollectiveMismatch):
                work.wait()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(program, 2, timeout=60)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(recorder.DIRECTORY_VARIABLE, str(tmp_path / "records"))
    run_ranks(program, 2, timeout=60)
    assert set(files(tmp_path / "records")) == {0, 1}
    said = [record for record in caplog.records if "flight record written" in record.getMessage()]
    assert sorted(record.rank for record in said) == [0, 1]


def outlive(directory):
    os.environ[recorder.DIRECTORY_VARIABLE] = directory
    if dist.get_rank() == 1:
        os._exit(7)
    for _ in range(3):
        with pytest.raises(dist.PeerFailed, match="code 7"):
            dist.barrier()
    return dist.debug.flight_record()["failures"]


def test_what_a_broken_group_says_again_is_no_new_failure(tmp_path):
    failures, _ = run_ranks(
        outlive, 2, str(tmp_path), ranks="processes", timeout=60, return_exceptions=True
    )
    assert [failure["error"] for failure in failures] == ["PeerFailed"]
    assert files(tmp_path)[0]["failures"] == failures


def test_a_record_that_cannot_be_written_hides_no_failure(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(recorder.DIRECTORY_VARIABLE, str(tmp_path / "file"))

    def program():
        with pytest.raises(dist.CollectiveMismatch):
            dist.all_reduce(torch.ones(1 + dist.get_rank()))

    run_ranks(program, 2, timeout=60)
    said = [record for record in caplog.records if "cannot write" in record.getMessage()]
    assert sorted(record.rank for record in said) == [0, 1]
    assert all(str(tmp_path / "file") in record.getMessage() for record in said)


def be_asked(directory):
    """Hang on rank 0 until rank 1 has got a record of that."""
    os.environ[recorder.DIRECTORY_VARIABLE] = directory
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, 0)
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)
        return None
    path = Path(directory, f"phalanx-flight-rank0-pid{pid.item()}.json")
    record = {}
    while not record or record["groups"][0]["entries"][-1]["op"] != "recv":
        path.unlink(missing_ok=True)
        os.kill(pid.item(), signal.SIGUSR1)
        while not path.exists():
            time.sleep(0.01)
        record = json.loads(path.read_text())
    dist.send(torch.zeros(1), 0)
    return record


def test_a_rank_that_hangs_answers_a_signal(tmp_path):
    _, record = run_ranks(be_asked, 2, str(tmp_path), ranks="processes", timeout=60)
    assert (record["rank"], record["reason"]) == (0, "SIGUSR1")
    last = record["groups"][0]["entries"][-1]
    assert (last["op"], last["peer"], last["state"]) == ("recv", 1, "waiting")
    assert last["finished"] is None
    assert last["site"].endswith("in be_asked")


def test_the_handler_is_there_while_a_world_is():
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    for _ in range(2):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert callable(signal.getsignal(signal.SIGUSR1))
        dist.destroy_process_group()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("users", [signal.SIG_IGN, lambda *_: None])
def test_the_users_handler_stays(users):
    before = signal.signal(signal.SIGUSR1, users)
    try:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert signal.getsignal(signal.SIGUSR1) is users
        dist.destroy_process_group()
        assert signal.getsignal(signal.SIGUSR1) is users
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_answered_for_all_ranks_that_are_threads(tmp_path, monkeypatch):
    monkeypatch.setenv(recorder.DIRECTORY_VARIABLE, str(tmp_path))

    def program():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            while len(list(tmp_path.glob("phalanx*"))) < 2:
                time.sleep(0.01)
        dist.barrier()

    run_ranks(program, 2, timeout=60)
    assert {record["reason"] for record in files(tmp_path).values()} == {"SIGUSR1"}
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def have_a_child():
    child = os.fork()
    if child == 0:
        os._exit(signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_is_no_rank():
    assert run_ranks(have_a_child, 1, ranks="processes", timeout=60) == [0]
