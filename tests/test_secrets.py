"""The secret of a job: where it is used, what is said without one, and that it is never printed."""

from __future__ import annotations

import logging
import os
import re
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

import launches
import pytest

from phalanx.errors import DistNetworkError, StoreTimeout
from phalanx.stores import TCPStore, arrival, meeting, over_mpi, over_torch, rendezvous, secret
from phalanx.stores.addresses import host_address, is_loopback

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("PHALANX_SECRET", raising=False)
    monkeypatch.setattr(secret, "_warned", False)


@pytest.fixture
def knows(monkeypatch):
    """Have this process know a secret, or with "" none."""

    def know(word: str) -> None:
        monkeypatch.setenv("PHALANX_SECRET", word)

    return know


# --- where it is used


def agent_store(port: int = 0):
    """A store as torchrun's agent runs it: open to all."""
    import torch.distributed

    return torch.distributed.TCPStore(HOST, port, is_master=port == 0, wait_for_workers=False)


def test_what_lies_in_torchruns_store_opens_nothing_by_itself(knows):
    knows("the word of the job")
    agent = agent_store()
    with ThreadPoolExecutor(2) as pool:
        meet = over_torch.meet_over_torch
        ranks = [pool.submit(meet, HOST, agent.port, rank, 30.0) for rank in (0, 1)]
        mine, theirs = (each.result() for each in ranks)
    mine.set("a", "5")
    assert theirs.get("a") == b"5"
    written = agent.get("phalanx/store").decode()
    assert "the word of the job" not in written
    token = re.search(r'"token": "(\w+)"', written)[1]
    with pytest.raises(DistNetworkError, match="secrets differ"):
        TCPStore(HOST, mine.port, timeout=5, secret=token)


@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("one", ""), ("", "two")])
def test_ranks_of_torchrun_with_different_secrets(monkeypatch, knows, first, second):
    monkeypatch.setattr(over_torch, "ASTRAY", 0.6)
    agent = agent_store()
    knows(first)
    served = over_torch.meet_over_torch(HOST, agent.port, 0, 30.0)
    knows(second)
    with pytest.raises(DistNetworkError, match=r"rank 1 .*secrets differ: PHALANX_SECRET"):
        over_torch.meet_over_torch(HOST, agent.port, 1, 30.0)
    del served


@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("one", ""), ("", "two")])
def test_ranks_of_one_machine_with_different_secrets(monkeypatch, knows, first, second):
    monkeypatch.setattr(meeting, "_REFUSED_SECONDS", 0.1)
    knows(first)
    served = meeting.meet(("some", "job"), 0, 2, 30.0)
    knows(second)
    with pytest.raises(DistNetworkError, match="secrets differ: PHALANX_SECRET"):
        meeting.meet(("some", "job"), 1, 2, 30.0)
    knows(first)
    assert meeting.meet(("some", "job"), 1, 2, 30.0).add("n", 3) == 3
    del served


class LoneWorld:
    """MPI's world, of one process."""

    def __init__(self) -> None:
        self.told: object = None

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, what: object) -> list[object]:
        return [what]

    def bcast(self, what: object, root: int) -> object:
        self.told = what
        return what


def test_what_mpi_carries_opens_nothing_by_itself(monkeypatch, knows):
    world = LoneWorld()
    monkeypatch.setattr(over_mpi, "mpi", lambda: type("MPI", (), {"COMM_WORLD": world}))
    knows("the word of the job")
    store = over_mpi.meet_over_mpi(30.0)
    port, token = world.told
    assert port == store.port
    with pytest.raises(DistNetworkError, match="secrets differ"):
        arrival.arrive(HOST, port, 1, 5.0, False, token)
    assert arrival.arrive(HOST, port, 1, 5.0, False, secret.mixed(token)).add("n", 4) == 4


def test_an_address_with_a_wrong_secret_is_an_error_at_once(knows):
    knows("one")
    served = TCPStore(HOST, 0, is_master=True)
    knows("two")
    with pytest.raises(DistNetworkError, match="secrets differ: PHALANX_SECRET"):
        next(rendezvous.rendezvous(f"tcp://{HOST}:{served.port}", 1, 2))


# --- what is said without one


def warnings_of(caplog, **options) -> list[str]:
    caplog.clear()
    secret._warned = False
    with caplog.at_level(logging.WARNING, "phalanx.store"):
        for _ in range(2):
            TCPStore(**{"port": 0, "is_master": True, "timeout": 5, **options})
    return [record.getMessage() for record in caplog.records]


def test_an_open_store_is_told_of_once_where_others_can_reach_it(caplog, knows):
    address = host_address()
    if is_loopback(address):
        pytest.skip("this machine has no address that others reach")
    (warning,) = warnings_of(caplog, host_name=address)
    assert "no secret" in warning
    assert "set PHALANX_SECRET" in warning
    assert warnings_of(caplog, host_name=HOST) == []
    assert warnings_of(caplog, host_name="localhost") == []
    assert warnings_of(caplog, host_name=address, secret="") == []
    knows("one")
    assert warnings_of(caplog, host_name=address) == []


def test_a_listener_on_all_addresses_is_one_that_others_reach(caplog):
    caplog.set_level(logging.WARNING, "phalanx.store")
    for place, told in ((("", 0), 1), ((HOST, 0), 0)):
        caplog.clear()
        secret._warned = False
        listener = socket.create_server(place)
        port = listener.getsockname()[1]
        TCPStore(HOST, port, is_master=True, master_listen_fd=listener.detach())
        assert len(caplog.records) == told


def test_torchruns_store_is_told_of(caplog, monkeypatch, knows):
    address = host_address()
    if is_loopback(address):
        pytest.skip("this machine has no address that others reach")
    monkeypatch.setattr(over_torch, "own_address", lambda host, port: address)
    caplog.set_level(logging.WARNING, "phalanx.store")
    agent = agent_store()
    knows("one")
    over_torch.meet_over_torch(HOST, agent.port, 0, 5.0)
    assert not caplog.records
    knows("")
    over_torch.meet_over_torch(HOST, agent.port, 0, 5.0)
    (record,) = caplog.records
    assert "torchrun" in record.getMessage()


# --- it is never printed


def test_passwords_in_urls_are_not_printed():
    for url in (
        "redos://me:open-sesame@host/0",
        "redis://me:open-sesame@host/0?rank=1",
        "tcp://me:open-sesame@host",
        "tcp://me:open-sesame@host:12?world_size=two",
    ):
        with pytest.raises(ValueError, match="@host") as caught:
            next(rendezvous.rendezvous(url, rank=0))
        assert "open-sesame" not in str(caught.value)


# Goes through failures, with everything on that prints, and looks at itself from outside.
FAILING = """
import os, subprocess, sys, time, traceback
from contextlib import suppress
from pathlib import Path
import torch
import phalanx as dist
from phalanx.stores import meeting

meeting._REFUSED_SECONDS = 0.1
notes, known = Path(sys.argv[1]), os.environ["PHALANX_SECRET"]
rank = int(os.environ["RANK"])

def show(what, **options):
    try:
        what(**options)
    except Exception:
        traceback.print_exc()
    else:
        print("did not fail:", what)

def wait_for(name):
    while not (notes / name).exists():
        time.sleep(0.01)

if rank == 0:
    (notes / "secret").write_text(known)
    wait_for("alone")
else:
    show(dist.init_process_group, timeout=0.3)
    (notes / "alone").touch()
    os.environ["PHALANX_SECRET"] = "another"
    show(dist.init_process_group, timeout=30)
    os.environ["PHALANX_SECRET"] = known
dist.init_process_group()
call, root = (dist.all_reduce, {}) if rank else (dist.broadcast, {"src": 0})
show(call, tensor=torch.ones(3), **root)
dist.debug.dump_flight_record(str(notes / "record.json"))
if rank == 0:
    for words in (["ps", "--json"], ["why", str(os.getpid())]):
        command = [sys.executable, "-m", "phalanx", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        print(command, done.stdout, done.stderr)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            print(process, process.read_bytes().replace(b"\\0", b" ").decode(errors="replace"))
dist.barrier()
raise RuntimeError(f"the end of rank {rank}")
"""


def test_a_job_that_does_not_meet_is_named_without_its_secret(knows):
    knows("the word of the job")
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1234",
        "PHALANX_JOB": "some-job:0:1234",
        "PHALANX_SECRET": "the word of the job",
    }
    with pytest.raises(StoreTimeout, match="some-job:0:1234") as caught:
        rendezvous.from_environment(environment, {}, 0.05)
    assert "the word of the job" not in str(caught.value)


@pytest.mark.slow
def test_no_failure_prints_the_secret(program, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PHALANX_DEBUG": "DETAIL",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "PHALANX_FLIGHT_RECORDER": str(tmp_path / "records"),
    }
    options = ("-n", 2, "--trace", tmp_path / "trace", "--log-dir", tmp_path / "logs")
    done = launches.run(*options, program(FAILING), notes, env=environment)
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    for fact in (
        "did not show up",
        "secrets differ",
        "CollectiveMismatch",
        "cmdline",
        "the end of",
    ):
        assert fact in printed, printed
    assert "did not fail" not in printed
    word = (notes / "secret").read_text()
    (notes / "secret").unlink()
    assert len(word) == 64
    assert word not in printed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [str(path) for path in files if word.encode() in path.read_bytes()] == []


def test_only_this_user_reads_where_a_job_meets():
    store = meeting.meet(("some", "job"), 0, 2, 30.0)
    directory = meeting.private_directory()
    modes = [oct(path.stat().st_mode & 0o777) for path in (directory, *directory.iterdir())]
    assert modes == ["0o700", "0o600"]
    del store
