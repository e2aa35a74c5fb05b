"""Computing in a lower precision than parameters are kept in."""

import copy

import pytest
import torch
from models import batches, loss_of, mlp, own
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.parallel.precision import MixedPrecision
from phalanx.testing import run_ranks

BF16 = torch.bfloat16


class Watched(nn.Module):
    """Notes in which types it is run."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen = set()

    def forward(self, x, *, index=None):
        self.seen.add((x.dtype, self.net[0].weight.dtype, self.scale.dtype, self.count.dtype))
        assert index is None or index.dtype == torch.int64
        return self.net(x) * self.scale


def _trains(precision, options):
    model = Watched()
    alone = copy.deepcopy(model)
    ddp = DDP(model, mixed_precision=precision, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches(4):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(ddp(own(batch), index=torch.tensor([1]))).float().backward()
        loss_of(alone(batch)).backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
        optimizer.step()
        reference.step()
    for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.1)
        assert not torch.equal(ours, theirs)
    assert all(t.dtype != BF16 for name, t in ddp.state_dict().items() if "scale" not in name)
    return model.seen, [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize(
    "precision",
    [
        MixedPrecision(BF16),
        MixedPrecision(BF16, reduce_dtype=torch.float32),
        MixedPrecision(BF16, BF16, BF16),
    ],
)
def test_trains_like_full_precision(precision, options):
    results = run_ranks(_trains, 2, precision, options)
    for seen, parameters in results:
        buffers = precision.buffer_dtype or torch.float32
        assert seen == {(BF16, BF16, buffers, torch.int64)}
        for a, b in zip(parameters, results[0][1], strict=True):
            assert torch.equal(a, b)


def _only_reduces():
    ddp = DDP(mlp(), mixed_precision=MixedPrecision(reduce_dtype=torch.float16))
    loss_of(ddp(own(batches(1)[0]))).backward()
    return [p.grad for p in ddp.parameters()]


def test_only_the_reduction_in_low_precision():
    first, second = run_ranks(_only_reduces, 2)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        assert torch.equal(a, a.half().float())


def _accumulates():
    model = mlp()
    alone = copy.deepcopy(model)
    ddp = DDP(model, mixed_precision=MixedPrecision(BF16, torch.float32))
    data = batches(3)
    with ddp.no_sync():
        for batch in data[:2]:
            loss_of(ddp(own(batch))).backward()
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
    loss_of(ddp(own(data[2]))).backward()
    for batch in data:
        loss_of(alone(batch)).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=0.03, rtol=0.1)
    grads = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        ddp(own(data[0]))
    assert all(p.dtype == torch.float32 for p in ddp.parameters())
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
    return grads


def test_accumulation_and_evaluation():
    first, second = run_ranks(_accumulates, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _autocast():
    ddp = DDP(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            output = ddp(own(batches(1)[0]))
            assert output.dtype == BF16
            loss = loss_of(output.float() - 1)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def test_autocast():
    first, second = run_ranks(_autocast, 2)
    assert first == second
    assert first[-1] < first[0] / 2
