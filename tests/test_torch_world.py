"""torch_world: programs that call torch.distributed themselves, on thread ranks."""

import inspect
import os
import sys
import threading
import time
import unittest
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d, init_process_group

import phalanx
from phalanx.testing import torch_world

BACKENDS = ["gloo", "nccl", "phalanx", "threaded", None, "cpu:gloo,cuda:nccl"]


def total():
    """Return the sum of all ranks, each plus one."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def state():
    """Return what is changed while such a world runs."""
    environ = type(os.environ)
    return (
        distributed_c10d._world,
        distributed_c10d._new_process_group_helper,
        distributed_c10d.rendezvous,
        distributed_c10d._backend,
        distributed_c10d._default_pg_init_method,
        dist.device_mesh.DeviceMesh.__init__,
        dist.device_mesh.DeviceMesh.__setstate__,
        torch.nn.parallel.DistributedDataParallel._inside_ddp_forward,
        torch.nn.parallel.DistributedDataParallel._active_ddp_module,
        torch.compile,
        environ.__getitem__,
        environ.__setitem__,
        environ.__delitem__,
        sys.excepthook,
        warnings.filters,
        warnings.showwarning,
        threading.Thread.start,
    )


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before, threads = state(), {*threading.enumerate()}
    yield
    assert state() == before
    for thread in {*threading.enumerate()} - threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left"
    assert not dist.is_initialized()


# Ways to call it


def who(factor=1, *, offset=0):
    return factor * dist.get_rank() + offset, dist.get_world_size(), total()


def test_results_come_by_rank():
    world = torch_world(3)
    assert world.run(who, 10, offset=1) == [(1, 3, 6), (11, 3, 6), (21, 3, 6)]
    assert world.run(dist.get_rank) == [0, 1, 2]
    assert torch_world(1).run(who) == [(0, 1, 1)]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        torch_world(0)
    with pytest.raises(TypeError, match="got True"):
        torch_world(True)
    with pytest.raises(TypeError, match=r"@torch_world\(4\)"):
        torch_world(total)


def test_as_a_context():
    with torch_world(2) as world:
        assert world.run(total) == [3, 3]
        assert world.run(total) == [3, 3]
        assert not dist.is_initialized()  # here is no rank


@torch_world(2)
def on_two(factor: int) -> float:
    """Say something."""
    return factor * total()


class Case:
    @torch_world(2)
    def method(self):
        return self, dist.get_rank()


def test_as_a_decorator():
    assert on_two(5) == [15, 15]
    assert on_two.__name__ == "on_two"
    assert on_two.__doc__ == "Say something."
    assert list(inspect.signature(on_two).parameters) == ["factor"]
    case = Case()
    assert case.method() == [(case, 0), (case, 1)]


@pytest.mark.parametrize("size", [2, 3])
@torch_world(2)
def test_on_every_rank(size, tmp_path):
    assert total() == 3
    assert size in (2, 3)
    assert tmp_path.is_dir()


def test_a_test_that_is_skipped():
    def program():
        raise unittest.SkipTest("nothing to see")

    with pytest.raises(unittest.SkipTest, match="nothing to see"):
        torch_world(2).run(program)


# Who makes the default group


def own_group(backend, **kwargs):
    assert dist.is_initialized() is kwargs.pop("finds", True)
    init_process_group(backend, **kwargs)  # by a name that was imported before
    try:
        return dist.get_backend(), total(), dist.group.WORLD.name()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_makes_its_own_group(backend):
    expected = [(backend or "undefined", 6, "phalanx")] * 3
    assert torch_world(3).run(own_group, backend) == expected
    world = torch_world(3, init=False)
    assert world.run(own_group, backend, finds=False) == expected
    assert world.run(own_group, backend, init_method="tcp://localhost:1", finds=False) == expected


def by_address(address):
    rank = int(os.environ["RANK"])
    init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    return total()


def by_store(store):
    for _ in range(2):
        rank = int(os.environ["RANK"])
        init_process_group(store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        assert total() == 3
        dist.destroy_process_group()
    return dist.is_initialized()


def test_ways_to_meet(tmp_path):
    world = torch_world(2)
    assert world.run(by_address, f"file://{tmp_path}/meeting") == [3, 3]
    assert world.run(by_address, "env://") == [3, 3]
    assert world.run(by_address, "tcp://localhost:1?rank=7") == [3, 3]
    assert world.run(by_store, dist.HashStore()) == [False, False]
    assert world.run(by_store, dist.FileStore(str(tmp_path / "store"), 2)) == [False, False]


def test_a_group_in_use_is_not_replaced():
    def twice():
        total()
        init_process_group("gloo")

    def after_a_subgroup():
        dist.new_group([0])
        init_process_group("gloo")

    for program in (twice, after_a_subgroup):
        with pytest.raises(ValueError, match="twice"):
            torch_world(2).run(program)


def test_groups_asked_for_by_any_name():
    def program():
        pair = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=30))
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=alone)
        if dist.get_rank() < 2:
            dist.all_reduce(tensor, group=pair)
            assert dist.get_backend(pair) == "gloo"
        return dist.get_backend(), tensor.item()

    assert torch_world(3, backend="nccl").run(program) == [("nccl", 2), ("nccl", 2), ("nccl", 1)]


def test_the_environment_is_that_of_a_launcher():
    def program():
        before = [os.environ[name] for name in ("RANK", "LOCAL_RANK")]
        size = os.getenv("WORLD_SIZE")
        os.environ["RANK"] = str(10 + dist.get_rank())
        dist.barrier()
        del os.environ["LOCAL_RANK"]
        with pytest.raises(TypeError, match="not int"):
            os.environ["MASTER_PORT"] = 1
        return before, size, os.environ["RANK"], "LOCAL_RANK" in os.environ

    there = "RANK" in os.environ
    assert torch_world(2).run(program) == [
        (["0", "0"], "2", "10", False),
        (["1", "1"], "2", "11", False),
    ]
    assert ("RANK" in os.environ) is there


# What goes wrong


def test_the_first_failure_is_raised_with_its_rank():
    def program():
        total()
        if dist.get_rank() == 1:
            raise OSError("no such batch")
        dist.barrier()

    with pytest.raises(OSError, match="no such batch") as caught:
        torch_world(3).run(program)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    first, second, third = torch_world(3, return_exceptions=True).run(program)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, phalanx.PeerFailed)
        assert "no such batch" in str(error)


@pytest.mark.parametrize("init", [True, False])
def test_a_failure_before_there_is_a_group(init):
    def program():
        if os.environ["RANK"] == "1":
            raise OSError("no such file")
        init_process_group("gloo")

    first, second, third = torch_world(3, init=init, return_exceptions=True).run(program)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, phalanx.PeerFailed)
        assert "rank 1" in str(error)
        assert "no such file" in str(error)


def test_a_rank_that_returns_and_one_that_waits_for_it():
    def program():
        if os.environ["RANK"] == "0":
            init_process_group("gloo")

    with pytest.raises(phalanx.PeerFailed, match="rank 1 has returned"):
        torch_world(2, init=False).run(program)


def test_fewer_ranks_may_make_a_group():
    def program():
        rank = int(os.environ["RANK"])
        if rank == 2:
            raise OSError("gone")
        init_process_group("gloo", rank=rank, world_size=2)
        return total()

    first, second, third = torch_world(3, init=False, return_exceptions=True).run(program)
    assert (first, second) == (3, 3)
    assert isinstance(third, OSError)


def test_mismatches_deadlocks_and_timeouts():
    def mismatch():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    def deadlock():
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    def late():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            try:
                dist.barrier()
            finally:
                store.set("given up", "")
        else:
            store.wait(["given up"], timedelta(seconds=60))

    def endless():
        while dist.get_rank() == 1:
            time.sleep(0.001)

    with pytest.raises(phalanx.CollectiveMismatch, match=r"float32\[3\]"):
        torch_world(2).run(mismatch)
    with pytest.raises(phalanx.Deadlock, match=r"test_torch_world\.py"):
        torch_world(2).run(deadlock)
    with pytest.raises(phalanx.DistTimeout, match="not arrived: rank 1"):
        torch_world(2, group_timeout=2).run(late)
    with pytest.raises(phalanx.DistTimeout, match=r"(?s)rank 1 of 2 did not return.*in endless"):
        torch_world(2, timeout=3).run(endless)


def test_groups_that_ranks_leave_behind_are_closed():
    def program():
        groups = [dist.new_group() for _ in range(3)]
        dist.all_reduce(torch.ones(1), group=groups[1], async_op=True).get_future().wait()
        raise ArithmeticError(str(dist.get_rank()))

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            torch_world(2).run(program)


# Apart from each other


@pytest.fixture
def own_world(monkeypatch):
    """Make this process a rank of torch.distributed."""
    for owner, name in ((sys, "excepthook"), (distributed_c10d, "_backend")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # torch leaves them changed
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_groups_of_the_process_stay(own_world):
    pair = dist.new_group([0])
    seen = []

    def program():
        thread = threading.Thread(target=seen.append, args=(dist.get_world_size(),))
        thread.start()
        thread.join()
        return total(), dist.group.WORLD is own_world

    with torch_world(2) as world:
        assert world.run(program) == [(3, False), (3, False)]
        assert dist.group.WORLD is own_world
        assert total() == 1
    assert seen == [2, 2]
    assert dist.get_process_group_ranks(pair) == [0]
    assert functional.all_reduce(torch.ones(2), "sum", own_world).tolist() == [1, 1]


def test_worlds_in_worlds_and_beside_each_other():
    def program(size):
        inner = torch_world(size).run(total) if size else []
        return total(), inner

    assert torch_world(2).run(program, 3) == [(3, [6, 6, 6])] * 2
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda size: torch_world(size).run(program, 0), [2, 3, 4]))
    assert results == [[(3, [])] * 2, [(6, [])] * 3, [(10, [])] * 4]


def test_phalanx_in_the_same_program():
    def program():
        tensor = torch.ones(1)
        phalanx.all_reduce(tensor)
        return phalanx.get_rank(), tensor.item(), phalanx.run_threads(phalanx.get_world_size, 3)

    assert torch_world(2).run(program) == [(0, 2, [3, 3, 3]), (1, 2, [3, 3, 3])]
    assert phalanx.run_threads(lambda: torch_world(2).run(total), 2) == [[3, 3]] * 2


def test_threads_of_a_rank_are_that_rank():
    def reduce_by_name():
        return functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait().item()

    def program():
        found = []
        thread = threading.Thread(target=lambda: found.append((total(), reduce_by_name())))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            found += [pool.submit(total).result(), pool.submit(reduce_by_name).result()]
        return found

    assert torch_world(2).run(program) == [[(3, 2), 3, 2]] * 2


class Scale(torch.autograd.Function):
    """Scales by the world size in forward, and by what all ranks have in backward."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor * dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient * (dist.get_rank() + 1)


def test_backward_knows_its_rank():
    def program():
        tensor = torch.ones(2, requires_grad=True)
        (Scale.apply(tensor) * (dist.get_rank() + 1)).sum().backward()
        return tensor.grad.tolist()

    assert torch_world(3).run(program) == [[6, 6], [12, 12], [18, 18]]


def test_each_rank_draws_from_its_own_stream():
    def program(seed):
        torch.manual_seed(seed + dist.get_rank())
        draws = []
        for _ in range(3):
            draws.append(torch.rand(2))
            dist.barrier()
        return torch.stack(draws)

    for rank, drawn in enumerate(torch_world(3).run(program, 5)):
        expected = torch.rand(3, 2, generator=torch.Generator().manual_seed(5 + rank))
        torch.testing.assert_close(drawn, expected, rtol=0, atol=0)
