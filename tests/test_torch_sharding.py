"""Torch's sharded models and tensors on the backend: FSDP, DTensor, tensor parallelism."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_ranks import Outcomes

SIZE = 2


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(
        _fully_shard,
        _fully_shard_in_low_precision,
        _fully_shard_otherwise,
        _fsdp1,
        _redistribute,
        _operate,
        _tensor_parallel,
        _sequence_parallel,
        _vocabulary_parallel,
    )


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 41), nn.Linear(41, 3))


def batch(step, ranks):
    parts = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(4, 6, generator=generator) for generator in parts])


def whole(tensor):
    """Return all of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model, ranks, clip=False, parameters=None):
    """Train on the batches of some ranks; return the norms, if clipped, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, ranks)).float().square().mean().backward()
        if clip:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return norms, parameters() if parameters else [whole(p) for p in model.parameters()]


def own():
    return [dist.get_rank()]


def sharded(model, **options):
    """Shard each layer, then the rest."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def _fully_shard():
    model = sharded(mlp())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    trained = train(model, own(), clip=True)
    state = [whole(value) for value in model.state_dict().values()]
    return *trained, state


def test_fully_shard_trains_as_one_process(outcomes):
    norms, parameters = train(mlp(), range(SIZE), clip=True)
    for result in outcomes.of(_fully_shard):
        torch.testing.assert_close(result, (norms, parameters, parameters))


def _fully_shard_in_low_precision():
    halves = [torch.bfloat16, torch.float32], [torch.bfloat16, torch.bfloat16]
    return [
        train(sharded(mlp(), mp_policy=MixedPrecisionPolicy(*dtypes)), own())[1]
        for dtypes in halves
    ]


def test_fully_shard_in_low_precision(outcomes):
    alone = train(mlp(), range(SIZE))[1]
    for kinds in outcomes.of(_fully_shard_in_low_precision):
        torch.testing.assert_close(kinds, [alone, alone], rtol=0.05, atol=0.02)
        assert all(p.dtype is torch.float32 for p in kinds[0])


def _fully_shard_otherwise():
    kept = sharded(mlp(), reshard_after_forward=False)
    results = {"kept": train(kept, own())[1]}
    for name, shape in {"hybrid": (1, SIZE), "replicated": (SIZE, 1)}.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        results[name] = train(sharded(mlp(), mesh=mesh), own())[1]
    summed = sharded(mlp())
    summed.set_force_sum_reduction_for_comms(True)
    results["summed"] = train(summed, own())[1]
    return results


def test_fully_shard_in_other_ways(outcomes):
    alone = train(mlp(), range(SIZE))[1]
    for results in outcomes.of(_fully_shard_otherwise):
        torch.testing.assert_close(results, dict.fromkeys(results, alone))


def _fsdp1():
    results = []
    for strategy, original in itertools.product(
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP), (False, True)
    ):
        model = FullyShardedDataParallel(
            mlp(),
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=original,
        )

        def parameters(model=model):
            with FullyShardedDataParallel.summon_full_params(model):
                return torch.cat([p.detach().flatten() for p in model.parameters()])

        results.append(train(model, own(), parameters=parameters)[1])
        model.clip_grad_norm_(0.1)
    return results


def test_fully_sharded_data_parallel_trains_as_one_process(outcomes):
    alone = torch.cat([p.flatten() for p in train(mlp(), range(SIZE))[1]])
    for results in outcomes.of(_fsdp1):
        torch.testing.assert_close(results, [alone] * len(results))


WHOLE = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
PLACEMENTS = Shard(0), Shard(1), Replicate()
REDUCTIONS = {
    "sum": 2 * WHOLE + 1,
    "avg": WHOLE + 0.5,
    "max": WHOLE + 1,
    "min": WHOLE,
}


def _redistribute():
    mesh = init_device_mesh("cpu", (SIZE,))
    results = {}
    for old, new in itertools.product(PLACEMENTS, PLACEMENTS):
        tensor = distribute_tensor(WHOLE, mesh, [old]).redistribute(mesh, [new])
        results[f"{old} to {new}"] = tensor.to_local().clone(), whole(tensor)
    for op, new in itertools.product(REDUCTIONS, PLACEMENTS):
        local = DTensor.from_local(WHOLE + dist.get_rank(), mesh, [Partial(op)])
        tensor = local.redistribute(mesh, [new])
        results[f"{op} to {new}"] = tensor.to_local().clone(), whole(tensor)
    return results


def test_tensors_are_redistributed(outcomes):
    for rank, results in enumerate(outcomes.of(_redistribute)):
        for name, (local, all_of_it) in results.items():
            old, _, new = name.partition(" to ")
            expected = REDUCTIONS.get(old, WHOLE)
            torch.testing.assert_close(all_of_it, expected)
            if new != str(Replicate()):
                # Like DTensor, `chunk` gives the first ranks more.
                expected = expected.chunk(SIZE, dim=int(new[2]))[rank]
            torch.testing.assert_close(local, expected)


def _operate():
    mesh = init_device_mesh("cpu", (SIZE,))
    rows = distribute_tensor(WHOLE, mesh, [Shard(0)])
    columns = distribute_tensor(WHOLE.t().contiguous(), mesh, [Shard(1)])
    model = distribute_module(mlp(), mesh)
    inputs = distribute_tensor(batch(0, range(SIZE)), mesh, [Shard(0)])
    model(inputs).square().mean().backward()
    return {
        "product": whole(rows @ columns),
        "softmax": whole(distribute_tensor(WHOLE, mesh, [Shard(1)]).softmax(1)),
        "norm": whole(rows.norm()),
        "gradients": [whole(p.grad) for p in model.parameters()],
    }


def test_operations_and_modules_on_distributed_tensors(outcomes):
    model = mlp()
    model(batch(0, range(SIZE))).square().mean().backward()
    expected = {
        "product": WHOLE @ WHOLE.t(),
        "softmax": WHOLE.softmax(1),
        "norm": WHOLE.norm(),
        "gradients": [p.grad for p in model.parameters()],
    }
    for results in outcomes.of(_operate):
        torch.testing.assert_close(results, expected)


def feed_forward(normed=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 6)]
    return (
        nn.Sequential(nn.LayerNorm(6), *layers, nn.LayerNorm(6))
        if normed
        else nn.Sequential(*layers)
    )


def passed(model, inputs):
    """Return the output of a model and its gradients."""
    output = model(inputs)
    whole_output = output.full_tensor() if isinstance(output, DTensor) else output
    (whole_output * torch.arange(6.0)).square().mean().backward()
    return whole(whole_output), [whole(p.grad) for p in model.parameters()]


def _tensor_parallel():
    mesh = init_device_mesh("cpu", (SIZE,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return passed(parallelize_module(feed_forward(), mesh, plan), batch(0, [0]))


def test_tensor_parallelism(outcomes):
    expected = passed(feed_forward(), batch(0, [0]))
    for result in outcomes.of(_tensor_parallel):
        torch.testing.assert_close(result, expected)


SEQUENCE = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))


def _sequence_parallel():
    mesh = init_device_mesh("cpu", (SIZE,))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(),
    }
    part = SEQUENCE.chunk(SIZE, dim=1)[dist.get_rank()]
    return passed(parallelize_module(feed_forward(normed=True), mesh, plan), part)


def test_sequence_parallelism(outcomes):
    expected = passed(feed_forward(normed=True), SEQUENCE)
    for result in outcomes.of(_sequence_parallel):
        torch.testing.assert_close(result, expected)


def vocabulary():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 12))


def _vocabulary_parallel():
    mesh = init_device_mesh("cpu", (SIZE,))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(vocabulary(), mesh, plan)
    with loss_parallel():
        loss = F.cross_entropy(model(torch.arange(10)), torch.arange(10))
        loss.backward()
    return whole(loss), [whole(p.grad) for p in model.parameters()]


def test_a_vocabulary_and_its_loss_in_parallel(outcomes):
    model = vocabulary()
    loss = F.cross_entropy(model(torch.arange(10)), torch.arange(10))
    loss.backward()
    for result in outcomes.of(_vocabulary_parallel):
        torch.testing.assert_close(result, (loss.detach(), [p.grad for p in model.parameters()]))


def _two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = feed_forward()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])
    return train(model, [mesh.get_local_rank("data")])[1]


def test_data_and_tensor_parallelism_in_two_dimensions():
    expected = train(feed_forward(), range(2))[1]
    for trained in Outcomes(_two_dimensions, size=4).of(_two_dimensions, rtol=1e-5, atol=1e-6):
        torch.testing.assert_close(trained, expected)
