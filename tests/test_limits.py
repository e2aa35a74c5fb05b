"""Machines that set limits or deny calls: jobs run all the same, or say what they lack."""

import os
import resource
import signal
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
