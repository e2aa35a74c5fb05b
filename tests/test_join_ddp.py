"""DistributedDataParallel with uneven inputs: every kind of model, hook and schedule."""

from contextlib import nullcontext

import pytest
import torch
from models import mlp
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from phalanx.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from phalanx.testing import run_ranks


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x):
        return self.layers(x)


class Unused(nn.Module):
    """One rank never uses the first layer."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.rank = rank
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(x if dist.get_rank() == self.rank else self.first(x))


def power_sgd():
    state = PowerSGDState(
        None,
        start_powerSGD_iter=1,
        warm_start=False,
        use_error_feedback=False,
        min_compression_rate=0.5,
    )
    return state, powerSGD_hook


# Model, arguments, hook.
KINDS = {
    "plain": (mlp, {}, None),
    "view": (mlp, {"gradient_as_bucket_view": True}, None),
    "static": (mlp, {"static_graph": True}, None),
    "buffers": (Buffers, {}, None),
    "unused by the last": (lambda: Unused(1), {"find_unused_parameters": True}, None),
    "unused by the first": (lambda: Unused(0), {"find_unused_parameters": True}, None),
    "average": (mlp, {}, lambda: (None, allreduce_hook)),
    "half": (mlp, {}, lambda: (None, fp16_compress_hook)),
    "power": (mlp, {}, power_sgd),
}


def _train(kind, lengths, interval, divide, throw):
    make, options, hook = KINDS[kind]
    rank = dist.get_rank()
    ddp = DDP(make(), bucket_cap_mb=0.0004, **options)
    if hook is not None:
        ddp.register_comm_hook(*hook())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(rank)
    done, error = 0, ""
    try:
        with ddp.join(divide, throw_on_early_termination=throw):
            for i in range(lengths[rank]):
                with nullcontext() if i % interval == 0 else ddp.no_sync():
                    ddp(torch.randn(4, 6)).square().mean().backward()
                if i % interval == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                done += 1
    except RuntimeError as caught:
        error = str(caught)
    assert ddp._get_ddp_logging_data()["join_uneven_inputs"]
    # Who stops with the first does not copy buffers once more.
    compared = ddp.named_parameters() if throw else ddp.state_dict().items()
    tensors = {name: tensor.detach().clone() for name, tensor in compared}
    # All go on together afterwards.
    ddp.zero_grad()
    ddp(torch.ones(4, 6)).sum().backward()
    grads = [p.grad for p in ddp.parameters()]
    return done, error, tensors, grads


def train(lengths, *args, **kwargs):
    results = run_ranks(_train, len(lengths), *args, lengths=lengths, **kwargs)
    _, _, tensors, grads = results[0]
    for _, _, other, other_grads in results[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in tensors.items())
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
    assert not any(torch.isnan(tensor).any() for tensor in tensors.values())
    return [(done, error) for done, error, _, _ in results]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("lengths", [[0, 3], [5, 8], [7, 2], [1, 0, 9]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_end_with_one_model(kind, lengths, interval, divide):
    done = train(lengths, kind=kind, interval=interval, divide=divide, throw=False)
    assert done == [(length, "") for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
def test_all_stop_with_the_first(kind):
    results = train([5, 2], kind=kind, interval=1, divide=True, throw=True)
    assert [done for done, _ in results] == [2, 2]
    assert "Detected at least one rank that exhausted inputs" in results[0][1]
    assert "Rank 1 exhausted all inputs" in results[1][1]


def _keeps(options):
    """Return a rank's gradients after its last own step, and after all have joined."""
    rank = dist.get_rank()
    model = mlp(width=5)
    ddp = DDP(model, bucket_cap_mb=0.0001, **options)
    with ddp.join():
        for step in range((2, 4, 1)[rank]):
            ddp.zero_grad()
            x = torch.full((2 + rank, 6), (step + 1.0) * (rank + 1))
            ddp(x).square().mean().backward()
        held = [p.grad for p in model.parameters()]
        before = [grad.clone() for grad in held]
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, grad)
    if not options.get("gradient_as_bucket_view"):  # which may be written over
        assert all(map(torch.equal, held, before))


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"skip_all_reduce_unused_params": True}],
    ids=str,
)
def test_a_rank_that_has_joined_keeps_its_gradients(options):
    run_ranks(_keeps, 3, options)


def _leaves_alone():
    """Join with parameters to ignore, and buffers that are each rank's own."""
    rank = dist.get_rank()
    model = Buffers()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["layers.0.bias"])
    ddp = DDP(model, forward_sync_buffers=False)
    with ddp.join():
        for step in range((1, 3, 2)[rank]):
            ddp(torch.arange(24.0).view(4, 6) * (rank + 1) + step).sum().backward()
        model.layers[0].bias.data.fill_(float(rank))
        model.layers[1].running_mean.fill_(float(rank))
    return model.layers[0].bias.tolist(), model.layers[1].running_mean.tolist()


def test_what_is_each_ranks_own_stays_so():
    for rank, (bias, mean) in enumerate(run_ranks(_leaves_alone, 3)):
        assert bias == [rank] * 4
        assert mean == [rank] * 4


def _in_groups():
    """Two groups whose ranks have different numbers of inputs, each on its own."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    group = groups[rank in (1, 2)]
    ddp = DDP(Buffers(), process_group=group)
    with ddp.join():
        for step in range((1, 2, 4, 3)[rank]):
            ddp(torch.arange(24.0).view(4, 6) * (rank + 1) + step).sum().backward()
    return [tensor.clone() for tensor in ddp.state_dict().values()]


def test_groups_join_apart():
    results = run_ranks(_in_groups, 4)
    for first, second in ((0, 3), (1, 2)):
        assert all(map(torch.equal, results[first], results[second]))


def test_processes():
    kind = "buffers"
    train([0, 3], kind=kind, interval=2, divide=False, throw=False, ranks="processes")
