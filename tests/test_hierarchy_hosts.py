"""Groups over hosts whose ranks are processes: told apart by a variable, or on real hosts."""

import os
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
from hosts import needs_hosts

import phalanx as dist
from phalanx.backends.hierarchy import hosts as who_is_where
from phalanx.backends.hierarchy import warden
from phalanx.backends.hierarchy.group import Hierarchy
from phalanx.testing.hosts import Hosts
from phalanx.testing.ranks import run_ranks
from phalanx.world import current


def meet_anew(layout):
    """Make the world again, on the host that a layout, with a letter per rank, names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[who_is_where.VARIABLE] = layout[rank]
    store = dist.PrefixStore("again", current().store)
    dist.destroy_process_group()
    dist.init_process_group(store=store, rank=rank, world_size=size)
    assert isinstance(dist.group.WORLD.backend, Hierarchy)


def compute(layout):
    meet_anew(layout)
    total = torch.full((50_000,), float(dist.get_rank()))
    dist.all_reduce(total)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, layout[dist.get_rank()])
    outer = dist.new_group([0, dist.get_world_size() - 1])
    if dist.get_rank() in (0, dist.get_world_size() - 1):
        dist.barrier(group=outer)
    return total.unique().tolist(), "".join(found)


@pytest.mark.parametrize("layout", ["aab", "abab"])
def test_processes_told_apart_by_a_variable(layout):
    size = len(layout)
    results = run_ranks(compute, size, layout, ranks="processes")
    assert results == [([float(sum(range(size)))], layout)] * size


def be_apart_though_named_alike():
    os.environ[who_is_where.VARIABLE] = ["one", "one", "two"][int(os.environ["RANK"])]
    dist.init_process_group(timeout=10)


@needs_hosts
def test_ranks_that_cannot_map_each_others_memory_are_told_what_to_set():
    with Hosts(2, ranks=[1, 2]) as hosts, pytest.raises(dist.DistBackendError) as caught:
        hosts.launch(be_apart_though_named_alike)
    for fact in ("ranks 0 and 1 seem to share the host", who_is_where.VARIABLE):
        assert fact in str(caught.value)


def everything():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert isinstance(dist.group.WORLD.backend, Hierarchy)
    torch.manual_seed(rank)
    model = dist.DistributedDataParallel(torch.nn.Linear(30, 40))
    model(torch.full((1, 30), float(rank))).sum().backward()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.get_group("all"))
    objects = [None] * size
    dist.all_gather_object(objects, os.uname().nodename)
    across = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.all_reduce(one, group=across)
    return model.module.weight.grad.unique().tolist(), one.item(), objects


@needs_hosts
def test_programs_on_hosts_with_uneven_numbers_of_ranks():
    with Hosts(2, ranks=[2, 1]) as hosts:
        results = hosts.launch(everything, backend="phalanx")
    names = ["host0", "host0", "host1"]
    assert results == [([1.0], 3.0, names), ([1.0], 6.0, names), ([1.0], 6.0, names)]


def everything_of_torch(backend):
    import torch.distributed as theirs

    theirs.init_process_group(backend)
    assert theirs.group.WORLD.name() == "phalanx"
    rank = theirs.get_rank()
    total = torch.full((3,), float(rank))
    theirs.all_reduce(total)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    last = theirs.new_group([1, 2])
    if rank:
        theirs.all_reduce(total, group=last)
    store = theirs.distributed_c10d._get_default_store()
    theirs.barrier()
    theirs.destroy_process_group()
    store.add("left", 1)
    while store.add("left", 0) < 3:
        time.sleep(0.01)
    keys = [key for key in store.list_keys() if "log" in key or "beat" in key or "doing" in key]
    store.add("looked", 1)
    while rank == 0 and store.add("looked", 0) < 3:  # the store ends with it
        time.sleep(0.01)
    return total.tolist(), model.module.weight.grad.unique().tolist(), keys


@needs_hosts
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_programs_of_torch(backend):
    env = {"PHALANX_REPLACE": "gloo"} if backend == "gloo" else {}
    with Hosts(2, ranks=[2, 1]) as hosts:
        results = hosts.launch(everything_of_torch, backend, env=env)
    assert results[0] == ([3.0] * 3, [1.0], [])
    assert results[1:] == [([6.0] * 3, [1.0], [])] * 2


def train():
    model = dist.DistributedDataParallel(torch.nn.Linear(300, 100))
    for step in range(1_000_000):
        model(torch.ones(1, 300)).sum().backward()
        if step == 2:
            print("going", flush=True)


def begin(hosts):
    job = hosts.start(train, backend="phalanx")
    while not all("going" in program.stdout for program in job.programs):
        assert all(program.returncode is None for program in job.programs)
        time.sleep(0.01)
    return job


def errors_of(job, ranks):
    """Return what these ranks raise, once all have ended, quietly."""
    outcomes = job.wait(40, return_exceptions=True)
    assert all(job.programs[rank].stderr == "" for rank in ranks)
    return [outcomes[rank] for rank in ranks]


@needs_hosts
def test_a_rank_that_is_killed_is_named_on_all_hosts():
    with Hosts(2, ranks=2) as hosts:
        job = begin(hosts)
        job.programs[3].kill()
        for error in errors_of(job, [0, 1, 2]):
            assert isinstance(error, dist.PeerFailed)
            assert "rank 3 (pid" in str(error)
            assert "on host host1) was killed by SIGKILL" in str(error)


@needs_hosts
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_host_that_is_gone_is_named_on_the_others(how, number, monkeypatch):
    monkeypatch.setenv(warden.VARIABLE, "4")  # neither says goodbye, as a frozen one does not
    there = [[0], [1, 2]]
    with Hosts(2, ranks=[1, 2]) as hosts:
        job = begin(hosts)
        getattr(hosts[number], how)()
        others = there[1 - number]
        errors = errors_of(job, [*others, *there[number]] if how == "cut" else others)
        for error in errors:
            assert isinstance(error, dist.PeerFailed)
            assert "in train: " in str(error)
        for error in errors[: len(others)]:
            assert f"host{number}" in str(error)
            assert f"{warden.VARIABLE} (4 s)" in str(error)


@needs_hosts
def test_a_host_whose_only_rank_is_killed_is_named_at_once():
    with Hosts(3, ranks=[1, 2, 1]) as hosts:
        job = begin(hosts)
        job.programs[3].kill()  # its connections are closed, so nobody waits for it to thaw
        for error in errors_of(job, [0, 1, 2]):
            assert isinstance(error, dist.PeerFailed)
            assert "rank 3" in str(error)
            assert "host2" in str(error)
            assert warden.VARIABLE not in str(error)


def freeze(layout, seconds):
    """Stop the last rank, for so long or until that is noticed, and go on."""
    meet_anew(layout)
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    total = torch.full((7,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    thaw = partial(os.kill, pids[-1], signal.SIGCONT)
    if dist.get_rank() == 0:
        os.kill(pids[-1], signal.SIGSTOP)
        threading.Timer(seconds, thaw).start()
    try:
        for _ in range(3):  # its part of the first may have been on its way
            dist.all_reduce(total)
    finally:
        thaw()
    return total.tolist()


def test_a_host_may_freeze_for_a_while():
    assert run_ranks(freeze, 3, "aab", 4.5, ranks="processes") == [[162.0] * 7] * 3


def test_a_host_that_is_frozen_for_too_long_is_told_with_the_limit(monkeypatch):
    monkeypatch.setenv(warden.VARIABLE, "2")
    found = run_ranks(freeze, 3, "aab", 40, ranks="processes", return_exceptions=True)
    for error in found[:2]:
        assert isinstance(error, dist.PeerFailed)
        assert "has given no sign of life for" in str(error)
        assert f"{warden.VARIABLE} (2 s)" in str(error)


@pytest.mark.parametrize("text", ["1", "soon", "nan", "-3"])
def test_a_limit_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(warden.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{warden.VARIABLE} is a number of seconds, 2 or more"):
        warden.longest_silence()


LEAVES = """
import os, sys, time, torch, phalanx as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1))
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
if os.environ["RANK"] != sys.argv[2]:
    time.sleep(1.5)
"""


@needs_hosts
@pytest.mark.parametrize("first", ["0", "1"])
@pytest.mark.parametrize("ending", ["destroy", "exit"])
def test_the_end_of_a_program_is_quick_and_quiet(tmp_path, ending, first):
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES)
    with Hosts(2, ranks=1, shared=[tmp_path]) as hosts:
        job = hosts.start([sys.executable, program, ending, first])
        assert job.wait(60) == ["", ""]
        assert all(each.stderr == "" for each in job.programs)


def keep_the_others_waiting():
    dist.barrier()
    if dist.get_rank() == 2:
        print("going", flush=True)
        time.sleep(600)
    dist.all_reduce(torch.ones(4))


@needs_hosts
def test_a_look_from_outside_tells_who_is_on_another_host():
    command = [sys.executable, "-m", "phalanx"]
    with Hosts(2, ranks=[2, 1]) as hosts:
        job = hosts.start(keep_the_others_waiting, backend="phalanx")
        while "going" not in job.programs[2].stdout:
            assert job.programs[2].returncode is None, job.programs[2].told()
            time.sleep(0.01)
        while "waiting for rank 2" not in hosts[0].run([*command, "ps"]).stdout:
            time.sleep(0.1)
        here = " ".join(hosts[0].run([*command, "why"]).stdout.split())
        there = " ".join(hosts[1].run([*command, "why"]).stdout.split())
        table = hosts[0].run([*command, "top", "--once"]).stdout
        job.close()
    assert "Rank 0 waits since" in here
    assert "in all_reduce(float32[4], SUM) #2 on group 'world' at test_hierarchy_hosts.py" in here
    assert "on host host1) is on another host: ask `phalanx why` there." in here
    assert "Rank 0 (pid" in there
    assert "on host host0) is on another host" in there
    assert "its last call, on group 'world': barrier() #1 at test_hierarchy_hosts.py" in there
    assert "2 waiting, 1 elsewhere" in table


def raise_as_the_keeper_of_the_store():
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("enough of it")
    dist.all_reduce(torch.ones(4))


@needs_hosts
def test_why_rank_0_failed_is_known_on_the_other_hosts():
    with Hosts(2, ranks=[1, 2]) as hosts:
        errors = hosts.launch(
            raise_as_the_keeper_of_the_store, backend="phalanx", return_exceptions=True
        )
    for error in errors[1:]:
        assert isinstance(error, dist.PeerFailed)
        assert "on host host0) raised an exception" in str(error)
        assert "enough of it" in str(error)


def send_to_who_is_stopped():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(1000):
        dist.send(torch.ones(10_000), 1)


@needs_hosts
def test_many_messages_to_a_rank_that_takes_none_end():
    with Hosts(2, ranks=1) as hosts:
        job = hosts.start(send_to_who_is_stopped, backend="phalanx", group_timeout=8)
        job.programs[0].wait(60)
        error = job.wait(1, return_exceptions=True)[0]
    assert isinstance(error, dist.PeerFailed | dist.DistTimeout)
    assert "send(float32[10000], tag=0) to rank 1" in str(error)
