"""Optimizers that step during backward, alone and behind DistributedDataParallel's reductions."""

import copy

import pytest
import torch
from models import batches, loss_of, mlp, own
from test_zero import assert_same
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from phalanx.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from phalanx.testing import run_ranks

ADAM = (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
BUCKET = 0.0004  # MiB: several buckets


def inputs(steps=4):
    torch.manual_seed(3)
    return [torch.randn(4, 6) for _ in range(steps)]


def train(model, optimizers, given):
    for x in given:
        model.zero_grad()
        loss_of(model(x)).backward()
        for optimizer in optimizers:
            optimizer.step()


def test_one_optimizer_per_parameter():
    model, alone = mlp(), mlp()
    _apply_optimizer_in_backward(ADAM[0], model.parameters(), ADAM[1])
    train(model, [], inputs())
    train(alone, [ADAM[0](alone.parameters(), **ADAM[1])], inputs())
    assert_same(model.parameters(), alone.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_several_optimizers_and_shared_parameters():
    def shared():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        model[1].weight = model[0].weight
        return model

    model, alone = shared(), shared()
    for kind, options in (ADAM, SGD):
        _apply_optimizer_in_backward(kind, model.parameters(), options)
    train(model, [], inputs())
    train(alone, [kind(alone.parameters(), **options) for kind, options in (ADAM, SGD)], inputs())
    assert_same(model.parameters(), alone.parameters())
    assert len(_get_in_backward_optimizers(model)) == 2 * 3
    assert model[0].weight._optimizer_classes == [ADAM[0], SGD[0]]
    assert model[0].weight._optimizer_kwargs == [ADAM[1], SGD[1]]


def test_without_a_hook_somebody_else_steps():
    model = mlp()
    _apply_optimizer_in_backward(*SGD[:1], model.parameters(), SGD[1], register_hook=False)
    loss_of(model(inputs(1)[0])).backward()
    assert_same(model.parameters(), mlp().parameters())
    for optimizer in _get_in_backward_optimizers(model):
        optimizer.step()
    assert not torch.equal(model[0].weight, mlp()[0].weight)


def test_copies_have_no_optimizers():
    model = mlp()
    _apply_optimizer_in_backward(SGD[0], model.parameters(), SGD[1])
    assert not _get_in_backward_optimizers(copy.deepcopy(model))


def _reduced(optimizer, before, uneven, options):
    kind, arguments = optimizer
    model, alone = mlp(), DDP(mlp(), bucket_cap_mb=BUCKET)
    if before:
        _apply_optimizer_in_backward(kind, model.parameters(), arguments)
    ddp = DDP(model, bucket_cap_mb=BUCKET, **options)
    if not before:
        _apply_optimizer_in_backward(kind, model.parameters(), arguments)
    plain = kind(alone.parameters(), **arguments)
    given = [own(batch) for batch in batches(4 + (2 * dist.get_rank() if uneven else 0))]
    with ddp.join(enable=uneven, divide_by_initial_world_size=False):
        train(ddp, [], given)
    with alone.join(enable=uneven, divide_by_initial_world_size=False):
        train(alone, [plain], given)
    assert_same(ddp.parameters(), alone.parameters())
    assert all(p.grad is None for p in model.parameters())
    # Also a rank that has joined keeps the state of its optimizers up to date.
    return {int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in optimizers_of(model)}


def optimizers_of(model):
    return [each for each in _get_in_backward_optimizers(model) if isinstance(each, ADAM[0])]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["plain", "view", "static"],
)
def test_reduced_gradients(options, before, uneven):
    assert run_ranks(_reduced, 2, ADAM, before, uneven, options) == [{6 if uneven else 4}] * 2


def test_processes():
    run_ranks(_reduced, 2, SGD, True, True, {}, ranks="processes")


class Branches(nn.Module):
    """Uses another layer in every iteration, and one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        return self.layers[self.turn % 2](x)


def test_unused_parameters_stay_as_they_are():
    def work():
        model, alone = Branches(), DDP(Branches(), find_unused_parameters=True)
        _apply_optimizer_in_backward(ADAM[0], model.parameters(), ADAM[1])
        ddp = DDP(model, find_unused_parameters=True)
        given = [own(batch) for batch in batches(4)]
        train(ddp, [], given)
        train(alone, [ADAM[0](alone.parameters(), **ADAM[1])], given)
        assert_same(ddp.parameters(), alone.parameters())
        assert_same(model.layers[2].parameters(), Branches().layers[2].parameters())
        assert all(p.grad is None for p in model.parameters())

    run_ranks(work, 2)


def test_ignored_parameters_are_stepped_by_their_own_gradients():
    def work():
        model = mlp()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        _apply_optimizer_in_backward(SGD[0], model.parameters(), SGD[1])
        train(DDP(model, bucket_cap_mb=BUCKET), [], [own(batch) for batch in batches(1)])
        return {name: p.detach() for name, p in model.named_parameters()}

    first, second = run_ranks(work, 2)
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["0.weight"]
    assert not torch.equal(first["2.weight"], mlp()[2].weight)


def test_only_some_parameters():
    def work():
        model, alone = mlp(), DDP(mlp(), bucket_cap_mb=BUCKET)
        _apply_optimizer_in_backward(ADAM[0], model[0].parameters(), ADAM[1])
        ddp = DDP(model, bucket_cap_mb=BUCKET)
        given = [own(batch) for batch in batches(4)]
        train(ddp, [SGD[0](model[2:].parameters(), **SGD[1])], given)
        train(
            alone,
            [
                ADAM[0](alone.module[0].parameters(), **ADAM[1]),
                SGD[0](alone.module[2:].parameters(), **SGD[1]),
            ],
            given,
        )
        assert_same(ddp.parameters(), alone.parameters())

    run_ranks(work, 2)


def test_mixed_precision():
    def work():
        mixed = dist.parallel.precision.MixedPrecision(param_dtype=torch.bfloat16)
        model, alone = mlp(), DDP(mlp(), mixed_precision=mixed)
        _apply_optimizer_in_backward(ADAM[0], model.parameters(), ADAM[1])
        ddp = DDP(model, mixed_precision=mixed)
        given = [own(batch) for batch in batches(4)]
        train(ddp, [], given)
        train(alone, [ADAM[0](alone.parameters(), **ADAM[1])], given)
        assert_same(ddp.parameters(), alone.parameters())
        with pytest.raises(ValueError, match="mixed_precision"):
            alone._register_fused_optim(torch.optim.SGD, lr=0.1)

    run_ranks(work, 2)


def _fused(optimizer, some, uneven, options):
    kind, arguments = optimizer
    ddp, alone = (DDP(mlp(), bucket_cap_mb=BUCKET, **options) for _ in range(2))
    chosen = [list(each.parameters())[: 3 if some else None] for each in (ddp, alone)]
    arguments = dict(arguments)
    rate = arguments.pop("lr")
    ddp._register_fused_optim(kind, rate, optim_params=chosen[0] if some else None, **arguments)
    plain = kind(chosen[1], rate, **arguments)
    given = [own(batch) for batch in batches(4 + (2 * dist.get_rank() if uneven else 0))]
    with ddp.join(enable=uneven):
        train(ddp, [], given)
    with alone.join(enable=uneven):
        train(alone, [plain], given)
    assert_same(ddp.parameters(), alone.parameters())
    assert torch.equal(ddp.module[3].weight, mlp()[3].weight) == some
    if not uneven:
        assert_same(*[[p.grad for p in each.parameters()] for each in (ddp, alone)])


@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}])
def test_fused_optimizer(optimizer, some, uneven, options):
    run_ranks(_fused, 2, optimizer, some, uneven, options)


def test_wrong_use_is_told():
    def work():
        ddp = DDP(mlp())
        with pytest.raises(ValueError, match="LBFGS needs a closure"):
            ddp._register_fused_optim(torch.optim.LBFGS)
        with pytest.raises(ValueError, match="must implement method step_param"):
            _OptimizerHookState(object())

    run_ranks(work, 1)


def test_own_optimizers_need_only_step_one_parameter():
    class Descent:
        def step_param(self, param, gradient):
            param.data.sub_(gradient, alpha=0.1)

    def average(state, bucket):
        work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
        return work.get_future()

    def work():
        ddp, alone = (DDP(mlp(), bucket_cap_mb=BUCKET) for _ in range(2))
        ddp.register_comm_hook(None, _hook_then_optimizer(average, _OptimizerHookState(Descent())))
        given = [own(batch) for batch in batches(3)]
        train(ddp, [], given)
        train(alone, [torch.optim.SGD(alone.parameters(), lr=0.1)], given)
        assert_same(ddp.parameters(), alone.parameters())

    run_ranks(work, 2)


def _two_optimizers():
    rank = dist.get_rank()
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(1.0)
    for rate in (1.0, 0.5):
        _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": rate})
    ddp = DDP(layer)
    ddp(torch.tensor([[1.0, 2.0]]) * (rank + 1)).sum().backward()
    return layer.weight.tolist()


def test_two_optimizers_of_a_parameter_step_by_the_average():
    # The average over ranks 1, 2, 3 is [2, 4]; the rates add up to 1.5.
    assert run_ranks(_two_optimizers, 3) == [[[-2.0, -5.0]]] * 3
