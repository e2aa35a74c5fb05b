"""What else of torch stands on a group: functional collectives, meshes, checkpoints, pipelines."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Outcomes, run_torch

SIZE = 2


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(
        _functional,
        _functional_in_place,
        _functional_backward,
        _differentiable,
        _meshes,
        _checkpoints,
        _zero,
        _post_local,
        _join,
        _pipelines,
    )


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 41), nn.Linear(41, 3))


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def parameters_of(model):
    parameters = [p.detach().clone() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def own(rank):
    """Return the input of a rank."""
    return torch.arange(8.0).reshape(4, 2) + 10 * rank


ZERO, ONE = own(0), own(1)


def _waited(result):
    """Return plain tensors, as soon as they are there."""
    if isinstance(result, (list, tuple)):
        return [_waited(each) for each in result]
    return functional.wait_tensor(result).clone()


def _functional():
    warnings.simplefilter("ignore", FutureWarning)  # of names that torch has given up
    group, tensor = dist.group.WORLD, own(dist.get_rank())
    mesh = init_device_mesh("cpu", (SIZE,))
    both = [tensor, 2 * tensor]  # Gloo wants them to have one dtype
    calls = {
        **{
            op: lambda op=op: functional.all_reduce(tensor, op, group)
            for op in ("sum", "avg", "max", "min", "product")
        },
        "on a mesh": lambda: functional.all_reduce(tensor, "sum", (mesh, 0)),
        "by name": lambda: functional.all_reduce(tensor, "sum", group.group_name),
        "broadcast": lambda: functional.broadcast(tensor, 1, group),
        "rows": lambda: functional.all_gather_single(tensor, 0, group),
        "columns": lambda: functional.all_gather_tensor(tensor, 1, group),
        "scattered": lambda: functional.reduce_scatter_single(tensor, "sum", 0, group),
        "scattered columns": lambda: functional.reduce_scatter_tensor(tensor, "avg", 1, group),
        "exchanged": lambda: functional.all_to_all_single(tensor, None, None, group),
        "unevenly": lambda: functional.all_to_all_single(
            tensor, *([[1, 1], [1, 3]] if dist.get_rank() == 0 else [[3, 3], [1, 3]]), group
        ),
        "permuted": lambda: functional.permute_tensor(tensor.flatten(), [1, 0], group),
        "sums": lambda: functional.all_reduce_coalesced(both, "sum", group),
        "gathers": lambda: functional.all_gather_into_tensor_coalesced(both, group),
        "scatters": lambda: functional.reduce_scatter_tensor_coalesced(both, "sum", [0, 1], group),
    }
    return {name: _waited(call()) for name, call in calls.items()}


def test_functional_collectives(outcomes):
    total, stacked = ZERO + ONE, torch.cat([ZERO, ONE])
    for rank, results in enumerate(outcomes.of(_functional)):
        half = slice(2 * rank, 2 * rank + 2)
        cut = slice(0, 1) if rank == 0 else slice(1, 4)
        expected = {
            "sum": total,
            "avg": total / 2,
            "max": ONE,
            "min": ZERO,
            "product": ZERO * ONE,
            "on a mesh": total,
            "by name": total,
            "broadcast": ONE,
            "rows": stacked,
            "columns": torch.cat([ZERO, ONE], dim=1),
            "scattered": total[half],
            "scattered columns": total[:, rank : rank + 1] / 2,
            "exchanged": torch.cat([ZERO[half], ONE[half]]),
            "unevenly": torch.cat([ZERO[cut], ONE[cut]]),
            "permuted": own(1 - rank).flatten(),
            "sums": [total, 2 * total],
            "gathers": [stacked, 2 * stacked],
            "scatters": [total[half], 2 * total[:, rank : rank + 1]],
        }
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def _functional_in_place():
    group, tensor = dist.group.WORLD, own(dist.get_rank())
    gathered, scattered = torch.empty(8, 2), torch.empty(2, 2)
    summed, exchanged = tensor.clone(), torch.empty(4, 2)
    parts = [torch.empty(4, 2) for _ in range(SIZE)]
    results = [
        functional.all_gather_tensor_inplace(gathered, tensor, group),
        functional.reduce_scatter_tensor_inplace(scattered, tensor, "sum", group),
        functional.all_reduce_inplace(summed, "sum", group),
        functional.all_to_all_inplace(exchanged, tensor, group=group),
        functional.all_gather_inplace(parts, tensor, group),
    ]
    _waited(results)
    other = 1 - dist.get_rank()
    received, batched = torch.empty(4, 2), torch.empty(4, 2)
    sent = functional.isend_inplace(tensor, other)
    _waited([functional.irecv_inplace(received, other), sent])
    pair = functional.batch_p2p_ops_inplace(
        ["isend", "irecv"], [other, other], [0, 0], [tensor, batched], group.group_name
    )
    _waited(pair)
    return [gathered, scattered, summed, exchanged, *parts, received, batched]


def test_functional_collectives_in_place(outcomes):
    total = ZERO + ONE
    for rank, results in enumerate(outcomes.of(_functional_in_place)):
        half = slice(2 * rank, 2 * rank + 2)
        exchanged = torch.cat([ZERO[half], ONE[half]])
        received = [own(1 - rank), own(1 - rank)]
        expected = [torch.cat([ZERO, ONE]), total[half], total, exchanged, ZERO, ONE, *received]
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def _weighted(operation, *inputs):
    """Return the gradients of what all ranks compute together, each with weights of its own."""
    outputs = operation(*inputs)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    loss = sum((weights(o, dist.get_rank()) * o).sum() for o in outputs)
    loss.backward()
    return [i.grad for i in inputs]


def weights(tensor, rank):
    return torch.arange(1.0, tensor.numel() + 1).reshape(tensor.shape) * (rank + 2)


def _functional_backward():
    warnings.simplefilter("ignore", FutureWarning)
    group = dist.group.WORLD
    operations = [
        lambda t: functional.all_gather_tensor_autograd(t, 0, group),
        lambda t: functional.reduce_scatter_tensor_autograd(t, "sum", 0, group),
        lambda t: functional.all_to_all_single_autograd(t, None, None, group),
    ]
    tensor = own(dist.get_rank())
    return [_weighted(o, tensor.clone().requires_grad_()) for o in operations]


def test_functional_collectives_are_differentiable(outcomes):
    gathered = [weights(torch.empty(8, 2), rank) for rank in range(SIZE)]
    scattered = [weights(torch.empty(2, 2), rank) for rank in range(SIZE)]
    exchanged = [weights(torch.empty(4, 2), rank) for rank in range(SIZE)]
    for rank, results in enumerate(outcomes.of(_functional_backward)):
        half = slice(2 * rank, 2 * rank + 2)
        expected = [
            [sum(gathered).chunk(SIZE)[rank]],
            [torch.cat(scattered)],
            [torch.cat([exchanged[0][half], exchanged[1][half]])],
        ]
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def _differentiable():
    warnings.simplefilter("ignore", FutureWarning)

    def fresh():
        return own(dist.get_rank()).requires_grad_()

    def empty():
        return torch.empty(4, 2)

    return {
        "broadcast": _weighted(lambda t: differentiable.broadcast(t, 0), fresh()),
        "gather": _weighted(lambda t: differentiable.gather(t, 0), fresh()),
        "scatter": _weighted(lambda *t: differentiable.scatter(t, 0), fresh(), fresh()),
        "reduce": _weighted(lambda t: differentiable.reduce(t, 0), fresh()),
        "reduce_scatter": _weighted(
            lambda *t: differentiable.reduce_scatter(empty(), list(t)), fresh(), fresh()
        ),
        "all_gather": _weighted(differentiable.all_gather, fresh()),
        "all_to_all": _weighted(
            lambda *t: differentiable.all_to_all([empty(), empty()], list(t)), fresh(), fresh()
        ),
        "all_to_all_single": _weighted(
            lambda t: differentiable.all_to_all_single(empty(), t), fresh()
        ),
        "all_reduce": _weighted(differentiable.all_reduce, fresh()),
    }


def test_collectives_of_torch_distributed_nn_are_differentiable(outcomes):
    here = [weights(torch.empty(4, 2), rank) for rank in range(SIZE)]
    total = sum(here)
    for rank, results in enumerate(outcomes.of(_differentiable)):
        torch.testing.assert_close(results["all_reduce"], [total], rtol=0, atol=0)
        torch.testing.assert_close(results["all_gather"], [total], rtol=0, atol=0)
        torch.testing.assert_close(results["reduce_scatter"], here, rtol=0, atol=0)
        torch.testing.assert_close(results["all_to_all"], here, rtol=0, atol=0)
        root = [total] if rank == 0 else [torch.zeros(4, 2)]
        torch.testing.assert_close(results["broadcast"], root, rtol=0, atol=0)


def _meshes():
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("one", "all"))
    groups = [
        mesh["all"].get_group(),
        mesh.get_group("one"),
        mesh._flatten("flat").get_group(),
        DeviceMesh.from_group(dist.group.WORLD, "cpu").get_group(),
        DeviceMesh.from_group(
            mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=("one", "all")
        ).get_group("all"),
    ]
    tensor = torch.tensor([dist.get_rank() + 1.0])
    return [functional.all_reduce(tensor, "sum", group) + 0 for group in groups]


def test_meshes_and_their_groups(outcomes):
    for rank, results in enumerate(outcomes.of(_meshes)):
        assert [each.item() for each in results] == [3, rank + 1, 3, 3, 3]


def _checkpoints():
    def fresh():
        model = fully_shard(mlp())
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = fresh()
    model(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    name = Path.cwd() / dist.get_backend()
    checkpoint.save(state, checkpoint_id=f"{name}-saved")
    checkpoint.async_save(state, checkpoint_id=f"{name}-later").result()
    results = [parameters_of(model)]
    for which in ("saved", "later"):
        other, its_optimizer = fresh()
        model_state, optimizer_state = get_state_dict(other, its_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=f"{name}-{which}")
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        results.append(parameters_of(other))
    return results


def test_checkpoints_give_back_what_was_saved(outcomes):
    for saved, loaded, loaded_later in outcomes.of(_checkpoints):
        assert not torch.equal(saved[0], mlp()[0].weight)
        torch.testing.assert_close([loaded, loaded_later], [saved, saved], rtol=0, atol=0)


def _train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    return parameters_of(model)


def alone(kind, steps=3, **options):
    """Return what training on all data gives in one process."""
    model = mlp()
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.cat([batch(step, rank) for rank in range(SIZE)])
        model(data).square().mean().backward()
        optimizer.step()
    return parameters_of(model)


def _zero():
    # Importing these modules warns of a deprecation within torch: not here, in the ranks only.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    trained = _train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    states = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    return trained, states


def test_zero_redundancy_optimizer(outcomes):
    expected = alone(torch.optim.Adam, lr=0.01)
    for rank, (trained, states) in enumerate(outcomes.of(_zero)):
        torch.testing.assert_close(trained, expected)
        assert states == (0 if rank else 6)


def _overlap():
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    for step in (0, 0, 0, 0, 1, 2):
        model.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
    return parameters_of(model)


def test_zero_redundancy_optimizer_overlaps_with_backward():
    # Torch refuses this on Gloo, where it may hang. Buckets are rebuilt in the first steps, in
    # which parameters stay as they are.
    results = run_torch(_overlap, SIZE)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0][0], mlp()[0].weight)


def _post_local():
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(mlp())
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = post_local.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=2))
    return _train(model, optimizer, steps=5), _train(model, optimizer, steps=1)


def test_post_local_sgd_averages_from_time_to_time(outcomes):
    (averaged, apart), (averaged_there, apart_there) = outcomes.of(_post_local)
    torch.testing.assert_close(averaged, averaged_there, rtol=0, atol=0)
    assert not torch.equal(apart[0], apart_there[0])


def _join():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        _train(model, optimizer, steps=2 + dist.get_rank())
    return parameters_of(model)


def test_ranks_that_joined_shadow_the_others(outcomes):
    first, second = outcomes.of(_join)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first[0], alone(torch.optim.SGD, steps=2, lr=0.1)[0])


def stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


INPUTS, TARGET = torch.cat([batch(0, 0), batch(1, 0)]), torch.ones(8, 6)


def distance(output, target):
    return (output - target).square().mean()


def _pipelines():
    rank, results = dist.get_rank(), {}
    for kind, mine in {
        ScheduleGPipe: [rank],
        Schedule1F1B: [rank],
        ScheduleInterleaved1F1B: [rank, rank + SIZE],
        ScheduleZBVZeroBubble: [rank, 2 * SIZE - 1 - rank],
    }.items():
        count = SIZE * len(mine)
        layers = stages(count)
        made = [PipelineStage(layers[i], i, count, torch.device("cpu")) for i in mine]
        schedule = kind(made if len(made) > 1 else made[0], 4, loss_fn=distance)
        losses = []
        last = {"target": TARGET, "losses": losses} if count - 1 in mine else {}
        schedule.step(*([INPUTS] if rank == 0 else []), **last)
        gradients = {str(i): [p.grad for p in layers[i].parameters()] for i in mine}
        results[kind.__name__] = count, [each.detach() for each in losses], gradients
    return results


def test_pipelines_compute_what_the_whole_model_does(outcomes):
    for results in outcomes.of(_pipelines):
        for count, losses, gradients in results.values():
            layers = stages(count)
            output = nn.Sequential(*layers)(INPUTS)
            loss = distance(output, TARGET)
            loss.backward()
            for stage, ours in gradients.items():
                theirs = [p.grad for p in layers[int(stage)].parameters()]
                torch.testing.assert_close(ours, theirs)
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
