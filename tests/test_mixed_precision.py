"""Computing in a lower precision than parameters are kept in."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from models import batches, loss_of, mlp, own
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.parallel.precision import MixedPrecision, cast_floats
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


class Rows(nn.Module):
    """A table with sparse gradients, of which not every rank uses rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 3, sparse=True)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, ids):
        return self.layer(x if ids is None else x + self.table(ids))


def _sparse(reduce_dtype):
    rank = dist.get_rank()
    model = Rows()
    ddp = DDP(
        model,
        mixed_precision=MixedPrecision(torch.float32, reduce_dtype),
        find_unused_parameters=True,
    )
    for _ in range(2):
        ddp.zero_grad()
        ids = None if rank == 1 else torch.tensor([rank, 3])
        (ddp(torch.ones(2, 3), ids).sum() * (rank + 1) / 3).backward()
    return model.table.weight.grad, model.layer.weight.detach()


@pytest.mark.parametrize("reduce_dtype", [BF16, torch.float64])
def test_sparse_gradients_are_reduced_in_the_type_asked_for(reduce_dtype):
    for grad, weight in run_ranks(_sparse, 3, reduce_dtype):
        assert grad.dtype is torch.float32
        parts = [weight.sum(0).mul(rank + 1).div(3).to(reduce_dtype) for rank in range(3)]
        true = torch.stack([parts[0], torch.zeros_like(parts[0]), parts[2], parts[0] + parts[2]])
        tolerance = 0.02 if reduce_dtype is BF16 else 1e-6
        torch.testing.assert_close(
            grad.to_dense(), true.float() / 3, rtol=tolerance, atol=tolerance
        )
        assert torch.equal(grad.to_dense(), grad.to_dense().to(reduce_dtype).float())


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, *, scale):
        assert x.dtype is scale.dtype is BF16
        return self.layer(x) * scale


def _keywords():
    ddp = DDP(Keywords(), mixed_precision=MixedPrecision(BF16))
    ddp(torch.ones(2, 3), scale=torch.ones(2)).sum().backward()


def test_keyword_arguments_are_converted():
    run_ranks(_keywords, 2)


def _refused_between():
    model = mlp(width=4)
    alone = copy.deepcopy(model)
    model[0].bias.requires_grad_(False)
    ddp = DDP(model.double(), mixed_precision=MixedPrecision(torch.float32))
    batch = batches(1)[0]
    output = ddp(own(batch).double())
    model[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="was frozen"):
        ddp(own(batch).double())
    assert model[0].weight.dtype is torch.float32  # of the pass that is still to be differentiated
    model[0].bias.requires_grad_(False)
    loss_of(output).backward()
    loss_of(alone(batch)).backward()
    assert model[0].weight.grad.dtype is torch.float64
    torch.testing.assert_close(model[0].weight.grad.float(), alone[0].weight.grad)


def test_a_forward_pass_that_is_refused_leaves_the_one_before_alone():
    run_ranks(_refused_between, 3)


@dataclass
class Measured:
    """An input with a field that its constructor does not take."""

    values: torch.Tensor
    count: int = field(init=False, default=0)


def test_inputs_of_any_kind_are_converted():
    given = Measured(torch.ones(2))
    ids = torch.tensor([1, 2])
    converted = cast_floats([given, {"ids": ids}, (torch.ones(1), "text")], BF16)
    assert converted[0].values.dtype is BF16
    assert given.values.dtype is torch.float32
    assert converted[1]["ids"] is ids
    assert converted[2][0].dtype is BF16
    assert converted[2][1] == "text"


def _ignored_buffer():
    model = Watched()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["scale"])
    DDP(model, mixed_precision=MixedPrecision(buffer_dtype=BF16))
    return model.scale.dtype, model.count.dtype


def test_ignored_buffers_keep_their_type():
    assert run_ranks(_ignored_buffer, 2) == [(torch.float32, torch.int64)] * 2
