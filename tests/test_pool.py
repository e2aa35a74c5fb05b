"""Warm processes: the same as new ones, reused only when they are clean, and never left behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as dist
from phalanx.errors import DistError, DistTimeout
from phalanx.launch import pool as pools
from phalanx.launch.pool import Pool
from phalanx.launch.processes import run_processes
from phalanx.process import Stat


@pytest.fixture(scope="module")
def pool() -> Any:
    with Pool() as pool:
        yield pool


def pid() -> int:
    return os.getpid()


def gathered(offset: int) -> list[int]:
    tensor = torch.tensor([dist.get_rank() + offset])
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return [int(each) for each in tensors]


def test_results_are_by_rank_and_processes_are_reused(pool: Pool) -> None:
    assert pool.run(gathered, 3, 10) == [[10, 11, 12]] * 3
    before = pool.pids()
    assert sorted(pool.run(pid, 3)) == sorted(before)
    assert set(pool.run(pid, 1)) < set(before)
    assert sorted(pool.pids()) == sorted(before)


def test_only_what_is_missing_is_started(pool: Pool) -> None:
    two = set(pool.run(pid, 2))
    assert two < set(pool.run(pid, 4))


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("lost")
    dist.barrier()


def test_the_first_real_error_is_raised_and_its_process_is_used_again(pool: Pool) -> None:
    with pytest.raises(KeyError) as raised:
        pool.run(fail_on, 2, 1)
    assert "raised by rank 1 of 2" in str(raised.value.__notes__)
    before = pool.pids()
    assert pool.run(gathered, 2, 0) == [[0, 1]] * 2
    assert sorted(pool.pids()) == sorted(before)


def test_failures_are_returned_on_request(pool: Pool) -> None:
    failed = pool.run(fail_on, 2, 0, return_exceptions=True)
    assert isinstance(failed[0], KeyError)
    assert isinstance(failed[1], dist.PeerFailed)


def die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(("how", "said"), [("kill", "killed by SIGKILL"), ("exit", "code 3")])
def test_a_death_is_named_and_the_process_replaced(pool: Pool, how: str, said: str) -> None:
    victim = pool.run(pid, 2)[1]
    with pytest.raises(DistError, match=f"rank 1 .*{said}"):
        pool.run(die, 2, how)
    assert victim not in pool.run(pid, 2)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def test_a_process_that_overruns_the_deadline_is_shown_and_replaced(pool: Pool) -> None:
    victim = pool.run(pid, 2)[1]
    with pytest.raises(DistTimeout, match=r"rank 1 of 2 did not return(.|\n)*sleep_on"):
        pool.run(sleep_on, 2, 1, deadline=3)
    assert victim not in pool.run(pid, 2)


def test_a_process_that_died_while_it_was_idle_is_replaced(pool: Pool) -> None:
    victim = pool.run(pid, 1)[0]
    os.kill(victim, signal.SIGKILL)
    assert victim not in pool.run(pid, 2)
    assert pool.run(gathered, 2, 0) == [[0, 1]] * 2


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not Stat(f"/proc/{pid}").stopped:
        time.sleep(0.01)


def test_a_process_that_was_stopped_while_it_was_idle_is_replaced(pool: Pool) -> None:
    victim = pool.run(pid, 1)[0]
    stop(victim)
    assert victim not in pool.run(pid, 2)
    assert not is_running(victim)


def test_a_process_that_was_stopped_before_it_began_overruns_the_deadline(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = pool.run(pid, 1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(pools._Warm, "is_ready", lambda self: True)  # as it was a moment ago
        stop(victim)
        with pytest.raises(DistTimeout, match=r"rank 0 of 1 did not return(.|\n)*it is stopped"):
            pool.run(pid, 1, deadline=0.5)
    assert victim not in pool.run(pid, 2)


def change_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_flush_denormal(True)
    np.seterr(all="raise")
    dist.set_debug_level(dist.DebugLevel.INFO)
    os.environ["LEFT_BEHIND"] = "yes"
    os.chdir("/proc")
    os.umask(0)
    sys.path.append("/left/behind")
    sys.argv.append("left")
    sys.stdout = None  # type: ignore[assignment]
    sys.setrecursionlimit(5000)
    gc.disable()
    socket.setdefaulttimeout(3)
    threading.setprofile(print)
    threading.stack_size(1 << 20)
    torch.set_printoptions(precision=1)
    torch.backends.mkldnn.enabled = False
    logging.basicConfig(level=logging.ERROR, force=True, handlers=[logging.NullHandler()])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(1000)
    multiprocessing.set_start_method("spawn", force=True)


def _named(handler: Any) -> str:
    return str(getattr(handler, "__name__", handler))


def settings() -> dict[str, Any]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "denormal": float(torch.tensor(1e-310, dtype=torch.float64) * 2),
        "numpy": np.geterr(),
        "debug": str(dist.get_debug_level()),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "path": sys.path[:],
        "arguments": sys.argv[:],
        "stdout": sys.stdout is None,
        "recursion": sys.getrecursionlimit(),
        "gc": gc.isenabled(),
        "sockets": socket.getdefaulttimeout(),
        "of threads": (threading.getprofile(), threading.stack_size()),
        "printing": torch._tensor_str.PRINT_OPTS.precision,
        "mkldnn": torch.backends.mkldnn.enabled,
        "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
        "warnings": [str(each) for each in warnings.filters],
        "signals": {int(each): _named(signal.getsignal(each)) for each in signal.valid_signals()},
        "alarm": signal.alarm(0),
        "start": multiprocessing.get_start_method(),
        "group": dist.get_rank(),
        "threads alive": sorted(type(each).__name__ for each in threading.enumerate()),
    }


def test_a_process_is_given_back_as_it_was(pool: Pool) -> None:
    first = pool.run(settings, 2)
    before = pool.pids()
    pool.run(change_settings, 2)
    assert sorted(pool.pids()) == sorted(before)
    assert pool.run(settings, 2) == first
    assert first == run_processes(settings, 2)


def test_a_run_finds_where_its_launcher_stands_now(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(pid, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    [found] = pool.run(settings, 1)
    assert found["directory"] == str(tmp_path)
    assert found["path"] == sys.path
    assert found["debug"] == "DebugLevel.INFO"
    assert found["threads"] == 3
    assert found["environment"]["WORLD_SIZE"] == "1"


def draws() -> tuple[list[float], float, float]:
    return torch.rand(4).tolist(), np.random.rand(), random.random()


def seeded_draws() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(dist.get_rank())
    draws()


def test_a_warm_process_draws_what_a_new_one_draws(pool: Pool) -> None:
    before = pool.run(draws, 2)
    pool.run(seeded_draws, 2)
    drawn = [*before, *pool.run(draws, 2), *run_processes(draws, 2)]
    from_torch, from_numpy, from_python = zip(*drawn, strict=True)
    assert all(each == from_torch[0] for each in from_torch)
    assert len(set(from_numpy)) == len(set(from_python)) == len(drawn)  # seeded by the system


def test_what_an_import_draws_is_drawn_in_every_run(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seeding.py").write_text(
        "import torch\ntorch.manual_seed(5)\ndef draw():\n    return torch.rand(1).item()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import seeding

    torch.manual_seed(5)
    expected = torch.rand(1).item()
    assert pool.run(seeding.draw, 2) == [expected] * 2
    assert pool.run(seeding.draw, 2) == [expected] * 2


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


def leave_child() -> None:
    subprocess.Popen(["sleep", "600"])


def leave_torch_group() -> None:
    import torch.distributed

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def leave_mode() -> None:
    torch.overrides.BaseTorchFunctionMode().__enter__()


def leave_inference_mode() -> None:
    global mode
    mode = torch.inference_mode()
    mode.__enter__()


def leave_descriptor() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.mark.parametrize(
    "leave",
    [
        *(leave_thread, leave_child, leave_torch_group),
        *(leave_mode, leave_inference_mode, leave_descriptor),
    ],
)
def test_a_process_that_is_not_clean_is_replaced(pool: Pool, leave: Any) -> None:
    victim = pool.run(pid, 1)[0]
    pool.run(leave, 1)
    assert victim not in pool.pids()
    assert pool.run(pid, 1) != [victim]


def end_thread_soon() -> None:
    threading.Timer(0.01, lambda: None).start()


def test_a_thread_that_ends_does_no_harm(pool: Pool) -> None:
    victim = pool.run(pid, 1)
    pool.run(end_thread_soon, 1)
    assert pool.run(pid, 1) == victim


def leave_group() -> None:
    dist.new_group([0])
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group(store=store, rank=0, world_size=1)


def test_a_group_that_is_left_is_not_found_by_the_next_run(pool: Pool) -> None:
    pool.run(leave_group, 1)
    assert pool.run(gathered, 2, 0) == [[0, 1]] * 2


def converse() -> list[Any]:
    return [pools.say(("question", dist.get_rank(), i)) for i in range(3)]


def test_ranks_talk_with_their_launcher(pool: Pool) -> None:
    def hear(rank: int, said: Any) -> Any:
        return (rank, said)

    task = pools.pack_task(converse, ())
    with pool.ranks(2, task, pools.Group("phalanx", None), hear) as ranks:
        ranks.see_through(60, False)
    assert ranks.failures == []
    assert ranks.results == [[(r, ("question", r, i)) for i in range(3)] for r in range(2)]


def test_nobody_hears_what_others_say() -> None:
    with pytest.raises(RuntimeError, match="no process of a pool"):
        pools.say("hello")


def as_decorated(serve: Any) -> None:
    torch.set_default_dtype(torch.float64)
    serve()


def refuse(serve: Any) -> None:
    raise OSError("not today")


def test_processes_can_be_prepared() -> None:
    with Pool(as_decorated) as pool:
        assert [each["dtype"] for each in pool.run(settings, 2)] == [torch.float64] * 2


def test_what_keeps_processes_from_serving_is_raised() -> None:
    with Pool(refuse) as pool:
        with pytest.raises(OSError, match="not today"):
            pool.run(pid, 2)
        with pytest.raises(OSError, match="not today"):
            pool.run(pid, 2)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_processes(pid, 1)  # what the first run sets up may stay
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()  # what others have left goes before it is counted
    files, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    with Pool() as pool:
        pids = pool.run(pid, 2)
        pool.run(leave_thread, 2)
        pids += pool.run(pid, 2)
        with pytest.raises(DistTimeout):
            pool.run(sleep_on, 2, 1, deadline=0.5)
    pool.close()
    for thread in {*threading.enumerate()} - threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left"
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not any(map(is_running, pids))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(pid, 1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


OWNER = """
import os, shutil, sys, time
from phalanx.launch.pool import Pool

def pid():
    return os.getpid()

def stay():
    os.write(1, b"%d\\n" % os.getpid())  # at once: two lines must not mix
    time.sleep(600)

def slowly(serve):
    remove = shutil.rmtree
    shutil.rmtree = lambda *args, **kwargs: (time.sleep(0.5), remove(*args, **kwargs))
    serve()

if __name__ == "__main__":
    pool = Pool(slowly if sys.argv[1] == "slow" else None)
    print(*pool.run(pid, 2), flush=True)
    if sys.argv[1] == "running":
        pool.run(stay, 2)
    if sys.argv[1] != "exit":
        time.sleep(600)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for that of a socket in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("how", ["exit", "idle", "slow", "running"])
def test_processes_end_with_their_owner(tmp_path: Path, how: str, short_path: Path) -> None:
    """It exits without closing the pool, or it is killed while the pool is idle or runs.

    Then its processes tidy up, also if that is slow beside all else that they do.
    """
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    files = short_path
    memory = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen(
        [sys.executable, script, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(files)},
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(each) for each in owner.stdout.readline().split()]
        if how == "running":
            assert sorted(int(owner.stdout.readline()) for _ in range(2)) == sorted(pids)
        if how != "exit":
            owner.kill()
        owner.wait()
    limit = time.monotonic() + 30
    while time.monotonic() < limit and (any(map(is_running, pids)) or any(files.glob("phalanx*"))):
        time.sleep(0.01)
    assert not any(map(is_running, pids))
    assert list(files.glob("phalanx*")) == []
    ours = {each for each in set(os.listdir("/dev/shm")) - memory if str(owner.pid) in each}
    assert ours == set()


def test_a_directory_that_cannot_be_entered_is_named(monkeypatch):
    with Pool() as pool:
        pool.run(pid, 2)
        monkeypatch.setattr(os, "getcwd", lambda: "/nowhere")
        with pytest.raises(DistError, match="cannot enter the working directory '/nowhere'"):
            pool.run(dist.barrier, 2, deadline=60)


def test_a_directory_that_was_removed_is_told_of(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with Pool() as pool, pytest.raises(DistError, match="working directory no longer exists"):
        pool.run(dist.barrier, 1)
