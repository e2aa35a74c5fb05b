"""Machines that set limits or deny calls: jobs run all the same, or say what they lack."""

import os
import resource
from functools import partial

import pytest
import torch
from denials import deny
from launches import run

import phalanx as dist
from phalanx import spawn

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
