"""Communication hooks in training with DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, batches, loss_of, mlp, own, reference, train
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default,
    quantization,
    register_ddp_comm_hook,
)
from phalanx.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from phalanx.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from phalanx.algorithms.model_averaging.averagers import PeriodicModelAverager
from phalanx.optim import PostLocalSGDOptimizer
from phalanx.testing import run_ranks

SMALL = {"bucket_cap_mb": 0.001}  # several buckets


def exact(**arguments):
    """Make a PowerSGD state that loses nothing."""
    return PowerSGDState(
        None,
        matrix_approximation_rank=100,
        min_compression_rate=0.01,
        start_powerSGD_iter=2,
        **arguments,
    )


# Name, a function that makes the state, the hook, and how far weights may be from plain training.
HOOKS = {
    "allreduce": (lambda: None, default.allreduce_hook, 1e-6),
    "fp16": (lambda: None, default.fp16_compress_hook, 1e-3),
    "bf16": (lambda: None, default.bf16_compress_hook, 5e-3),
    "per tensor": (lambda: None, quantization.quantization_pertensor_hook, 1e-2),
    "per channel": (lambda: None, quantization.quantization_perchannel_hook, 1e-2),
    "power": (exact, powerSGD_hook, 1e-5),
    "power, one by one": (
        lambda: exact(batch_tensors_with_same_shape=True, warm_start=False),
        powerSGD_hook,
        1e-5,
    ),
    "power of a square": (exact, batched_powerSGD_hook, 1e-5),
    "power of halves": (exact, default.bf16_compress_wrapper(powerSGD_hook), 2e-2),
    "post local": (lambda: PostLocalSGDState(None, None, 2), post_localSGD_hook, 1e-6),
}


def _trained(name, options, steps=5):
    make, hook, tolerance = HOOKS[name]
    model = mlp()
    expected = reference(model, steps)
    ddp = DDP(model, **options)
    ddp.register_comm_hook(make(), hook)
    assert ddp._get_ddp_logging_data()["comm_hook"] == hook.__qualname__
    ours = train(ddp, steps)
    assert_close(ours, expected, tolerance)
    return [p.numpy().tobytes() for p in ours]


@pytest.mark.parametrize("options", [{}, SMALL, {**SMALL, "gradient_as_bucket_view": True}])
@pytest.mark.parametrize("name", HOOKS)
def test_trains_as_one_rank_would(name, options):
    results = run_ranks(_trained, 3, name, options)
    assert all(result == results[0] for result in results)


def _all_trained():
    return [_trained(name, SMALL) for name in HOOKS]


def test_is_bitwise_the_same_on_processes():
    assert run_ranks(_all_trained, 2, ranks="processes") == run_ranks(_all_trained, 2)


def _with_and_without():
    plain, hooked = DDP(mlp(), **SMALL), DDP(mlp(), **SMALL)
    register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, hooked)
    return all(map(torch.equal, train(plain), train(hooked)))


def test_the_allreduce_hook_changes_no_bit():
    assert run_ranks(_with_and_without, 3) == [True] * 3


def _low_rank(hook, halves):
    state = PowerSGDState(
        None, matrix_approximation_rank=1, min_compression_rate=1, start_powerSGD_iter=2
    )
    ddp = DDP(mlp(), **SMALL)
    ddp.register_comm_hook(state, default.fp16_compress_wrapper(hook) if halves else hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    (batch,) = batches(1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(ddp(own(batch)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rate, _, _ = state.compression_stats()
    bits = [p.detach().numpy().tobytes() for p in ddp.parameters()]
    return losses[0], losses[-1], rate, state.iter, bits


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_power_sgd_learns_from_compressed_gradients(hook, halves):
    results = run_ranks(_low_rank, 2, hook, halves)
    for first, last, rate, iterations, bits in results:
        assert last < first / 5
        assert rate > 2
        assert iterations == 60
        assert bits == results[0][4]


def _memory_of_gradients(name):
    make, hook, _ = HOOKS[name]
    ddp = DDP(mlp(), **SMALL)
    ddp.register_comm_hook(make(), hook)
    places = []
    for batch in batches(6):
        ddp.zero_grad()
        loss_of(ddp(own(batch))).backward()
        places.append([p.grad.data_ptr() for p in ddp.parameters()])
        assert all(dist.is_shared(p.grad) for p in ddp.parameters())
    return places


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_hold_no_gradients_back(name):
    """Buckets whose memory somebody still has would have to be replaced at each step."""
    (places,) = run_ranks(_memory_of_gradients, 1, name)
    assert all(each == places[2] for each in places[3:])


class _Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.linear = nn.Linear(4, 3)

    def forward(self, indices):
        return self.linear(self.table(indices))


def _sparse(name):
    make, hook, _ = HOOKS[name]
    found = []
    for register in (False, True):
        ddp = DDP(_Sparse())
        if register:
            ddp.register_comm_hook(make(), hook)
        for _ in range(4):
            ddp.zero_grad()
            loss_of(ddp(torch.tensor([1, 5, 5, dist.get_rank()]))).backward()
        found.append(ddp.module.table.weight.grad.to_dense())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", HOOKS)
def test_sparse_gradients(name):
    run_ranks(_sparse, 2, name)


class _Mixed(nn.Module):
    """A model whose gradients are dense, sparse, transposed and channels-last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.linear = nn.Linear(4, 6)
        self.linear.weight = nn.Parameter(torch.randn(4, 6).t())
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, indices):
        return self.convolution(self.linear(self.table(indices)).view(-1, 2, 3, 2))


def _uneven(name):
    make, hook, _ = HOOKS[name]
    ddp = DDP(_Mixed(), bucket_cap_mb=0.00001)
    ddp.register_comm_hook(make(), hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for step in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp(torch.arange(step, step + 6))).backward()
            optimizer.step()
    return [p.detach().contiguous().numpy().tobytes() for p in ddp.parameters()]


@pytest.mark.parametrize("name", HOOKS)
def test_uneven_inputs(name):
    first, second = run_ranks(_uneven, 2, name)
    assert first == second


def _builtin():
    found = []
    for register in (
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        lambda ddp: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp),
        lambda ddp: DDPCommHookType.FP16_COMPRESS.value(model=ddp, state=ddp.process_group),
    ):
        ddp = DDP(mlp())
        register(ddp)
        found.append(train(ddp))
    return all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, *found[1:]))


def test_hooks_by_name():
    assert run_ranks(_builtin, 2) == [True, True]


def _accumulate(name):
    """Return the gradients of two batches, one of them without synchronisation."""
    make, hook, _ = HOOKS[name]
    ddp = DDP(mlp(), **SMALL)
    ddp.register_comm_hook(make(), hook)
    first, second = batches(2)
    with ddp.no_sync():
        loss_of(ddp(own(first))).backward()
    loss_of(ddp(own(second))).backward()
    plain = mlp()
    (loss_of(plain(first)) + loss_of(plain(second))).backward()
    found = [p.grad.clone() for p in ddp.parameters()]
    assert_close(found, [p.grad for p in plain.parameters()], 1e-2)
    return [gradient.numpy().tobytes() for gradient in found]


@pytest.mark.parametrize("name", ["allreduce", "fp16", "per channel", "power"])
def test_accumulated_gradients(name):
    first, second = run_ranks(_accumulate, 2, name)
    assert first == second


def _post_local(steps, start, period):
    subgroup, _ = dist.new_subgroups(2)
    ddp = DDP(mlp())
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, start), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.1), PeriodicModelAverager(period, start)
    )
    seen = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss_of(ddp(own(batch))).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]).numpy().tobytes())
    return seen


def test_post_local_sgd():
    """All ranks are equal after steps that are global, those of a subgroup after all."""
    steps, start, period = 9, 3, 4
    by_rank = run_ranks(_post_local, 4, steps, start, period)
    for step in range(steps):
        models = [seen[step] for seen in by_rank]
        assert models[0] == models[1]
        assert models[2] == models[3]
        is_global = step < start or (step - start) % period == 0
        assert (models[0] == models[2]) == is_global


def _with_graph():
    """Note whether a hook sees autograd at work in a pass that keeps its graph."""
    ddp = DDP(mlp(width=4), **SMALL)
    seen = set()

    def hook(state, bucket):
        seen.add(torch.is_grad_enabled())
        return default.allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        loss_of(ddp(own(batches(1)[0]))).backward(create_graph=True)
        assert all(p.grad.requires_grad for p in ddp.parameters())
    ddp.zero_grad()
    return seen


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_hooks_do_not_enter_the_graph():
    assert run_ranks(_with_graph, 2) == [{False}] * 2
