"""Shared tensors: collectives on them are right and direct; memory comes and goes."""

from __future__ import annotations

import gc
import resource
import threading
from pathlib import Path

import pytest
import torch

import phalanx as dist
from phalanx import _native
from phalanx.testing import run_ranks


def test_shapes_and_types() -> None:
    for shape in [(), (0,), (5,), (2, 3), (2, 0, 3)]:
        for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]:
            tensor = dist.empty_shared(shape, dtype=dtype)
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert dist.is_shared(tensor)
            assert not tensor.any()
    assert dist.empty_shared(2, 3).shape == (2, 3)
    assert dist.empty_shared(3, requires_grad=True).requires_grad
    assert not dist.is_shared(torch.empty(3))
    with pytest.raises(ValueError, match="negative"):
        dist.empty_shared(-1)


def heap_uses() -> list[int]:
    uses = [_native.heap_used()]
    tensor = dist.empty_shared(1 << 20)
    view = tensor[10:20]
    del tensor
    gc.collect()
    uses.append(_native.heap_used())
    del view
    gc.collect()
    return [*uses, _native.heap_used()]


def test_memory_is_given_back() -> None:
    # In a process of its own: what other tests leave to the collector would count as well.
    ((before, meanwhile, after),) = run_ranks(heap_uses, 1, ranks="processes")
    assert meanwhile >= before + (4 << 20)
    assert after == before


def test_lack_of_memory_is_an_exception() -> None:
    with pytest.raises(MemoryError, match="shared memory"):
        dist.empty_shared(1 << 50, dtype=torch.uint8)


def _collectives_on_shared() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 100_000):
        mine = dist.empty_shared(count)
        mine.fill_(rank + 1)
        dist.all_reduce(mine)
        assert (mine == size * (size + 1) / 2).all()
        # One rank brings an ordinary tensor: slower, not wrong.
        mixed = torch.empty(count) if rank == 0 else dist.empty_shared(count)
        mixed.fill_(rank + 1)
        dist.all_reduce(mixed)
        assert (mixed == size * (size + 1) / 2).all()
        mixed.fill_(rank)
        dist.broadcast(mixed, size - 1)
        assert (mixed == size - 1).all()
        gathered = dist.empty_shared(size, count)
        mine.fill_(rank)
        dist.all_gather_into_tensor(gathered, mine)
        assert (gathered == torch.arange(size)[:, None]).all()
        scattered = dist.empty_shared(count)
        dist.reduce_scatter_tensor(scattered, gathered)
        assert (scattered == rank * size).all()
        # In place: the input is a part of the output.
        gathered[rank].fill_(rank + 10)
        dist.all_gather_into_tensor(gathered, gathered[rank])
        assert (gathered == torch.arange(size)[:, None] + 10).all()
        received = torch.empty(count)
        sent = dist.isend(mine, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sent.wait()
        assert (received == (rank - 1) % size).all()
    dist.barrier()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_on_shared_tensors(ranks: str, size: int) -> None:
    run_ranks(_collectives_on_shared, size, ranks=ranks)


def _same_bits(count: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(count, generator=generator).to(dtype)
        shared = dist.empty_shared(count, dtype=dtype)
        shared.copy_(values)
        for tensor in (values, shared):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            results.append(tensor.clone())
    return results


@pytest.mark.parametrize("count", [7, 10_000, 300_001])
def test_bits_do_not_depend_on_the_way_they_travel(count: int) -> None:
    runs = [run_ranks(_same_bits, 3, count, ranks=kind) for kind in ("threads", "processes")]
    first = runs[0][0]
    for results in (*runs[0], *runs[1]):
        for ordinary, shared, reference in zip(
            results[::2], results[1::2], first[::2], strict=True
        ):
            assert torch.equal(ordinary, reference)
            assert torch.equal(shared, reference)


def _closes_first() -> list[int]:
    """Make and close groups, always before the other rank; return the heap's size after each."""
    sizes = []
    for _ in range(6):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(100_000), group=group)
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)
        dist.destroy_process_group(group)
        del group
        if dist.get_rank() == 1:
            dist.send(torch.empty(1), 0)
        sizes.append(_native.heap_used())
    return sizes


def test_closed_groups_give_their_memory_back() -> None:
    for sizes in run_ranks(_closes_first, 2, ranks="processes"):
        assert sizes[-1] == sizes[1]


def _many_worlds(path: str) -> tuple[int, ...]:
    """Come and go a thousand times; return what grew meanwhile."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(path, -1)
    readings = []
    for cycle in range(1000):
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=2, timeout=30.0)
        dist.all_reduce(torch.ones(1 if cycle % 50 else 100_000))
        if cycle % 100 == 0:
            dist.all_reduce(torch.ones(1), async_op=True).wait()
            dist.new_group([0, 1])
        dist.destroy_process_group()
        if cycle in (100, 999):
            gc.collect()
            readings.append(
                (
                    len(list(Path("/proc/self/fd").iterdir())),
                    threading.active_count(),
                    len(list(Path("/proc/self/task").iterdir())),
                    _native.heap_used(),
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                )
            )
    first, last = readings
    return tuple(after - before for before, after in zip(first, last, strict=True))


def test_a_thousand_worlds_leave_nothing_behind(tmp_path: Path) -> None:
    for descriptors, threads, tasks, heap, memory_kib in run_ranks(
        _many_worlds, 2, str(tmp_path / "store"), ranks="processes", timeout=110
    ):
        assert descriptors <= 0
        assert threads <= 0
        assert tasks <= 0
        assert heap <= 4 << 20
        assert memory_kib < 20_000


def _huge() -> None:
    tensor = torch.full(((1 << 31) + 64,), dist.get_rank() + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert tensor[0] == 3
    assert tensor[-1] == 3
    assert tensor[1 << 30] == 3


def test_more_than_two_gigabytes() -> None:
    run_ranks(_huge, 2)
