"""Ranks that fork: child and parent both go on, whatever the rank's threads were doing."""

import atexit
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as torch_dist
from torch.utils.data import DataLoader, Dataset
from torch_ranks import run_torch

import phalanx as dist
from phalanx.backends.hierarchy import hosts
from phalanx.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LIMIT = 40  # seconds that a child may take
LARGE = 1 << 20  # elements: more than a pipe between two ranks holds


def live_in_child(api, group, work=None):
    """Do in a child what programs do there, and end it as a program ends."""
    faulthandler.dump_traceback_later(LIMIT - 5, exit=True)
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4) - 5
    assert (a @ b).tolist() == [[5, 8, 11, 14], [-4, 8, 20, 32]]
    logging.getLogger("phalanx").debug("in a child")
    with pytest.raises(torch_dist.DistBackendError, match="forked"):
        api.all_reduce(torch.arange(3.0), group=group)
    with pytest.raises(torch_dist.DistBackendError, match="forked"):
        api.isend(torch.arange(3.0), 0, group=group)
    if work is not None and not work.is_completed():
        with pytest.raises(torch_dist.DistBackendError, match="forked"):
            work.wait()
    if api is torch_dist:  # which does not know of the fork
        torch_dist.destroy_process_group()
    assert not dist.is_initialized()
    # A world of the child's own, with a lane, a courier and a store.
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    tensor = torch.arange(3.0) + 2
    dist.all_reduce(tensor, async_op=True).wait()
    sent, received = dist.isend(tensor, 0), torch.zeros(3)
    dist.recv(received, 0)
    sent.wait()
    assert received.tolist() == [2, 3, 4]
    dist.destroy_process_group()
    del sent, work, group
    gc.collect()


def end_child():
    atexit._run_exitfuncs()
    gc.collect()
    os._exit(0)


def in_child(live, *args):
    try:
        live(*args)
        end_child()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def await_child(child):
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the child has not ended within {LIMIT} s")


# How a rank forks


def forked(live, *args):
    child = os.fork()
    if child == 0:
        in_child(live, *args)
    await_child(child)


def forked_by_multiprocessing(live, *args):
    child = multiprocessing.get_context("fork").Process(target=live, args=args)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0, f"the child's exit code is {child.exitcode}"


def forked_by_subprocess(live, *args):
    # With a function to call in the child there is a fork, and Python's handlers run.
    for before in (None, gc.collect):
        command = ["/bin/sh", "-c", "echo here"]
        done = subprocess.run(
            command, preexec_fn=before, capture_output=True, timeout=LIMIT, check=True
        )
        assert done.stdout == b"here\n"


def forked_in_a_thread(live, *args):
    errors = []

    def fork():
        try:
            forked(live, *args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def forked_in_a_handler(live, *args):
    before = signal.signal(signal.SIGUSR2, lambda *_: forked(live, *args))
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((3,), float(index))


def forked_by_a_loader(live, api, group, *args):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
    parallel = torch.nn.parallel if api is torch_dist else dist
    wrapped = parallel.DistributedDataParallel(model, process_group=group)
    loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="fork", timeout=LIMIT)
    for _ in range(2):  # the second epoch forks anew, in the middle of training
        for batch in loader:
            model.zero_grad()
            wrapped(batch).sum().backward()
            assert torch.equal(model.weight.grad, batch.sum(0).expand(2, 3))


WAYS = [
    forked,
    forked_by_multiprocessing,
    forked_by_subprocess,
    forked_in_a_thread,
    forked_in_a_handler,
    forked_by_a_loader,
]


# What the rank has done before


def sync(api, group, rank, fork):
    api.all_reduce(torch.arange(4.0), group=group)
    fork(api, group)


def asynchronous(api, group, rank, fork):
    for count in (4, LARGE):  # the second wakes the lane's own thread
        work = api.all_reduce(torch.arange(float(count)), group=group, async_op=True)
        work.wait()
        del work
    fork(api, group)


def sent(api, group, rank, fork):
    work = api.isend(torch.arange(4.0) + rank, 1 - rank, group=group)
    received = torch.zeros(4)
    api.recv(received, 1 - rank, group=group)
    work.wait()
    del work
    fork(api, group)
    assert received.tolist() == [1 - rank, 2 - rank, 3 - rank, 4 - rank]


def sending_much(api, group, rank, fork):
    """Fork while a message is under way that nobody has asked for."""
    work = api.isend(torch.arange(float(LARGE)) + rank, 1 - rank, group=group)
    fork(api, group, work)
    received = torch.zeros(LARGE)
    api.recv(received, 1 - rank, group=group)
    work.wait()
    assert torch.equal(received, torch.arange(float(LARGE)) + 1 - rank)


def reducing_much(api, group, rank, fork):
    """Fork while rank 0 waits, on its lane's thread, for rank 1."""
    tensor = torch.arange(float(LARGE)) * (rank + 1)
    work = api.all_reduce(tensor, group=group, async_op=True) if rank == 0 else None
    fork(api, group, work)
    if work is None:
        work = api.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert torch.equal(tensor, torch.arange(float(LARGE)) * 3)


STATES = [sync, asynchronous, sent, sending_much, reducing_much]


def run_cells(cells, api, group):
    torch.set_num_threads(1)
    rank = group.rank()
    for step, (state, way) in enumerate(cells):
        try:
            state(api, group, rank, partial(way, live_in_child))
        except BaseException as error:
            raise AssertionError(f"{state.__name__} x {way.__name__} on rank {rank}") from error
        tensor = torch.arange(5.0) * (rank + 1) + step
        api.all_reduce(tensor, group=group)
        assert tensor.tolist() == [3 * i + 2 * step for i in range(5)]
    return len(cells)


def in_world(cells):
    return run_cells(cells, dist, dist.group.WORLD)


def in_threads(cells, timeout=60):
    return run_ranks(in_world, 2, cells, timeout=timeout)


def in_torch(cells):
    return run_cells(cells, torch_dist, torch_dist.group.WORLD)


def over_hosts(cells, store):
    """Make a world of ranks that take each other for ranks on other hosts, with Gloo between."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ[hosts.VARIABLE] = f"host-{rank}"
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2, timeout=LIMIT)
    assert dist.group.WORLD.backend.in_rank_order is False  # else it is not over hosts
    return in_world(cells)


# Training has collectives of its own, which cannot come between another one's two ranks.
ALL = [
    cell for cell in itertools.product(STATES, WAYS) if cell != (reducing_much, forked_by_a_loader)
]
# Handlers run in the main thread, which is no rank.
IN_THREADS = [cell for cell in ALL if cell[1] is not forked_in_a_handler]


def test_ranks_fork():
    ways = [forked_by_subprocess, forked_by_a_loader]
    cells = [*((state, forked) for state in STATES), *((asynchronous, way) for way in ways)]
    assert run_ranks(in_world, 2, cells, ranks="processes") == [len(cells)] * 2


def test_ranks_over_hosts_fork(tmp_path):
    cells = [(state, forked) for state in STATES]
    store = str(tmp_path / "store")
    assert run_ranks(over_hosts, 2, cells, store, ranks="processes") == [len(cells)] * 2


def test_ranks_of_torch_fork():
    cells = [(asynchronous, forked), (sending_much, forked), (reducing_much, forked)]
    assert run_torch(in_torch, 2, cells) == [len(cells)] * 2


def test_ranks_that_are_threads_fork():
    cells = [(asynchronous, forked), (sending_much, forked), (sync, forked_by_multiprocessing)]
    # In a process of their own: the children collect garbage, and are to find none of other tests.
    assert run_ranks(in_threads, 1, cells, ranks="processes") == [[len(cells)] * 2]


def forks_while_it_waits(ends_there, store=""):
    """Have a signal handler fork in the middle of a barrier for which rank 1 comes late."""
    if store:
        over_hosts([], store)
    group, rank = dist.group.WORLD, dist.get_rank()
    children = []

    def fork(*_):
        child = os.fork()
        if child == 0 and ends_there:
            in_child(live_in_child, dist, group)
        children.append(child)

    signal.signal(signal.SIGUSR2, fork)
    for step in range(2):
        if rank == 1:
            dist.recv(torch.zeros(1), 0)  # until the other one's child has ended
        else:
            me = os.getpid()
            waiter = threading.Thread(target=interrupt_and_tell, args=(group, me, children, step))
            waiter.start()
        try:
            dist.barrier()
        except dist.DistBackendError:
            if children and children[-1] == 0:
                in_child(live_in_child, dist, group)
            raise
        if rank == 0:
            waiter.join()
    tensor = torch.arange(3.0) * (rank + 1)
    dist.all_reduce(tensor)
    return tensor.tolist()


def interrupt_and_tell(group, rank, children, step):
    """Signal the thread that waits in a barrier, and let rank 1 come once the child has ended."""
    while "barrier" not in group.backend.describe(0):
        time.sleep(0.01)
    time.sleep(0.1)  # for the wait to have begun
    os.kill(os.getpid(), signal.SIGUSR2)
    while len(children) <= step:
        time.sleep(0.01)
    await_child(children[step])
    dist.send(torch.zeros(1), 1, group=group)


@pytest.mark.parametrize("ends_there", [True, False])
def test_a_handler_forks_in_the_middle_of_a_barrier(ends_there):
    results = run_ranks(forks_while_it_waits, 2, ends_there, ranks="processes")
    assert results == [[0, 3, 6]] * 2


def test_a_handler_forks_in_the_middle_of_a_barrier_over_hosts(tmp_path):
    store = str(tmp_path / "store")
    results = run_ranks(forks_while_it_waits, 2, False, store, ranks="processes")
    assert results == [[0, 3, 6]] * 2


PROGRAM = """
import os, sys, atexit, torch, phalanx as dist
dist.init_process_group()
rank = dist.get_rank()
works = [dist.all_reduce(torch.arange(1 << 20), async_op=True)]
works += [dist.isend(torch.arange(9), 1 - rank)]
works[0].wait()
child = os.fork()
if child == 0:
    atexit.register(print, "ends", flush=True)
    print(int(torch.arange(5).sum()), dist.is_initialized(), flush=True)
    sys.exit(0)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
received = torch.zeros(9, dtype=torch.int64)
dist.recv(received, 1 - rank)
works[1].wait()
dist.all_reduce(received)
print(received.tolist(), flush=True)
"""


@pytest.mark.parametrize("on_hosts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_child_ends_as_any_program(program, on_hosts):
    source = "import os; os.environ['PHALANX_HOST_ID'] = os.environ['RANK']\n" if on_hosts else ""
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", str(program(source + PROGRAM))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}]")]
        said = [line.removeprefix(f"[rank {rank}] ") for line in lines]
        assert said == ["10 False", "ends", "child: 0", str([2 * i for i in range(9)])]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["processes", "hosts", "torch", "threads"])
def test_every_way_to_fork(kind, tmp_path):
    if kind == "processes":
        counts = run_ranks(in_world, 2, ALL, ranks="processes", timeout=300)
    elif kind == "hosts":
        store = str(tmp_path / "store")
        counts = run_ranks(over_hosts, 2, ALL, store, ranks="processes", timeout=300)
    elif kind == "torch":
        counts = run_torch(in_torch, 2, ALL, timeout=300)
    else:
        (counts,) = run_ranks(in_threads, 1, IN_THREADS, 300, ranks="processes", timeout=300)
    assert counts == [len(IN_THREADS if kind == "threads" else ALL)] * 2
