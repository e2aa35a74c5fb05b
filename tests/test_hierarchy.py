"""Groups over hosts compute what groups of one host do. Ranks are threads on pretended hosts."""

import threading

import pytest
import torch
from pretended_hosts import on_hosts

import phalanx as dist
from phalanx.backends.hierarchy import group as hierarchy
from phalanx.backends.hierarchy.topology import Topology
from phalanx.testing.backend_kit import check_endings, check_group

# Uneven, interleaved, one rank per host, more hosts than a power of two.
LAYOUTS = ["ab", "aab", "abb", "abab", "abc", "abcdefg", "aabbbb", "abcabc"]


def keep_the_contract():
    assert isinstance(dist.group.WORLD.backend, hierarchy.Hierarchy)
    check_group(dist.group.WORLD.transport)


@pytest.mark.parametrize("layout", ["ab", "aab", "abab", "abcde"])
def test_the_contract(layout):
    before = {*threading.enumerate()}
    on_hosts(keep_the_contract, layout, timeout=120)
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left"


def test_the_contract_on_gloo():
    on_hosts(keep_the_contract, "aab", engine="gloo", timeout=120)


def keep_the_contract_to_the_end():
    check_endings(lambda: dist.new_group().transport)


@pytest.mark.parametrize("layout", ["ab", "aab", "abab"])
def test_the_contract_for_endings(layout):
    on_hosts(keep_the_contract_to_the_end, layout)


def sums(numel, op):
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(numel) % 7 + other for other in range(size)]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, op=op)
    expected = torch.stack(inputs)
    assert torch.equal(tensor, expected.sum(0) if op == dist.ReduceOp.SUM else expected.amax(0))
    if op == dist.ReduceOp.SUM:
        for root in range(size):
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root)
            assert torch.equal(tensor, expected.sum(0) if rank == root else inputs[rank])
            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, inputs[root])
        gathered = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(gathered, inputs[rank])
        assert all(map(torch.equal, gathered, inputs))
        output = torch.empty_like(tensor)
        dist.reduce_scatter(output, [each + rank for each in inputs])
        assert torch.equal(output, size * inputs[rank] + sum(range(size)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numel", [0, 1, 100, 9_000, 300_001], ids="{} elements".format)
def test_every_path_has_the_right_sum(layout, numel):
    """One rank for all, slices in chunks, doubling, rings: each for some of these sizes."""
    on_hosts(sums, layout, numel, dist.ReduceOp.SUM)


@pytest.mark.parametrize("layout", ["aab", "abcde"])
def test_every_path_knows_maxima(layout):
    for numel in (3, 9_000, 40_000):
        on_hosts(sums, layout, numel, dist.ReduceOp.MAX)


def whatever_programs_do():
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size

    # Any two, any source, large and small, blocking and not.
    for numel in (3, 50_000):
        received = [torch.zeros(numel) for _ in range(size)]
        works = [dist.irecv(received[peer], peer) for peer in range(size) if peer != rank]
        for peer in range(size):
            if peer != rank:
                dist.send(torch.full((numel,), float(rank)), peer)
        for work in works:
            work.wait()
        assert [each[-1].item() for each in received] == [
            0.0 if peer == rank else peer for peer in range(size)
        ]
    got = torch.zeros(2)
    work = dist.isend(torch.full((2,), float(rank)), right, tag=9)
    assert dist.recv(got, tag=9) == left
    work.wait()
    assert got[0] == left

    # Groups across hosts, on one host, of one rank.
    for ranks in ([0, size - 1], [1, 2], list(range(1, size)), [0]):
        group = dist.new_group(ranks)
        if rank in ranks:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            assert total == sum(ranks)

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, size - 1)
    assert told == [f"from {size - 1}"]

    tensors = [torch.full((n,), float(rank)) for n in (2, 20_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all(tensor[-1] == sum(range(size)) for tensor in tensors)

    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.get_group("columns"))
    dist.all_reduce(one, group=mesh.get_group("rows"))
    assert one == size

    torch.manual_seed(0)
    model = dist.DistributedDataParallel(torch.nn.Linear(300, 100))
    for _ in range(2):
        model(torch.full((1, 300), float(rank))).sum().backward()
    mean = sum(range(size)) / size
    assert torch.allclose(model.module.weight.grad, torch.full((100, 300), 2 * mean))


@pytest.mark.parametrize("layout", ["aabb", "abba", "abac", "abcdef"])
def test_programs(layout):
    on_hosts(whatever_programs_do, layout)


def coalesce():
    a, b = torch.ones(3), torch.full((40_000,), 2)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    return a[0].item(), b[-1].item()


def test_coalesced_calls():
    assert on_hosts(coalesce, "aab") == [(3.0, 6)] * 3


def test_a_group_of_one_host_has_no_need_of_an_engine():
    def body():
        pair = dist.new_group([0, 1])
        return dist.get_rank() > 1 or type(pair.backend).__name__

    assert on_hosts(body, "aab") == ["LocalBackend", "LocalBackend", True]


def test_topology():
    where = Topology("babca", 4)
    assert where.hosts == [[0, 2], [1, 4], [3]]
    assert (where.host, where.seat, where.mine) == (1, 1, [1, 4])
    assert where.num_slices == 1
    assert where.peers(0) == [0, 1, 3]
    assert [where.counterpart(4, host) for host in range(3)] == [2, 4, 3]
    assert [where.is_local(rank) for rank in range(5)] == [False, True, False, False, True]
