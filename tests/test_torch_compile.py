"""torch.compile around and inside what runs on the backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Outcomes

SIZE = 2


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(
        _collectives,
        _works_and_messages,
        _distributed_tensors,
        _data_parallel,
        _sharded,
        beside_gloo=False,
    )


def compiled(function, **options):
    """Compile by tracing alone, with no code generator: as much as a group has to do with."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **options)


def own(rank):
    return torch.arange(4.0) + 10 * rank


def _collectives():
    group = dist.group.WORLD
    subgroup = dist.new_group([0, 1])

    def by_functions(x):
        y = functional.all_reduce(2 * x, "sum", group)
        z = functional.all_gather_single(y, 0, group.group_name)
        return functional.reduce_scatter_single(z + 1, "sum", 0, group)

    def rewritten(x):
        x = 2 * x
        dist.all_reduce(x, group=subgroup)
        gathered, scattered, exchanged = torch.empty(8), torch.empty(4), torch.empty(4)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(scattered, gathered)
        dist.all_to_all_single(exchanged, x)
        parts = [torch.empty(4), torch.empty(4)]
        dist.all_gather(parts, x)
        return x + dist.get_rank(group), gathered, scattered, exchanged, parts[0] + parts[1]

    tensor = own(dist.get_rank())
    return [compiled(f, fullgraph=True)(tensor) for f in (by_functions, rewritten)]


def test_collectives_inside_one_graph(outcomes):
    total = 2 * (own(0) + own(1))
    for rank, (functions, rewritten) in enumerate(outcomes.of(_collectives)):
        torch.testing.assert_close(functions, 2 * (total + 1), rtol=0, atol=0)
        exchanged = total.chunk(SIZE)[rank].repeat(SIZE)
        expected = total + rank, total.repeat(SIZE), 2 * total, exchanged, 2 * total
        torch.testing.assert_close(tuple(rewritten), expected, rtol=0, atol=0)


def _works_and_messages():
    other = 1 - dist.get_rank()

    def asynchronous(x):
        x = 2 * x
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + 1

    def exchange(x):
        received = torch.empty_like(x)
        sent = dist.isend(2 * x, other)
        dist.recv(received, other)
        sent.wait()
        return received + 1

    def batch(x):
        received = torch.empty_like(x)
        messages = dist.P2POp(dist.isend, 2 * x, other), dist.P2POp(dist.irecv, received, other)
        for work in dist.batch_isend_irecv(list(messages)):
            work.wait()
        return received + 1

    tensor = own(dist.get_rank())
    return [compiled(f)(tensor) for f in (asynchronous, exchange, batch)]


def test_graphs_break_at_works_and_messages(outcomes):
    for rank, results in enumerate(outcomes.of(_works_and_messages)):
        expected = [2 * (own(0) + own(1)) + 1, 2 * own(1 - rank) + 1, 2 * own(1 - rank) + 1]
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 6))


def batch(step, ranks):
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(4, 6, generator=generator) for generator in generators])


def train(model, ranks):
    """Train for two steps; return the losses, whose second tells of the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch(0, ranks)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def mean_losses(results):
    """Return what the losses of all ranks' data are."""
    return [sum(losses) / SIZE for losses in zip(*results, strict=True)]


def _distributed_tensors():
    mesh = init_device_mesh("cpu", (SIZE,))

    def gathered(x):
        tensor = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return tensor.redistribute(mesh, [Replicate()]).to_local() * 2

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(), mesh, plan)
    result = compiled(gathered, fullgraph=True)(own(dist.get_rank()))
    return result, train(compiled(model), [0])


def test_distributed_tensors_inside_graphs(outcomes):
    expected = 2 * torch.cat([own(0), own(1)]), train(mlp(), [0])
    for result in outcomes.of(_distributed_tensors):
        torch.testing.assert_close(result, expected)


def _data_parallel():
    ranks = [dist.get_rank()]
    results = [
        train(compiled(DistributedDataParallel(mlp())), ranks),
        train(DistributedDataParallel(compiled(mlp())), ranks),
    ]
    with torch._dynamo.config.patch(optimize_ddp=False):
        results.append(train(compiled(DistributedDataParallel(mlp())), ranks))
    return results


def _sharded():
    ranks = [dist.get_rank()]
    layered = mlp()
    for layer in layered:
        layer.compile(backend="aot_eager")
    original = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=True)
    return [
        train(compiled(fully_shard(mlp())), ranks),
        train(fully_shard(layered), ranks),
        train(compiled(original), ranks),
    ]


@pytest.mark.parametrize("program", [_data_parallel, _sharded])
def test_compiled_models_train_as_one_process(outcomes, program):
    expected = train(mlp(), range(SIZE))
    assert expected[1] < expected[0]
    for kinds in zip(*outcomes.of(program), strict=True):
        torch.testing.assert_close(mean_losses(kinds), expected)
