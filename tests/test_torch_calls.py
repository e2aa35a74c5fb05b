"""What calls of torch.distributed do on Phalanx is what they do on Gloo."""

import pytest
import torch
import torch.distributed as dist

from tests.torch_ranks import Outcomes


def values(count):
    """What a rank brings: other numbers on each rank and in each place."""
    return torch.arange(count) + 10.0 * dist.get_rank() + 1


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(_shared_memory)


# Calls that share memory


def _shared_memory():
    results = {}
    size = dist.get_world_size()

    results["twice"] = tensor = values(5)
    dist.all_reduce_coalesced([tensor, tensor])
    results["views"] = tensor = values(5)
    dist.all_reduce_coalesced([tensor[1:4], tensor[:3]])
    results["strided"] = tensor = values(6)
    dist.all_reduce_coalesced([tensor[::2], tensor[1:]])
    results["async"] = tensor = values(20_000)
    dist.all_reduce_coalesced([tensor[5000:], tensor], async_op=True).wait()
    results["largest"] = tensor = values(3)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.MAX
    dist.group.WORLD.allreduce_coalesced([tensor, tensor], options).wait()
    results["one rank"] = tensor = values(4)
    other = tensor if dist.get_rank() == 0 else tensor.clone()
    dist.all_reduce_coalesced([tensor, other])

    for asynchronous in (False, True):
        results["manager", asynchronous] = tensor = values(5)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor[2:])
        if asynchronous:
            manager.wait()

        gathered, later = torch.full((2 * size,), -1.0), torch.zeros(2 * size)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_gather_into_tensor(gathered, values(2))
            dist.all_gather_into_tensor(later, gathered[:2])
        if asynchronous:
            manager.wait()
        results["gathered", asynchronous] = [gathered, later]

        given, again = values(2 * size), torch.zeros(2)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.reduce_scatter_tensor(given[:2], given)
            dist.reduce_scatter_tensor(again, given)
        if asynchronous:
            manager.wait()
        results["scattered", asynchronous] = [given, again]

    own = values(2)
    outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(size)]
    outputs[0][0] = own  # rank 0's goes where this rank's is
    dist.all_gather_coalesced(outputs, [own, own])
    results["lists"] = outputs
    return results


def test_coalesced_calls_read_all_before_they_write(outcomes):
    for results in outcomes.of(_shared_memory):
        assert results["twice"].tolist() == [12.0, 14.0, 16.0, 18.0, 20.0]
        assert results["views"].tolist()[:4] == [12.0, 14.0, 16.0, 18.0]
        assert results["gathered", True][1].tolist() == [-1.0] * 4
