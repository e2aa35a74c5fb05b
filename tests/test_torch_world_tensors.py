"""torch_world: distributed tensors, meshes and models, against the same on processes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo import eval_frame
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import run_torch

from phalanx.testing import torch_world

# What torch says of random operators on a mesh of CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators")

SIZE = 2


def sharded(tensor, mesh):
    return distribute_tensor(tensor, mesh, [Shard(0)])


RANDOM = {
    "bernoulli": lambda mesh: torch.bernoulli(sharded(torch.full((4,), 0.5), mesh)),
    "dropout": lambda mesh: F.dropout(sharded(torch.ones(6), mesh)),
    "exponential_": lambda mesh: sharded(torch.ones(4), mesh).exponential_(),
    "geometric_": lambda mesh: sharded(torch.ones(4), mesh).geometric_(0.5),
    "normal_": lambda mesh: sharded(torch.ones(4), mesh).normal_(),
    "rand_like": lambda mesh: torch.rand_like(sharded(torch.ones(4), mesh)),
}


def draw():
    mesh = init_device_mesh("cpu", (SIZE,))
    drawn = {}
    for name, operation in RANDOM.items():
        torch.manual_seed(3 + dist.get_rank())
        drawn[name] = operation(mesh).full_tensor(), torch.rand(2)
    return drawn


def train():
    """Train models with dropout; return their parameters and the next random numbers."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU()) for _ in range(4)]
    replicated = DistributedDataParallel(nn.Sequential(*layers[:2]))
    split = fully_shard(nn.Sequential(*layers[2:]))
    torch.manual_seed(dist.get_rank())
    parameters = []
    for model in (replicated, split):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        parameters += [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in parameters], torch.rand(3)


def draw_and_train():
    return draw(), train()


def test_random_numbers_are_those_of_processes():
    on_threads = torch_world(SIZE).run(draw_and_train)
    torch.testing.assert_close(on_threads, run_torch(draw_and_train, SIZE), rtol=0, atol=0)


def test_operators_that_draw_may_communicate():
    def program():
        mesh = init_device_mesh("cpu", (SIZE,))
        summed = DTensor.from_local(torch.ones(64), mesh, [Partial()])
        return [torch.native_dropout(summed, 0.5, True)[0].full_tensor().max() for _ in range(4)]

    assert torch_world(SIZE).run(program) == [[4.0] * 4] * SIZE


def test_meshes_of_ranks_differ_and_are_put_back():
    lock = ShardingPropagator._fake_mode_lock

    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        assert ShardingPropagator._fake_mode_lock is not lock
        part = mesh["model"]
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=part.get_group())
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        return mesh, mesh.get_coordinate(), tensor.item()

    meshes, places, sums = zip(*torch_world(4).run(program), strict=True)
    assert len(set(meshes)) == 4
    assert list(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(sums) == [1, 1, 5, 5]
    assert ShardingPropagator._fake_mode_lock is lock
    assert "_custom_op_handlers" not in vars(OpDispatcher)


def test_a_mesh_that_another_rank_has_sent():
    def program():
        mesh = init_device_mesh("cpu", (SIZE,))
        assert hash(mesh)
        found = [None] * SIZE
        dist.all_gather_object(found, mesh)
        return found == [mesh] * SIZE, [hash(other) == hash(mesh) for other in found]

    assert torch_world(SIZE).run(program) == [(True, [True] * SIZE)] * SIZE


def test_nothing_keeps_meshes_of_worlds_that_are_over():
    def program():
        mesh = init_device_mesh("cpu", (SIZE,))
        tensor = sharded(torch.ones(4, 4), mesh)
        assert (tensor @ tensor).full_tensor().sum() == 64
        return weakref.ref(mesh), weakref.ref(mesh.get_group())

    references = torch_world(SIZE).run(program)
    gc.collect()
    assert [(mesh(), group()) for mesh, group in references] == [(None, None)] * SIZE


def test_a_context_of_one_rank_is_not_that_of_others():
    def program():
        handlers = DTensor._op_dispatcher
        mesh = init_device_mesh("cpu", (2,))
        usual = len(handlers._custom_op_handlers)
        if dist.get_rank() == 0:
            with loss_parallel():
                dist.barrier()
                return len(handlers._custom_op_handlers) > usual
        dist.barrier()
        logits = distribute_tensor(torch.randn(2, 4), mesh, [Replicate()], src_data_rank=None)
        F.log_softmax(logits, 1)
        return len(handlers._custom_op_handlers) > usual

    assert torch_world(2).run(program) == [True, False]


@torch.compile(backend="eager")
def scaled(tensor):
    return tensor * (10 * dist.get_world_size() + dist.get_rank())


def test_each_rank_has_what_it_compiled():
    def program():
        values = []
        for _ in range(2):
            values += [scaled(torch.ones(1)).item(), shifted(torch.ones(1)).item()]
            dist.barrier()
        return values

    shifted = torch.compile(lambda tensor: tensor + dist.get_rank(), backend="eager")
    decide = eval_frame._callback_from_stance
    for size in (2, 3, 2):
        expected = [[10 * size + rank, 1 + rank] * 2 for rank in range(size)]
        assert torch_world(size).run(program) == expected
    assert eval_frame._callback_from_stance is decide
