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


def test_processes():
    kind = "buffers"
    train([0, 3], kind=kind, interval=2, divide=False, throw=False, ranks="processes")
