import numpy as np
import pytest
import torch

import phalanx as dist
from phalanx.testing import run_ranks


def test_recv_returns_the_global_rank_of_the_source(run):
    def body():
        rank = dist.get_rank()
        pair = dist.new_group([1, 2])
        tensor = torch.zeros(1)
        if rank == 1:
            dist.send(torch.ones(1), 2, group=pair)
            dist.send(torch.ones(1), group=pair, group_dst=1, tag=4)
            dist.send(torch.ones(1), group=pair, group_dst=1)
        elif rank == 2:
            assert dist.recv(tensor, group=pair) == 1
            assert dist.recv(tensor, group=pair, group_src=0, tag=4) == 1
            assert dist.recv(tensor, 1, group=pair) == 1
            assert tensor.item() == 1

    run(body, 3)


def test_isend_and_irecv(run):
    def body():
        rank = dist.get_rank()
        peer = 1 - rank
        tensor = torch.zeros(3)
        receive = dist.irecv(tensor)
        dist.isend(torch.ones(3) * rank, peer).wait()
        receive.wait()
        assert receive.source_rank() == peer
        assert tensor.tolist() == [peer] * 3
        own = torch.zeros(2)
        work = dist.isend(torch.ones(2), rank)  # to itself
        assert dist.recv(own, rank) == rank
        work.wait()

    run(body, 2)


def test_bad_arguments(run):
    def body():
        rank = dist.get_rank()
        with pytest.raises(ValueError, match="isend"):
            dist.send(torch.ones(1), rank)
        with pytest.raises(ValueError, match="7"):
            dist.isend(torch.ones(1), 7)
        with pytest.raises(ValueError, match="dst"):
            dist.isend(torch.ones(1))
        with pytest.raises(ValueError, match="tag"):
            dist.isend(torch.ones(1), 0, tag=-1)
        with pytest.raises(TypeError, match="tensor"):
            dist.irecv([1.0], 0)

    run(body, 2)


# Types that collectives refuse.
PACKED = [torch.uint1, torch.uint4, torch.int7, torch.bits8, torch.bits16, torch.bits2x4]


@pytest.mark.parametrize("dtype", PACKED)
def test_elements_of_any_type_can_be_sent(run, dtype):
    given = torch.arange(1, 13, dtype=torch.uint8)

    def body():
        if dist.get_rank() == 0:
            dist.send(given.view(dtype), 1)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, given.view(dtype), 1)])[0].wait()
        else:
            first, second = torch.zeros_like(given), torch.zeros_like(given)
            dist.recv(first.view(dtype), 0)
            dist.irecv(second.view(dtype), 0).wait()
            assert first.tolist() == second.tolist() == given.tolist()

    run(body, 2)


def test_integers_of_other_libraries(run):
    def body():
        rank = dist.get_rank()
        one, nothing = np.int64(1), torch.tensor(0)
        tensor = torch.tensor([rank + 3.0])
        if rank == 0:
            dist.send(tensor, one, tag=np.int32(7))
            dist.send(tensor, group_dst=one, tag=torch.tensor(8))
        else:
            dist.recv(tensor, nothing, tag=7)
            assert tensor.tolist() == [3.0]
            dist.recv(tensor, group_src=nothing, tag=8)
        dist.broadcast(tensor, nothing)
        dist.reduce(tensor, group_dst=one)
        assert tensor.tolist() == [6.0 if rank else 3.0]
        for wrong in (np.int64(2), torch.tensor(-1), np.float64(0.5), "1"):
            with pytest.raises(ValueError, match="world"):
                dist.broadcast(tensor, group_src=wrong)

    run(body, 2)


def test_batches(run):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(2) for _ in range(size)]
        ops = []
        for peer in range(size):
            ops.append(dist.P2POp(dist.irecv, outputs[peer], peer, tag=3))
            ops.append(
                dist.P2POp(dist.isend, torch.full((2,), float(rank)), group_peer=peer, tag=3)
            )
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert [output[0].item() for output in outputs] == list(range(size))
        assert "isend to rank 0" in repr(ops[1])
        assert dist.batch_isend_irecv([]) == []
        with pytest.raises(ValueError, match=r"^Invalid ``op``"):
            dist.P2POp(dist.broadcast, torch.ones(1), 0)
        with pytest.raises(ValueError, match=r"^Invalid ``p2p_op_list``"):
            dist.batch_isend_irecv([1, 2])
        other = dist.new_group()
        with pytest.raises(ValueError, match="All ops need to use the same group"):
            dist.batch_isend_irecv([ops[0], dist.P2POp(dist.isend, torch.ones(1), 0, other)])

    run(body, 3)


def _received_backwards(count: int) -> None:
    tags = range(20)
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        return
    for tag in reversed(tags):
        tensor = torch.empty(count)
        dist.recv(tensor, 0, tag=tag)
        assert (tensor == tag).all()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("count", [10, 1_000, 100_000])
def test_many_messages_can_be_received_in_any_order(count: int, ranks: str) -> None:
    run_ranks(_received_backwards, 2, count, ranks=ranks)
