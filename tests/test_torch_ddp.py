"""Torch's own DistributedDataParallel on the backend."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Outcomes, run_torch

SIZE = 2
STEPS = 4


class Net(nn.Module):
    """A network that takes another way in odd steps, if told the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 40)
        self.often = nn.Linear(40, 40)
        self.rarely = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x, step=0):
        x = self.first(x).tanh()
        return self.last(self.rarely(x) if step % 2 else self.often(x) + 0 * self.rarely(x))


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output):
    return output.square().mean()


def train(model, rank, unused=False, steps=STEPS, samples=4):
    """Train on batches of one rank, or of all if it is None; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ranks = range(SIZE) if rank is None else [rank]
        data = torch.cat([batch(step, r)[:samples] for r in ranks])
        loss_of(model(data, step if unused else 0)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(_train_in_all_ways, _train_with_hooks, _other_uses)


WAYS = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.005},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def _train_in_all_ways():
    return {
        way: train(DistributedDataParallel(Net(), **options), dist.get_rank(), way == "unused")
        for way, options in WAYS.items()
    }


def test_training_is_that_of_one_process_with_all_data(outcomes):
    alone = {way: train(Net(), None, way == "unused") for way in WAYS}
    for trained in outcomes.of(_train_in_all_ways):
        torch.testing.assert_close(trained, alone)


def _hooked(register):
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
    register(model)
    return train(model, dist.get_rank())


def _train_with_hooks():
    hooks = default_hooks.allreduce_hook, default_hooks.fp16_compress_hook
    kinds = dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS
    return [
        *(_hooked(lambda model, hook=hook: model.register_comm_hook(None, hook)) for hook in hooks),
        *(
            _hooked(lambda model, kind=kind: model._register_builtin_comm_hook(kind))
            for kind in kinds
        ),
    ]


def test_hooks_sum_and_compress(outcomes):
    alone = train(Net(), None)
    for exact, half, builtin, builtin_half in outcomes.of(_train_with_hooks):
        torch.testing.assert_close([exact, builtin], [alone, alone])
        torch.testing.assert_close([half, builtin_half], [alone, alone], rtol=1e-2, atol=1e-3)
        assert any(not torch.equal(a, b) for a, b in zip(half, exact, strict=True))


def _train_with_power_sgd():
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
    state = powerSGD_hook.PowerSGDState(
        None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained = train(model, dist.get_rank(), steps=8, samples=1)
    return trained, state.compression_stats()[0]


def test_power_sgd_communicates_in_callbacks_of_several_buckets():
    # With one sample on each rank gradients have rank 2, and nothing is lost. On Gloo, this ends
    # the process: callbacks communicate in whatever order they are called.
    alone = train(Net(), None, steps=8, samples=1)
    for trained, rate in run_torch(_train_with_power_sgd, SIZE):
        assert rate > 1.5
        torch.testing.assert_close(trained, alone, rtol=1e-3, atol=2e-4)


def _gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def _accumulate():
    rank = dist.get_rank()
    model = DistributedDataParallel(Net())
    with model.no_sync():
        loss_of(model(batch(0, rank))).backward()
    own = _gradients(model)
    loss_of(model(batch(1, rank))).backward()
    return own, _gradients(model)


def _sparse():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    model(torch.tensor([dist.get_rank(), 4, 4])).sum().backward()
    return model.module.weight.grad.to_dense()


def _uneven():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(1 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model(batch(step, dist.get_rank()))).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _buffers():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    for step in range(2):
        loss_of(model(batch(step, dist.get_rank()))).backward()
    model.eval()
    return model(batch(9, 0)).detach()


def _other_uses():
    return _accumulate(), _sparse(), _uneven(), _buffers()


def test_accumulation_sparse_gradients_uneven_inputs_and_buffers(outcomes):
    (first, *_), (second, *_) = results = outcomes.of(_other_uses)
    for rank, ((own, both), sparse, _, _) in enumerate(results):
        model = Net()
        loss_of(model(batch(0, rank))).backward()
        torch.testing.assert_close(own, _gradients(model))
        average = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
        model.zero_grad()
        loss_of(model(torch.cat([batch(1, r) for r in range(SIZE)]))).backward()
        expected = [a + b for a, b in zip(average, _gradients(model), strict=True)]
        torch.testing.assert_close(both, expected)
        assert sparse.sum(1).tolist() == [1.5, 1.5, 0, 0, 6, 0, 0, 0, 0, 0]
    torch.testing.assert_close(results[0][2:], results[1][2:], rtol=0, atol=0)


def _fail_in_backward(how, hooked):
    model = Net()
    torch_model = DistributedDataParallel(model, bucket_cap_mb=0.005)
    if hooked:
        torch_model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def fail(_):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("a gradient that nobody wants")

    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            model.often.weight.register_hook(fail)
        try:
            loss_of(torch_model(batch(step, 0))).backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(("how", "hooked"), [("kill", False), ("raise", True)])
def test_the_others_learn_who_failed_in_backward(how, hooked):
    message, failed = run_torch(_fail_in_backward, SIZE, how, hooked, return_exceptions=True)
    facts = ["PeerFailed", "rank 1", r"test_torch_ddp\.py:\d+ in _fail_in_backward"]
    facts += ["SIGKILL"] if how == "kill" else ["ArithmeticError", "nobody wants"]
    for fact in facts:
        assert re.search(fact, message), message
    assert ("SIGKILL" if how == "kill" else "nobody wants") in str(failed)
