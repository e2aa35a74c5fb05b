"""Machines that set limits or deny calls: jobs run all the same, or say what they lack."""

import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from denials import deny
from launches import run

import phalanx as dist
from phalanx import spawn
from phalanx.stores import attendance

AFFINITY = "import os; print(sorted(os.sched_getaffinity(0)))"


def test_ranks_run_unpinned_where_cores_cannot_be_chosen(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(AFFINITY)
    found = run("-n", 2, "--pin", "cores", script, preexec_fn=partial(deny, "sched_setaffinity"))
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("not pinned") == 1
    assert "sched_setaffinity" in found.stderr
    assert "Operation not permitted" in found.stderr
    everywhere = str(sorted(os.sched_getaffinity(0)))
    assert [line.endswith(everywhere) for line in found.stdout.splitlines()] == [True, True]


def test_ranks_run_on_cores_of_their_own(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    script = tmp_path / "show.py"
    script.write_text(AFFINITY)
    found = run("-n", 2, "--pin", "cores", script)
    places = {line.split(maxsplit=1)[1] for line in found.stdout.splitlines()}
    assert len(places) == 2, found.stdout
    assert "not pinned" not in found.stderr


def limited(rank, megabytes):
    """Be a rank that may use so many MiB of addresses more than it does already."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20),) * 2)
    dist.init_process_group(timeout=20)
    size = dist.get_world_size()
    mine = torch.arange(1000.0) * (rank + 1)
    dist.all_reduce(mine)
    bucket = dist.empty_shared(1 << 20)
    bucket.fill_(rank + 2.0)
    dist.all_reduce(bucket)
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(bucket, group=pair)
    dist.barrier()
    return mine[-1].item() / 999, bucket[-1].item(), size


def test_ranks_share_what_a_limit_on_addresses_allows():
    assert spawn(limited, (2000,), nprocs=3) == [(6, 18, 3), (6, 9, 3), (6, 18, 3)]


def test_a_limit_on_addresses_that_does_not_suffice_is_named():
    with pytest.raises(MemoryError) as caught:
        spawn(limited, (300,), nprocs=3)
    text = str(caught.value)
    assert "for 3 ranks: at least 512 MiB of addresses must be free" in text
    assert "RLIMIT_AS" in text
    assert "ulimit -v" in text


def join(rank, victim, moment, folder):
    """Be a rank of a world of which one is killed on its way; write down what this is told."""
    wait = attendance.Muster.wait

    def wait_or_die(self, store, key, timeout):
        if (rank, key) == (victim, moment):
            os.kill(os.getpid(), signal.SIGKILL)
        wait(self, store, key, timeout)

    attendance.Muster.wait = wait_or_die
    try:
        dist.init_process_group(
            init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=60
        )
    except dist.PeerFailed as error:
        Path(folder, str(rank)).write_text(str(error))


@pytest.mark.parametrize(
    ("victim", "moment"), [(2, "verdict"), (1, "hosts"), (2, "roster"), (0, "hosts")]
)
def test_who_is_killed_on_its_way_into_a_world_is_named(victim, moment, tmp_path):
    with pytest.raises(dist.DistError, match=f"rank {victim} was killed by SIGKILL"):
        spawn(join, (victim, moment, str(tmp_path)), nprocs=3)
    for rank in {0, 1, 2} - {victim}:
        told = (tmp_path / str(rank)).read_text()
        assert f"init_process_group on rank {rank}: rank {victim} (pid " in told
        assert "before all ranks had joined" in told


SERVERS = """
import os, resource, signal, sys, time
from multiprocessing import forkserver

import phalanx as dist
from phalanx.launch import processes
from phalanx.process import Stat


def wait(rank, seconds):
    time.sleep(seconds)


def kill_the_server():
    task = processes.pack_task(wait, (1000,))
    with processes.Processes(2, task, dict(os.environ)) as ranks:
        pids = [rank.pid for rank in ranks.ranks]
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        ranks.see_through(60, True)
    assert not any(Stat(f"/proc/{pid}").alive for pid in pids)
    raise ranks.failures[0].error


def run_out_of_files(number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, 4096))
    dist.spawn(wait, (0,), nprocs=12)


if __name__ == "__main__":
    try:
        run_out_of_files(int(sys.argv[1])) if sys.argv[1:] else kill_the_server()
    except (dist.DistError, OSError) as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], ["cannot be known: the process from which ranks are forked (pid "]),
        pytest.param(
            [20],
            ["cannot start 12 ranks: Too many open files", "ulimit -n", "may open 20 files"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [14],  # enough here, and not for the process from which ranks are forked
            ["cannot start rank0: the process from which ranks are forked", "ulimit -n: 14"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_why_ranks_cannot_be_started_or_looked_after_is_told(arguments, facts, tmp_path):
    script = tmp_path / "servers.py"
    script.write_text(SERVERS)
    words = [sys.executable, str(script), *map(str, arguments)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=110)
    for fact in facts:
        assert fact in found.stdout, found.stderr


NO_FORK = """
import errno, os
fork = os.fork
def refuse():
    if refuse.calls:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    refuse.calls += 1
    return fork()
refuse.calls = 0
os.fork = refuse
"""


def test_a_rank_that_cannot_be_forked_is_told(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = run("-n", 2, "--", "sleep", "1000", env=environment)
    assert found.returncode == 1
    assert "cannot fork rank 1: Resource temporarily unavailable" in found.stderr
    assert "ulimit -u" in found.stderr


def test_a_system_without_memfd_is_told():
    deny_then = "from denials import deny; deny('memfd_create'); import phalanx as dist; "
    source = deny_then + "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)"
    words = [sys.executable, "-c", source]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert "memfd_create: Operation not permitted" in found.stderr
    assert "seccomp" in found.stderr


def test_a_system_without_pidfd_runs_jobs():
    assert spawn(without_pidfd, nprocs=2) == [3.0, 3.0]


def without_pidfd(rank):
    deny("pidfd_open")
    dist.init_process_group(timeout=30)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total.item()
