"""Finding each other: URLs, launchers' variables, and ranks that do not fit together."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.errors import DistError, DistStoreError, StoreTimeout
from phalanx.stores import HashStore, PrefixStore, Store, TCPStore, slurm
from phalanx.stores import rendezvous as module
from phalanx.stores.attendance import Muster, check_in
from phalanx.stores.meeting import meet, private_directory
from phalanx.stores.rendezvous import (
    from_environment,
    register_rendezvous_handler,
    rendezvous,
)

TIMEOUT = 30.0


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    """A temporary directory of its own, no launcher around, and no place kept afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("PHALANX_SECRET", raising=False)
    for variable in list(os.environ):
        if variable.split("_")[0] in {"OMPI", "PMI", "PMIX", "SLURM", "MPI", "TORCHELASTIC"}:
            monkeypatch.delenv(variable)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    yield
    module._forget()


def all_ranks(size: int, work: Callable[[int], object]) -> list[object]:
    """Run `work(rank)` in one thread per rank; exceptions are results too."""

    def attempt(rank: int) -> object:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(attempt, range(size)))


def free_port() -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    return store.port


def exchange(store: Store, rank: int, size: int) -> list[bytes]:
    store.set(f"from/{rank}", str(rank))
    return store.multi_get([f"from/{other}" for other in range(size)])


# --- URLs


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_schemes(scheme, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/job"

    def work(rank: int) -> object:
        worlds = []
        # Again and again at one place: what one world leaves is not seen by the next.
        for _ in range(4):
            store, my_rank, size = next(rendezvous(url, rank, 3, timeout=TIMEOUT))
            check_in(store, my_rank, size, TIMEOUT)
            assert exchange(store, my_rank, size) == [b"0", b"1", b"2"]
            assert store.timeout.total_seconds() == TIMEOUT
            worlds.append((my_rank, size))
        return worlds

    assert all_ranks(3, work) == [[(rank, 3)] * 4 for rank in range(3)]
    assert not (tmp_path / "job").exists()


def test_worlds_do_not_pile_up():
    url = f"tcp://127.0.0.1:{free_port()}"
    counts = []
    for _ in range(10):
        store, rank, size = next(rendezvous(url, 0, 1))
        check_in(store, rank, size, TIMEOUT)
        counts.append(store.num_keys())
    assert counts[2:] == [counts[2]] * 8


def test_rank_and_size_in_the_query(tmp_path):
    found = rendezvous(f"file://{tmp_path}/job?rank=0&world_size=1")
    assert next(found)[1:] == (0, 1)
    with pytest.raises(RuntimeError, match="again"):
        next(found)


def test_handlers_can_be_registered(monkeypatch):
    monkeypatch.setattr(module, "_handlers", dict(module._handlers))
    store = HashStore()

    def handler(url: str, **kwargs):
        yield store, url, kwargs

    register_rendezvous_handler("here", handler)
    assert next(rendezvous("here://place?colour=red", 1, 2, timeout=3)) == (
        store,
        "here://place?colour=red&rank=1&world_size=2",
        {"timeout": 3},
    )
    with pytest.raises(RuntimeError, match="here://"):
        register_rendezvous_handler("here", handler)


@pytest.mark.parametrize(
    ("url", "rank", "size", "message"),
    [
        (
            "nowhere://x",
            0,
            1,
            r"nowhere.*known: env://, file://, mpi://, redis://, rediss://, tcp://",
        ),
        ("tcp://localhost", 0, 1, "host and port"),
        ("tcp://localhost:1", -1, 1, "rank .* is missing"),
        ("tcp://localhost:1", 0, -1, "world_size .* is missing"),
        ("tcp://localhost:1?rank=0", 0, 1, "rank is given as an argument and in"),
        ("tcp://localhost:1?rank=first&world_size=1", -1, -1, "'first'"),
        ("file://", 0, 1, "must name a file"),
    ],
)
def test_bad_urls(url, rank, size, message):
    with pytest.raises(ValueError, match=message):
        next(rendezvous(url, rank, size))


def test_bad_types():
    with pytest.raises(TypeError, match="url must be str"):
        rendezvous(b"env://")
    with pytest.raises(TypeError, match="rank must be an int"):
        rendezvous("env://", rank="0")


# --- launchers


def launch(launcher: str, rank: int, size: int) -> dict[str, str]:
    """The variables that a launcher sets, on one machine."""
    own = str(rank)
    return {
        "by hand": {"RANK": own, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"},
        "torchrun": {
            "RANK": own,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": f"/tmp/x/none_abc/attempt_0/{rank}/error.json",
        },
        "Open MPI": {
            "OMPI_COMM_WORLD_RANK": own,
            "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
            "PMIX_NAMESPACE": "prterun-host-4711@1",
        },
        "MPICH": {
            "PMI_RANK": own,
            "PMI_SIZE": str(size),
            "MPI_LOCALNRANKS": str(size),
            "MPI_LOCALRANKID": own,
            "SLURM_PROCID": "0",
            "SLURM_STEP_ID": "0",
        },
        "Slurm": {
            "SLURM_PROCID": own,
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": str(size),
            "SLURM_JOB_ID": "17",
            "SLURM_STEP_ID": "0",
            "PMI_RANK": own,
            "PMI_SIZE": str(size),
        },
    }[launcher]


@pytest.mark.parametrize("launcher", ["by hand", "torchrun", "Open MPI", "MPICH", "Slurm"])
def test_launchers(launcher, tmp_path):
    port = str(free_port())

    def work(rank: int) -> object:
        environment = launch(launcher, rank, 3)
        if launcher == "by hand":
            environment["MASTER_PORT"] = port
        for _ in range(2):
            store, my_rank, size = from_environment(environment, {}, TIMEOUT)
            check_in(store, my_rank, size, TIMEOUT)
            assert exchange(store, my_rank, size) == [b"0", b"1", b"2"]
        return my_rank, size

    assert all_ranks(3, work) == [(rank, 3) for rank in range(3)]
    # The ranks met, so nothing is left to be found.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_given_wins_over_the_environment():
    environment = {**launch("Open MPI", 5, 7), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    store, rank, size = from_environment(environment, {"rank": "0", "world_size": "1"}, TIMEOUT)
    assert (rank, size) == (0, 1)
    store.set("a", "1")


def test_env_is_the_default(monkeypatch):
    for variable, value in launch("torchrun", 0, 1).items():
        monkeypatch.setenv(variable, value)
    assert next(rendezvous())[1:] == (0, 1)


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        ({}, ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "torchrun"]),
        ({"RANK": "0"}, ["WORLD_SIZE", "not set", "RANK=0"]),
        ({"WORLD_SIZE": "2"}, ["variable RANK", "WORLD_SIZE=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "host that rank 0 runs on"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": ""},
            ["MASTER_PORT", "empty", "MASTER_ADDR=localhost"],
        ),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK", "'zero'"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ["SLURM_STEP_ID", "batch script", "srun"]),
        (
            {**launch("Slurm", 0, 4), "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            ["4 ranks", "SLURM_STEP_TASKS_PER_NODE=2(x2)", "MASTER_ADDR", "tcp://"],
        ),
    ],
)
def test_what_is_missing_is_named(environment, facts):
    with pytest.raises(ValueError, match="env://") as caught:
        from_environment(environment, {}, TIMEOUT)
    for fact in facts:
        assert fact in str(caught.value)


def slurm_on_several_hosts(rank: int) -> dict[str, str]:
    return {
        **launch("Slurm", rank, 2),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODELIST": "elsewhere[1-9]",
        "SLURM_STEP_NODELIST": "localhost,node[07-12]",
    }


def test_slurm_tells_where_rank_0_is(monkeypatch):
    port = free_port()
    monkeypatch.setattr(module.slurm, "port", lambda environment: port)

    def work(rank: int) -> object:
        store, my_rank, size = from_environment(slurm_on_several_hosts(rank), {}, TIMEOUT)
        assert isinstance(store, PrefixStore)
        assert exchange(store, my_rank, size) == [b"0", b"1"]
        return store.underlying_store

    for store in all_ranks(2, work):
        assert (store.host, store.port) == ("localhost", port)


def test_what_is_told_by_hand_wins_over_slurm():
    port = free_port()
    environment = {**slurm_on_several_hosts(0), "MASTER_ADDR": "127.0.0.1"}
    store, *_ = from_environment({**environment, "MASTER_PORT": str(port)}, {}, TIMEOUT)
    assert (store.underlying_store.host, store.underlying_store.port) == ("127.0.0.1", port)


def test_steps_of_slurm_have_ports_of_their_own():
    steps = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": "3"} for job in ("17", "17_2", "4711", "18")]
    steps += [{"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "4"}]
    ports = [slurm.port(step) for step in steps]
    assert len(set(ports)) == 5
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host0", "host0"),
        ("a,b.example.org", "a b.example.org"),
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[08-10]", "node08 node09 node10"),
        ("gpu[1,3]-ib,login,cpu[2-3]", "gpu1-ib gpu3-ib login cpu2 cpu3"),
        ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert slurm.expand(text) == hosts.split()


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]", "node[3-1]", "node[]"])
def test_bad_lists_of_hosts(text):
    with pytest.raises(ValueError, match="list of hosts"):
        slurm.expand(text)


WORKER = """
from phalanx.stores.attendance import check_in
from phalanx.stores.rendezvous import rendezvous
store, rank, size = next(rendezvous(timeout=60))
check_in(store, rank, size, 60)
store.set(f"from/{rank}", str(rank))
values = store.multi_get([f"from/{other}" for other in range(size)])
store.barrier("end", size)
print(rank, size, values)
"""


def test_processes_of_one_launcher(tmp_path):
    """MPICH gives no name to a job: its ranks are known by the process that started them."""
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **launch("MPICH", rank, 2), "TMPDIR": str(tmp_path)},
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    assert outputs == [f"{rank} 2 [b'0', b'1']\n" for rank in range(2)]


# --- meeting in a directory


def test_the_directory_is_private(tmp_path):
    path = private_directory()
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(DistStoreError, match="drwxr-xr-x"):
        private_directory()
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(DistStoreError, match="remove it"):
        private_directory()


def test_a_stale_file_is_no_trap():
    """It names a port at which nobody listens, or another job does: neither knows its secret."""
    other = TCPStore("127.0.0.1", 0, is_master=True, secret="another job's")
    identity = ("test", "stale")
    abandoned = meet(identity, 0, 2, TIMEOUT)
    (path,) = private_directory().iterdir()
    text = path.read_text().replace(str(abandoned.port), str(other.port))
    del abandoned
    path.write_text(text)

    def work(rank: int) -> object:
        store = meet(identity, rank, 2, TIMEOUT)
        return exchange(store, rank, 2), store

    # Rank 1 first, so that it can find nothing but the stale file.
    results = all_ranks(2, lambda index: work(1 - index))
    assert [values for values, _ in results] == [[b"0", b"1"]] * 2
    assert not path.exists()


def test_rank_0_never_shows_up():
    with pytest.raises(StoreTimeout, match="rank 0 of the job"):
        meet(("test", "alone"), 1, 2, 0.05)


# --- checking in


def disagreement(claims: list[tuple[int, int]]) -> list[str]:
    """What each process is told when it comes with a rank and a world size."""
    store = HashStore()

    def work(index: int) -> None:
        check_in(store, *claims[index], TIMEOUT)

    results = all_ranks(len(claims), work)
    assert all(type(result) is DistError for result in results), results
    return [str(result) for result in results]


def test_all_are_there():
    for size in (1, 2, 5, 16):
        store = HashStore()
        musters = all_ranks(size, lambda rank: check_in(store, rank, size, TIMEOUT))  # noqa: B023
        assert all(isinstance(muster, Muster) for muster in musters)


def test_ranks_disagree_on_the_world_size():
    for message in disagreement([(0, 3), (1, 2), (2, 3)]):
        assert "world size" in message
        assert "rank 1" in message
        assert "says 2" in message
        assert "says 3" in message


def test_two_claim_one_rank():
    for message in disagreement([(0, 3), (1, 3), (1, 3)]):
        assert "two processes claim to be rank 1" in message


def test_a_rank_out_of_range():
    for message in disagreement([(0, 2), (2, 2)]):
        assert "rank 2 of 2" in message
    disagreement([(-1, 1)])
    disagreement([(0, 0)])


def test_one_who_comes_too_late_is_alone_with_it():
    store = HashStore()
    check_in(store, 0, 1, TIMEOUT)
    with pytest.raises(DistError, match="two processes"):
        check_in(store, 0, 1, TIMEOUT)
    with pytest.raises(DistError, match="world size"):
        check_in(store, 1, 2, TIMEOUT)


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(StoreTimeout, match="2 of 3 ranks that did not come: 0, 2"):
        check_in(HashStore(), 1, 3, 0.05)


def test_operations_per_rank_do_not_grow_with_the_world():
    class Counting(PrefixStore):
        operations = 0

        def _join(self, key: str) -> str:
            Counting.operations += 1
            return super()._join(key)

    counts = []
    for size in (2, 32):
        store = Counting("p", HashStore())
        Counting.operations = 0
        all_ranks(size, lambda rank: check_in(store, rank, size, TIMEOUT))  # noqa: B023
        counts.append(Counting.operations / size)
    assert counts[1] <= counts[0]


def test_the_meeting_s_files_are_private_too():
    store = meet(("test", "mode"), 0, 2, TIMEOUT)
    (path,) = Path(private_directory()).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(store.port) in path.read_text()
    path.unlink()
