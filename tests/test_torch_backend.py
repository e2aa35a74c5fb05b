"""torch.distributed on Phalanx: its calls, works and futures, errors, and the lives of groups."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions

import phalanx
from tests.torch_ranks import run_torch

SIZE = 3
SHORT = timedelta(milliseconds=200)


def values(rank, size=4, dtype=torch.float32):
    """What a rank brings: other numbers on each rank and in each place."""
    return (torch.arange(size) + 10 * rank + 1).to(dtype)


def total(size=4, dtype=torch.float32, ranks=range(SIZE)):
    return sum(values(rank, size, dtype) for rank in ranks)


def check(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# Calls


def _reductions():
    rank = dist.get_rank()
    every = torch.stack([values(r) for r in range(SIZE)])
    results = {
        dist.ReduceOp.SUM: every.sum(0),
        dist.ReduceOp.AVG: every.mean(0),
        dist.ReduceOp.PRODUCT: every.prod(0),
        dist.ReduceOp.MIN: every.amin(0),
        dist.ReduceOp.MAX: every.amax(0),
        dist._make_nccl_premul_sum(0.5): every.sum(0) / 2,
    }
    for op, wanted in results.items():
        tensor = values(rank)
        dist.all_reduce(tensor, op)
        check(tensor, wanted)
    for op, wanted in {dist.ReduceOp.BAND: 0, dist.ReduceOp.BOR: 7, dist.ReduceOp.BXOR: 7}.items():
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, op)
        assert bits.item() == wanted
    for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.complex64):
        tensor = values(rank, dtype=dtype)
        dist.all_reduce(tensor)
        check(tensor, total(dtype=dtype))
    tensor = values(rank)
    dist.reduce(tensor, 1)
    check(tensor, total() if rank == 1 else values(rank))
    tensors = [values(rank, n) for n in (1, 5)]
    dist.all_reduce_coalesced(tensors)
    check(tensors[1], total(5))
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1])
    works.wait()
    check(tensors[1], SIZE * total(5))
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 1.0], (4,))
    dist.all_reduce(sparse)
    check(sparse.to_dense(), torch.tensor([1.0, 1.0, 1.0, 3.0]))


def _moves():
    rank = dist.get_rank()
    every = [values(r) for r in range(SIZE)]
    tensor = values(rank)
    dist.broadcast(tensor, 2)
    check(tensor, every[2])
    outputs = [torch.empty(4) for _ in range(SIZE)]
    dist.all_gather(outputs, values(rank))
    check(outputs, every)
    output = torch.empty(SIZE * 4)
    dist.all_gather_into_tensor(output, values(rank))
    check(output, torch.cat(every))
    gathered = [torch.empty(4) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(values(rank), gathered, dst=1)
    if rank == 1:
        check(gathered, every)
    tensor = torch.empty(4)
    dist.scatter(tensor, every if rank == 0 else None, src=0)
    check(tensor, every[rank])
    tensor = torch.empty(4)
    dist.reduce_scatter(tensor, [values(rank) + r for r in range(SIZE)])
    check(tensor, total() + SIZE * rank)
    dist.reduce_scatter_tensor(tensor, values(rank, 4 * SIZE))
    check(tensor, total(4 * SIZE).chunk(SIZE)[rank])
    outputs = [torch.empty(1 + r) for r in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((1 + rank,), float(r)) for r in range(SIZE)])
    check(outputs, [torch.full((1 + r,), float(rank)) for r in range(SIZE)])
    output, splits = torch.empty(SIZE * (rank + 1)), [rank + 1] * SIZE
    source = torch.cat([torch.full((r + 1,), 10.0 * rank + r) for r in range(SIZE)])
    dist.all_to_all_single(output, source, splits, [r + 1 for r in range(SIZE)])
    check(output, torch.cat([torch.full((rank + 1,), 10.0 * r + rank) for r in range(SIZE)]))
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(output := torch.empty(SIZE * 4), values(rank))
    check(output, torch.cat(every))
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(tensor := torch.empty(4), values(rank, 4 * SIZE))
    check(tensor, total(4 * SIZE).chunk(SIZE)[rank])
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(SIZE)]
    dist.barrier()
    assert dist.distributed_c10d._get_default_group()._get_sequence_number_for_group() > 0


def _messages():
    rank, right, left = dist.get_rank(), (dist.get_rank() + 1) % SIZE, (dist.get_rank() - 1) % SIZE
    tensor = torch.empty(4)
    if rank == 0:
        dist.send(values(0), 1, tag=3)
    elif rank == 1:
        assert dist.recv(tensor, 0, tag=3) == 0
        check(tensor, values(0))
    work = dist.isend(values(rank), right)
    receipt = dist.irecv(tensor, left)
    receipt.wait()
    work.wait()
    check(tensor, values(left))
    assert receipt.is_completed()
    if rank == 0:
        senders = {dist.recv(tensor) for _ in range(SIZE - 1)}
        assert senders == {1, 2}
    else:
        dist.send(values(rank), 0)
    dist.barrier()  # rank 0 takes from anybody whatever comes
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, tensor, left), dist.P2POp(dist.isend, values(rank), right)]
    ):
        work.wait()
    check(tensor, values(left))
    dist.isend(values(rank), rank)  # to itself
    dist.irecv(tensor, rank).wait()
    check(tensor, values(rank))


@pytest.mark.parametrize("calls", [_reductions, _moves, _messages])
def test_calls(calls):
    run_torch(calls, SIZE)


def _works():
    rank = dist.get_rank()
    group = dist.distributed_c10d._get_default_group()
    tensor = values(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    check(tensor, total())
    # Futures, their callbacks, and callbacks that communicate and wait.
    first = dist.all_reduce(values(rank), async_op=True).get_future()
    doubled = first.then(lambda future: future.value()[0] * 2)

    def again(future):
        tensor = future.value()
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    check(doubled.then(again).wait(), 2 * SIZE * total())
    # The short forms of the methods, and options with a timeout.
    group.allreduce(tensor := values(rank)).wait()
    check(tensor, total())
    group.allreduce([tensor := values(rank)], dist.ReduceOp.MAX).wait()
    check(tensor, values(SIZE - 1))
    group.broadcast(tensor := values(rank), 1).wait()
    check(tensor, values(1))
    options = BroadcastOptions()
    options.rootRank, options.timeout = 2, timedelta(seconds=30)
    group.broadcast([tensor := values(rank)], options).wait()
    check(tensor, values(2))
    group.barrier().wait()
    return dist.get_backend(), dist.get_backend_config(), group.name()


def test_works_and_futures():
    assert run_torch(_works, SIZE)[0] == ("phalanx", "cpu:phalanx", "phalanx")


def _groups():
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    if rank != 1:
        tensor = values(rank)
        dist.all_reduce(tensor, group=pair)
        check(tensor, total(ranks=(0, 2)))
        assert dist.get_process_group_ranks(pair) == [0, 2]
    part = dist.split_group(split_ranks=[[0, 1], [2]], group_desc="some")
    tensor = values(rank)
    dist.all_reduce(tensor, group=part)
    check(tensor, values(2) if rank == 2 else total(ranks=(0, 1)))
    assert part.group_desc == "some"
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), part)
    assert part.options._timeout == timedelta(seconds=7)
    # The two libraries are in one world.
    tensor = values(rank)
    phalanx.all_reduce(tensor)
    check(tensor, total())
    dist.destroy_process_group(part)
    dist.barrier()
    if rank == 1:
        return None
    shrunk = dist.shrink_group([1])
    assert dist.get_world_size() == 2
    tensor = values(rank)
    dist.all_reduce(tensor)
    check(tensor, total(ranks=(0, 2)))
    return shrunk.rank()


def test_groups():
    assert run_torch(_groups, SIZE) == [0, None, 1]


def _again(address):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert not phalanx.is_initialized()
    store = dist.FileStore(address, size)
    for _ in range(3):
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=size)
        group = dist.new_group()
        dist.all_reduce(tensor := values(rank), group=group)
        check(tensor, total())
        dist.destroy_process_group()
    # Only what torch itself has put there is left.
    return [key for key in store.list_keys() if "board" in key or "roster" in key]


def test_worlds_one_after_the_other_in_one_store():
    with tempfile.TemporaryDirectory() as directory:
        assert run_torch(_again, SIZE, str(Path(directory, "store"))) == [[]] * SIZE


def _beside_gloo():
    rank = dist.get_rank()
    pair = dist.new_group([1, 2], backend="phalanx")
    tensor = values(rank)
    if rank:
        dist.all_reduce(tensor, group=pair)
        check(tensor, total(ranks=(1, 2)))
        with pytest.raises(phalanx.CollectiveMismatch, match=r"global ranks \[1, 2\]"):
            dist.all_reduce(torch.ones(rank), group=pair)
    dist.all_reduce(tensor := values(rank))
    check(tensor, total())
    dist.monitored_barrier()  # of Gloo
    assert not phalanx.is_initialized()


def test_a_group_beside_gloo():
    run_torch(_beside_gloo, SIZE, backend="gloo")


# Errors


def _mismatch():
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    assert isinstance(caught.value, phalanx.CollectiveMismatch)
    return str(caught.value)


def test_a_mismatch_names_ranks_and_lines():
    text = run_torch(_mismatch, 2)[0]
    assert "float32[2]" in text
    assert "float32[3]" in text
    assert "test_torch_backend.py:" in text
    assert "_mismatch" in text
    assert "wrapper" not in text  # of torch's own


def _dead_peer(how):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "backward": lambda: model(torch.ones(1, 3)).sum().backward(),
        "future": lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
        "work": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "call": lambda: dist.barrier(),
    }
    with pytest.raises(RuntimeError, match=r"rank 1.*SIGKILL") as caught:
        calls[how]()
    return str(caught.value)


@pytest.mark.parametrize("how", ["backward", "future", "work", "call"])
def test_a_killed_rank_is_named(how):
    text, killed = run_torch(_dead_peer, 2, how, return_exceptions=True)
    assert "SIGKILL" in str(killed)
    # The line that called it: of the program, not of torch or Phalanx.
    name = {"backward": "broadcast", "call": "barrier"}.get(how, "all_reduce")
    place = r"on group 'world', rank 0, at test_torch_backend\.py:\d+ in <lambda>"
    assert re.search(rf"{name} #\d+ {place}: rank 1 .*was killed by SIGKILL", text), text


def _timeouts():
    rank = dist.get_rank()
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(TimeoutError, match="not arrived: rank 1"):
            dist.barrier(group, timeout=SHORT)
        options = AllreduceOptions()
        options.timeout = SHORT
        other = dist.new_group()
        with pytest.raises(TimeoutError, match="rank 1"):
            other.allreduce([torch.ones(1)], options).wait()
    else:
        dist.new_group()
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.monitored_barrier(timeout=SHORT)
    dist.barrier()


def test_timeouts():
    run_torch(_timeouts, 2)


def _raise(*_):
    raise KeyboardInterrupt


def _wait_until_interrupted(work):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    work.wait()


def _interrupted():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, _raise)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(KeyboardInterrupt):
            _wait_until_interrupted(work)
        # The operation ended with the wait, unless the group's own thread had begun it.
        given_up = work.is_completed()
        store.set("given up", str(given_up))
        for _ in range(2 * given_up):
            with pytest.raises(dist.DistBackendError, match="interrupted"):
                work.wait()
            assert isinstance(work.exception(), dist.DistBackendError)
            with pytest.raises(RuntimeError, match="interrupted"):
                work.get_future().wait()
        if not given_up:
            work.wait()
    elif store.get("given up") == b"True":
        with pytest.raises(phalanx.PeerFailed, match="interrupted"):
            dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
    dist.all_reduce(tensor := torch.ones(2))
    check(tensor, torch.full((2,), 2.0))


def test_a_wait_that_is_interrupted():
    run_torch(_interrupted, 2)


def _destroyed_by_a_handler():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, lambda *_: dist.destroy_process_group())
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        signal.setitimer(signal.ITIMER_REAL, 2)
        for work in works:
            with pytest.raises(dist.DistBackendError, match="destroyed"):
                work.wait()
        store.set("destroyed", "")
    else:
        store.wait(["destroyed"])
        with pytest.raises(phalanx.PeerFailed, match="rank 0"):
            dist.all_reduce(torch.ones(4))


def test_a_handler_that_destroys_the_group():
    run_torch(_destroyed_by_a_handler, 2)


def _gathers_or_reduces():
    tensors = [torch.ones(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it is deprecated
        work = (
            dist.all_gather_coalesced([[torch.ones(4)] for _ in range(2)], tensors, async_op=True)
            if dist.get_rank()
            else dist.all_reduce_coalesced(tensors, async_op=True)
        )
    with pytest.raises(RuntimeError, match="does not match"):
        work.wait()


def test_errors_of_coalesced_operations():
    run_torch(_gathers_or_reduces, 2)


def _forks():
    child = os.fork()
    if child == 0:  # a copy, and no rank
        try:
            with pytest.raises(dist.DistBackendError, match="forked"):
                dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2


def test_a_forked_child_is_no_rank():
    run_torch(_forks, 2)


def _refusals():
    group = dist.distributed_c10d._get_default_group()
    with pytest.raises(ValueError, match=r"MAX on torch\.complex64"):
        group.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError, match="cuda:nccl"):
        group._get_backend(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="cuda:nccl"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="list of one tensor"):
        group.reduce([torch.ones(1), torch.ones(1)], 0)
    with pytest.raises(TypeError, match="'other'"):
        group.broadcast([torch.ones(1)], other=0)
    with pytest.raises(TypeError, match="pg_options"):
        dist.new_group(pg_options=object())
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="destroyed"):
        group.allreduce([torch.ones(1)])


def test_refusals():
    run_torch(_refusals, 1)


def _events():
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(4))
        dist.barrier()
    return [event.name for event in profile.events()]


def test_the_profiler_sees_operations():
    assert {"phalanx:all_reduce", "phalanx:barrier"} <= set(run_torch(_events, 1)[0])


# Registration

USE = """
import torch.distributed as dist
assert dist.is_backend_available("phalanx")
assert dist.get_default_backend_for_device("cpu") == "gloo"
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("autoload", "first"),
    [
        ("1", "import sys, torch; assert 'phalanx' not in sys.modules"),
        ("0", "import phalanx.torch_backend"),
    ],
)
def test_torch_knows_the_backend(autoload, first):
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-c", first + USE]
    subprocess.run(command, env=environment, check=True, timeout=100)
