"""DistributedDataParallel trains as one rank would with all the data."""

import copy
import io
import pickle
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import assert_close, batches, loss_of, mlp, own, reference, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from phalanx.parallel.buckets import BucketCapacityConfig, compute_bucket_assignment_by_size
from phalanx.testing import run_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb_list": [0.001, 0.01]},
    {"batched_grad_copy": True, "forward_sync_buffers": False},
]


def _matches(options, set_to_none):
    model = mlp()
    expected = reference(model)
    ours = train(DDP(model, **options), set_to_none=set_to_none)
    assert_close(ours, expected)
    return [p.numpy().tobytes() for p in ours]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_trains_as_one_rank_would(size, options, set_to_none):
    results = run_ranks(_matches, size, options, set_to_none)
    assert all(result == results[0] for result in results)


def test_is_bitwise_the_same_everywhere_and_every_time():
    runs = [run_ranks(_matches, 3, {}, True) for _ in range(2)]
    runs.append(run_ranks(_matches, 3, {}, True, ranks="processes"))
    assert all(bits == runs[0][0] for run in runs for bits in run)


def _alone():
    model = mlp()
    expected = reference(model)
    return all(torch.equal(a, b) for a, b in zip(train(DDP(model)), expected, strict=True))


def test_one_rank_is_plain_training_bitwise():
    assert run_ranks(_alone, 1) == [True]


def _half(dtype):
    model = mlp().to(dtype)
    ddp = DDP(model)
    loss_of(ddp(own(batches(1)[0]).to(dtype))).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    first, second = run_ranks(_half, 2, dtype)
    assert all(a.dtype == dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(bool(a.any()) for a in first)


# Gradients


def _accumulates():
    model = mlp()
    alone = copy.deepcopy(model)
    ddp = DDP(model)
    for step in range(3):
        data = batches(3)
        for batch in data[:-1]:
            with ddp.no_sync():
                loss_of(ddp(own(batch))).backward()
        before = [p.grad.clone() for p in model.parameters()]
        loss_of(ddp(own(data[-1]))).backward()
        assert any(
            not torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True)
        )
        for batch in data:
            loss_of(alone(batch)).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
        if step == 1:  # grads may go on accumulating, too
            ddp.zero_grad()
            alone.zero_grad()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_gradient_accumulation(ranks):
    run_ranks(_accumulates, 2, ranks=ranks)


def _two_forwards_two_backwards():
    model = mlp()
    alone = copy.deepcopy(model)
    ddp = DDP(model)
    for _ in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        first, second = batches(2)
        outputs = ddp(own(first)), ddp(own(second))
        for output in outputs:
            loss_of(output).backward()
        for batch in (first, second):
            loss_of(alone(batch)).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def test_several_forward_passes_before_backward():
    run_ranks(_two_forwards_two_backwards, 2)


def _keeps_gradients():
    model = mlp()
    ddp = DDP(model)
    kept = []
    for batch in batches(3):
        ddp.zero_grad()
        loss_of(ddp(own(batch))).backward()
        grad = model[0].weight.grad
        kept.append((grad, grad.clone(), model[2].weight.grad[0], model[2].weight.grad[0].clone()))
    for grad, copied, row, copied_row in kept:
        assert torch.equal(grad, copied)
        assert torch.equal(row, copied_row)


def test_a_gradient_that_is_kept_is_not_overwritten():
    run_ranks(_keeps_gradients, 2)


def _reuses_memory():
    model = mlp()
    ddp = DDP(model)
    places = set()
    for batch in batches(6):
        ddp.zero_grad()
        loss_of(ddp(own(batch))).backward()
        places.add(model[0].weight.grad.data_ptr())
        assert dist.is_shared(model[0].weight.grad)
        model[0].weight.grad.detach_()
    return len(places)


def test_buckets_are_used_again():
    # Once before and once after they were built anew.
    assert run_ranks(_reuses_memory, 2) == [2, 2]


def _does_not_sync_elsewhere():
    model = mlp()
    ddp = DDP(model)
    batch = own(batches(1)[0])
    loss_of(model(batch)).backward()  # the module itself, not the wrapped one
    local = model[0].weight.grad.clone()
    ddp.zero_grad()
    x = batch.clone().requires_grad_()
    output = loss_of(ddp(x))
    (grad,) = torch.autograd.grad(output, x, create_graph=True)  # accumulates nothing
    assert model[0].weight.grad is None
    (output + grad.square().sum()).backward()
    with torch.no_grad():
        ddp(batch)
    ddp.eval()(batch)
    return local, model[0].weight.grad


def test_what_is_reduced_and_what_not():
    (local0, grad0), (local1, grad1) = run_ranks(_does_not_sync_elsewhere, 2)
    assert not torch.equal(local0, local1)
    assert torch.equal(grad0, grad1)


def _create_graph():
    model = mlp()
    ddp = DDP(model)
    for batch in batches(2):
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle, once per process
            loss_of(ddp(own(batch))).backward(create_graph=True)
    grads = [p.grad.detach().clone() for p in model.parameters()]
    has_graph = all(p.grad.grad_fn is not None for p in list(model.parameters())[:-1])
    ddp.zero_grad()
    return grads, has_graph


def test_gradients_that_can_be_differentiated():
    (first, graph), (second, _) = run_ranks(_create_graph, 2, ranks="processes")
    assert graph
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.embedding(x))


def _sparse():
    model = Sparse()
    alone = copy.deepcopy(model)
    ddp = DDP(model)
    rows = torch.arange(8).view(2, 4)
    for _ in range(2):
        ddp.zero_grad()
        alone.zero_grad()
        loss_of(ddp(rows[dist.get_rank()])).backward()
        loss_of(alone(rows)).backward()
        assert model.embedding.weight.grad.is_sparse
        assert_close(
            [p.grad.to_dense() for p in model.parameters()],
            [p.grad.to_dense() for p in alone.parameters()],
        )


def test_sparse_gradients():
    run_ranks(_sparse, 2)


class Odd(nn.Module):
    """Shared parameters, other memory formats and element types, parameters of no size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.wide = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.none = nn.Parameter(torch.ones(0))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())

    def forward(self, x):
        image = x[:, :3, None, None].expand(-1, -1, 4, 4)
        y = self.second(self.first(x)) @ self.transposed.t()
        extra = (x.double() @ self.wide).float() + self.none.sum()
        return y * self.scalar + extra[:, None] + self.conv(image).mean((1, 2, 3))[:, None]


def _odd():
    model = Odd()
    expected = reference(model)
    ddp = DDP(model)
    assert_close(train(ddp), expected, 1e-5)
    loss_of(ddp(own(batches(1)[0]))).backward()
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.numel() > 1)


def test_odd_parameters():
    run_ranks(_odd, 2)


# Outputs and inputs of all kinds

Pair = namedtuple("Pair", "a b")


@dataclass
class Outcome:
    hidden: Any
    loss: torch.Tensor
    note: str = "text"


SHAPES = {
    "tuple": (lambda a, b: (a, b), lambda o: o[0].sum() + o[1].sum()),
    "list": (lambda a, b: [a, [b]], lambda o: o[0].sum() + o[1][0].sum()),
    "dict": (lambda a, b: {"a": a, "x": {"b": b}}, lambda o: o["a"].sum() + o["x"]["b"].sum()),
    "namedtuple": (Pair, lambda o: o.a.sum() + o.b.sum()),
    "dataclass": (lambda a, b: Outcome([a], b), lambda o: o.hidden[0].sum() + o.loss.sum()),
    "object": (lambda a, b: lambda: (a, b), lambda o: o()[0].sum() + o()[1].sum()),
}


class Shaped(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)
        self.shape = SHAPES[shape][0]

    def forward(self, x, *, scale=1.0):
        return self.shape(self.a(x) * scale, self.b(x))


def _shaped(shape, options):
    model = Shaped(shape)
    alone = copy.deepcopy(model)
    ddp = DDP(model, **options)
    loss = SHAPES[shape][1]
    for batch in batches(3):
        ddp.zero_grad()
        alone.zero_grad()
        output = ddp(own(batch), scale=2.0)
        assert type(output) is type(alone(batch))
        (loss(output) / len(own(batch))).backward()
        (loss(alone(batch, scale=2.0)) / len(batch)).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs(shape, options):
    run_ranks(_shaped, 2, shape, options)


def _no_rows():
    ddp = DDP(mlp())
    rows = 0 if dist.get_rank() else 4
    for _ in range(2):
        ddp(torch.ones(rows, 6)).sum().backward()
    return ddp.module[0].weight.grad


def test_a_rank_with_an_empty_batch():
    first, second = run_ranks(_no_rows, 2)
    assert torch.equal(first, second)
    assert bool(first.any())


def _in_place_output():
    ddp = DDP(mlp())
    output = ddp(own(batches(1)[0]))
    output += 1
    output.mul_(2).sum().backward()
    return ddp.module[0].weight.grad


def test_outputs_may_be_changed_in_place():
    assert torch.equal(*run_ranks(_in_place_output, 2))


# Checkpointing of activations, and backward passes within backward passes


class Checkpointed(nn.Module):
    def __init__(self, reentrant, times):
        super().__init__()
        self.net = mlp(width=6)
        self.net[3] = nn.Linear(6, 6)
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.net, x, use_reentrant=self.reentrant)
        return x


def _checkpointed(reentrant, times, options):
    model = Checkpointed(reentrant, times)
    alone = copy.deepcopy(model)
    ddp = DDP(model, **options)
    for batch in batches(3):
        ddp.zero_grad()
        alone.zero_grad()
        loss_of(ddp(own(batch).requires_grad_())).backward()
        loss_of(alone(batch.requires_grad_())).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.parametrize(
    ("reentrant", "times", "options"),
    [
        (False, 1, {}),
        (False, 3, {"find_unused_parameters": True}),
        (True, 1, {}),
        (True, 1, {"find_unused_parameters": True}),
        (True, 3, {"static_graph": True}),
    ],
)
def test_activation_checkpointing(reentrant, times, options):
    run_ranks(_checkpointed, 2, reentrant, times, options)


def _twice():
    ddp = DDP(Checkpointed(True, 2))
    with pytest.raises(RuntimeError, match=r"ready only once.*net\.\d.*static_graph=True"):
        loss_of(ddp(own(batches(1)[0]).requires_grad_())).backward()


def test_a_gradient_that_comes_twice_is_named():
    run_ranks(_twice, 1)


# Buffers


def _buffers(option):
    model = nn.BatchNorm1d(6)
    model.running_mean.fill_(float(dist.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has a newer name
        ddp = DDP(model, **option)
    start = model.running_mean.clone()
    for batch in batches(3):
        ddp(own(batch)).sum().backward()
    mean = model.running_mean.clone()
    ddp(own(batch))
    return start, mean, model.running_mean.clone(), model.num_batches_tracked.item()


def test_buffers_follow_rank_0():
    first, second = run_ranks(_buffers, 2, {})
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])  # of their own batches, since the last copy
    assert first[3] == second[3] == 4


def test_buffers_may_differ():
    first, second = run_ranks(_buffers, 2, {"broadcast_buffers": False})
    assert first[0][0] == 0
    assert second[0][0] == 1
    first, second = run_ranks(_buffers, 2, {"forward_sync_buffers": False})
    assert torch.equal(first[0], second[0])


def _buffers_apart(option, start):
    """Compare buffers that no forward pass copies with those of a module on its own."""
    alone = nn.BatchNorm1d(6)
    alone.running_mean.fill_(float(start))
    for batch in [*batches(3), batches(3)[-1]]:
        alone(own(batch))
    _, _, mean, _ = _buffers(option)
    torch.testing.assert_close(mean, alone.running_mean)


def test_buffers_stay_each_ranks_own():
    run_ranks(lambda: _buffers_apart({"broadcast_buffers": False}, dist.get_rank()), 3)
    run_ranks(lambda: _buffers_apart({"forward_sync_buffers": False}, 0), 3)


def _replaced_buffer():
    model = nn.BatchNorm1d(6)
    ddp = DDP(model)
    ddp(own(batches(1)[0]))
    model.running_mean = torch.full((6,), 10.0 * (dist.get_rank() + 1))
    model.eval()
    ddp(own(batches(1)[0]))
    return model.running_mean.tolist()


def test_a_buffer_that_was_replaced_follows_rank_0():
    assert run_ranks(_replaced_buffer, 3) == [[10.0] * 6] * 3


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd then needs in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.layer(x) * self.scale


def _write_in_place(state, buffers):
    buffers["scale"].mul_(1)


def _needed_buffer(hooked):
    model = Scaled()
    alone = Scaled()
    ddp = DDP(model)
    if hooked:
        ddp._register_buffer_comm_hook(None, _write_in_place)
    first, second = batches(2)
    (loss_of(ddp(own(first))) + loss_of(ddp(own(second)))).backward()
    (loss_of(alone(first)) + loss_of(alone(second))).backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_buffer_may_be_copied_while_a_graph_needs_it(hooked):
    run_ranks(_needed_buffer, 3, hooked)


def _ignored_buffer():
    rank = dist.get_rank()
    model = nn.BatchNorm1d(6)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["running_mean"])
    ddp = DDP(model)
    model.running_mean.fill_(float(rank + 1))
    model.running_var.fill_(float(rank + 1))
    model.eval()
    ddp(own(batches(1)[0]))
    return model.running_mean[0].item(), model.running_var[0].item()


def test_an_ignored_buffer_is_left_alone():
    assert run_ranks(_ignored_buffer, 3) == [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]


class Noted(torch.futures.Future):
    """Says when it is waited for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def wait(self):
        self.seen.append("waited")


def _buffer_futures(several):
    seen = []
    ddp = DDP(nn.BatchNorm1d(6))
    ddp._register_buffer_comm_hook(
        None, lambda state, buffers: [Noted(seen), Noted(seen)] if several else Noted(seen)
    )
    output = ddp(own(batches(1)[0]))
    assert seen == []
    output.sum().backward()
    assert seen == ["waited"] * (1 + several)
    output = ddp(own(batches(1)[0]))
    output.sum().backward()
    assert seen == ["waited"] * 2 * (1 + several)


@pytest.mark.parametrize("several", [False, True])
def test_futures_of_buffer_hooks_are_waited_for_in_backward(several):
    run_ranks(_buffer_futures, 2, several)


def _whole_in_checkpoint(reentrant):
    """Recompute the wrapped module itself, with buffers that count its forward passes."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    alone = copy.deepcopy(model)
    ddp = DDP(model)
    rank = dist.get_rank()
    everybody = [torch.randn(4 + r, 6).double() for r in range(3)]
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        x = (everybody[rank] + step).requires_grad_()
        output = checkpoint(ddp, x, use_reentrant=reentrant, preserve_rng_state=False)
        (output.square().mean() * (rank + 1)).backward()
        for r, each in enumerate(everybody):
            (alone(each + step).square().mean() * (r + 1) / 3).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_module_may_be_recomputed(reentrant):
    torch.manual_seed(7)
    run_ranks(_whole_in_checkpoint, 3, reentrant)


def _recomputed_under_join():
    """Recompute the wrapped module while other ranks, which have run out, go along."""
    rank = dist.get_rank()
    model = nn.Linear(6, 3).double()
    ddp = DDP(model)
    with ddp.join():
        for step in range((3, 1, 2)[rank]):
            ddp.zero_grad()
            x = (torch.arange(12.0).view(2, 6).double() + step).requires_grad_()
            checkpoint(ddp, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    return model.weight.grad


def test_the_whole_module_may_be_recomputed_under_join():
    grads = run_ranks(_recomputed_under_join, 3)
    for rank, last in enumerate((2, 0, 1)):
        rows = torch.arange(12.0).view(2, 6).double().sum(0) + 2 * last
        active = 3 - last
        assert_close([grads[rank]], [rows.expand(3, 6) * active / 3])


def _kept_piece():
    model = mlp()
    ddp = DDP(model)
    for step, batch in enumerate(batches(3)):
        if step:
            kept = model[0].weight.grad.detach().view(-1)[3:9]
            before = kept.clone()
            ddp.zero_grad()
        loss_of(ddp(own(batch))).backward()
        if step:
            assert torch.equal(kept, before)


def test_a_piece_of_a_gradient_that_is_kept_is_not_overwritten():
    run_ranks(_kept_piece, 2)


def test_how_buckets_are_cut():
    tensors = [torch.empty(4) for _ in range(5)]  # of 16 bytes
    indices, limits = compute_bucket_assignment_by_size(tensors, [16, 40])
    assert indices == [[0], [1, 2, 3], [4]]
    assert limits == [16, 40, 40]
    indices, _ = compute_bucket_assignment_by_size(tensors, [17])
    assert indices == [[0, 1], [2, 3], [4]]
    sparse = [True, False, False, False, False]
    indices, _ = compute_bucket_assignment_by_size(tensors, [32], sparse, [4, 3, 2, 1, 0])
    assert indices == [[4, 3], [2, 1], [0]]
    caps = BucketCapacityConfig.create(bucket_cap_mb_list=[1, 3, 2])
    assert caps.bucket_bytes_cap == caps.first_bucket_bytes_cap == 3 * 2**20
    assert caps.per_bucket_bytes_caps == (2**20, 3 * 2**20, 2 * 2**20)


def _nested_blocks():
    ddp = DDP(mlp())
    alone = mlp()
    rank = dist.get_rank()
    x = torch.arange(6.0).view(1, 6) + rank
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        loss_of(ddp(x)).backward()  # still not reduced
    loss_of(alone(x)).backward()
    assert_close([p.grad for p in ddp.parameters()], [p.grad for p in alone.parameters()])


def test_a_block_without_sync_in_another_ends_alone():
    run_ranks(_nested_blocks, 3)


def _buffer_hook(location):
    model = nn.BatchNorm1d(6)
    ddp = DDP(model)
    seen = []

    def hook(state, buffers):
        state.append(sorted(buffers))
        works = [
            dist.all_reduce(b, op=dist.ReduceOp.AVG, async_op=True)
            for b in buffers.values()
            if b.is_floating_point()
        ]
        return [work.get_future() for work in works]

    ddp._register_buffer_comm_hook(seen, hook, location)
    for batch in batches(3):
        ddp(own(batch)).sum().backward()
    return len(seen), seen[0], model.running_mean.clone()


def test_buffer_hooks():
    from phalanx.parallel.buffers import BufferCommHookLocation as Location

    (count, names, mean), (_, _, other) = run_ranks(_buffer_hook, 2, Location.POST_FORWARD)
    assert count == 3
    assert names == ["num_batches_tracked", "running_mean", "running_var"]
    assert torch.equal(mean, other)


# Copies


def _copies():
    model = mlp()
    ddp = DDP(model, bucket_cap_mb=1)
    train(ddp, 2)
    stored = io.BytesIO()
    torch.save(ddp.state_dict(), stored)
    stored.seek(0)
    other = DDP(mlp(seed=5))
    other.load_state_dict(torch.load(stored))
    again = pickle.loads(pickle.dumps(ddp))
    third = copy.deepcopy(ddp)
    results = [train(each, 2) for each in (ddp, other, again, third)]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
    group = dist.new_group()
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(DDP(mlp(), process_group=group))


def _static_copies():
    ddp = DDP(mlp(), static_graph=True)
    for each in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        for batch in batches(2):
            loss_of(each(own(batch))).backward()
        output = each.module[0](own(batch))  # the rest of the graph is not used
        each.reducer.arm([output])
        with pytest.raises(RuntimeError, match="training graph has changed"):
            loss_of(output).backward()


def test_a_static_graph_stays_one_in_copies():
    run_ranks(_static_copies, 2)


class Repeats(nn.Module):
    """Recomputes one layer as often as it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, times):
        for _ in range(times):
            x = checkpoint(self.first, x, use_reentrant=True)
        return self.last(x)


def at_once(state, bucket):
    """Average before backward goes on."""
    dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
    return noop_hook(state, bucket)


def _repeats(options, times):
    model = Repeats()
    alone = copy.deepcopy(model)
    ddp = DDP(model, static_graph=True, **options)
    ddp.register_comm_hook(None, at_once)
    rank = dist.get_rank()
    everybody = [torch.arange(12.0).view(2, 6).sub(6).div(9 + r) for r in range(3)]
    for number in times:
        ddp.zero_grad()
        alone.zero_grad()
        x = everybody[rank].clone().requires_grad_()
        (loss_of(ddp(x, number)) * (rank + 1)).backward()
        for r, each in enumerate(everybody):
            loss = loss_of(alone(each.clone().requires_grad_(), number)) * (r + 1) / 3
            loss.backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def test_a_static_graph_reduces_nothing_before_it_is_known():
    run_ranks(_repeats, 3, {"bucket_cap_mb_list": [0.00001] * 4}, [2, 2])


@pytest.mark.filterwarnings("ignore:static_graph finds unused")
def test_a_gradient_may_come_less_often_if_parameters_may_be_unused():
    run_ranks(_repeats, 3, {"find_unused_parameters": True}, [2, 2, 1, 2])


def _rebuilds(options):
    ddp = DDP(mlp(), bucket_cap_mb=0.0004, **options)
    train(ddp, 2)
    return ddp._get_ddp_logging_data().get("has_rebuilt_buckets", 0), len(ddp.reducer.buckets)


@pytest.mark.filterwarnings("ignore:static_graph finds unused")
def test_when_buckets_are_built_anew():
    for static, unused in ((False, False), (True, False), (True, True), (False, True)):
        options = {"static_graph": static, "find_unused_parameters": unused}
        rebuilt = static or not unused  # otherwise there is no order to build them in
        for done, count in run_ranks(_rebuilds, 2, options):
            assert done == rebuilt
            assert count > 1


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_state_dict_pickle_and_deepcopy(ranks):
    run_ranks(_copies, 2, ranks=ranks)


def _functional_call():
    ddp = DDP(mlp())
    output = torch.func.functional_call(ddp, dict(ddp.named_parameters()), (own(batches(1)[0]),))
    loss_of(output).backward()
    return ddp.module[0].weight.grad


def test_functional_call():
    assert torch.equal(*run_ranks(_functional_call, 2))


def _groups():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    model = mlp(seed=dist.get_rank() // 2)
    ddp = DDP(model, process_group=mine)
    ddp(torch.full((4, 6), float(dist.get_rank()))).sum().backward()
    grads = model[2].weight.grad.clone()
    ddp.zero_grad()
    ddp._update_process_group(dist.group.WORLD)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((4, 6), float(dist.get_rank()))).sum().backward()
    return grads, model[2].weight.grad


def test_groups_and_changing_them():
    results = run_ranks(_groups, 4)
    before = [r[0] for r in results]
    assert torch.equal(before[0], before[1])
    assert torch.equal(before[2], before[3])
    assert not torch.equal(before[0], before[2])
    assert all(torch.equal(results[0][1], r[1]) for r in results)


def _mesh():
    mesh = dist.init_device_mesh("cpu", (2,))
    ddp = DDP(mlp(), device_mesh=mesh)
    loss_of(ddp(own(batches(1)[0]))).backward()
    with pytest.raises(RuntimeError, match="both"):
        DDP(mlp(), device_mesh=mesh, process_group=dist.group.WORLD)
    return ddp.module[0].weight.grad


def test_device_mesh():
    assert torch.equal(*run_ranks(_mesh, 2))


def _ignored():
    model = mlp(seed=dist.get_rank())
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "3.bias"])
    ddp = DDP(model)
    loss_of(ddp(own(batches(1)[0]))).backward()
    return {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}


def test_ignored_parameters():
    first, second = run_ranks(_ignored, 2)
    for name in first:
        assert torch.equal(first[name][1], second[name][1]) == (name not in ("0.weight", "3.bias"))
        assert torch.equal(first[name][0], second[name][0]) == (name not in ("0.weight", "3.bias"))


def _delayed(cleared_late):
    model = mlp(seed=dist.get_rank())
    alone = mlp(seed=0)
    named = [(n, p) for n, p in model.named_parameters() if n.startswith("3")]
    ddp = DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)
    for batch in batches(3):
        alone.zero_grad()
        if not cleared_late:
            ddp.zero_grad()
        output = ddp(own(batch))
        if cleared_late:
            ddp.zero_grad()
        loss_of(output).backward()
        loss_of(alone(batch)).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def _delayed_with_hook():
    model, alone = mlp(), mlp()
    named = [(n, p) for n, p in model.named_parameters() if n.startswith("3")]
    ddp = DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)
    hooked = []

    def hook(state, bucket):
        hooked.extend(bucket.parameters())
        return noop_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    batch = batches(1)[0]
    loss_of(ddp(own(batch))).backward()
    loss_of(alone(batch)).backward()
    whole = {name: p.grad.clone() for name, p in alone.named_parameters()}
    alone.zero_grad()
    loss_of(alone(own(batch))).backward()
    for name, param in alone.named_parameters():
        expected = whole[name] if name.startswith("3") else param.grad
        assert_close([model.get_parameter(name).grad], [expected])
    assert not {id(param) for _, param in named} & set(map(id, hooked))


def test_delayed_parameters_are_reduced_apart():
    run_ranks(_delayed_with_hook, 3)


@pytest.mark.parametrize("cleared_late", [False, True])
def test_delayed_reduction(cleared_late):
    run_ranks(_delayed, 2, cleared_late)


def _compiled(outside):
    model = mlp()
    expected = reference(model)
    if outside:
        ddp = torch.compile(DDP(model), backend="aot_eager")
    else:
        ddp = DDP(torch.compile(model, backend="aot_eager"))
    assert_close(train(ddp), expected)


@pytest.mark.parametrize("outside", [False, True])
def test_compiled(outside):
    run_ranks(_compiled, 2, outside, ranks="processes", timeout=100)


def _sparse_unused():
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "layer": nn.Linear(6, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return model["layer"](x)

    ddp = DDP(Net(), find_unused_parameters=True)
    for batch in batches(2):
        ddp(own(batch)).sum().backward()
    return model["table"].weight.grad


def test_a_sparse_gradient_that_no_rank_has_stays_none():
    assert run_ranks(_sparse_unused, 3) == [None] * 3
