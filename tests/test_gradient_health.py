"""Watching gradients: norms, and who has brought in NaN or Inf."""

import math
import re

import pytest
import torch
from models import batches, loss_of, mlp, own

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks import default_hooks
from phalanx.testing import run_ranks


def _norms(options, set_to_none, hooked, width):
    model = mlp(width)
    ddp = DDP(model, **options)
    if hooked:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    health = ddp.watch_gradients()
    for batch in batches(3):
        local = mlp(width)
        local.load_state_dict(model.state_dict())
        loss_of(local(own(batch))).backward()
        ddp.zero_grad(set_to_none=set_to_none)
        loss_of(ddp(own(batch))).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        assert health.norm == pytest.approx(expected.item(), rel=1e-5)
        assert math.hypot(*health.bucket_norms) == pytest.approx(health.norm)
        for name, param in local.named_parameters():
            assert health.local_norms[name] == pytest.approx(param.grad.norm().item(), rel=1e-5)
    return health.norm


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize(
    ("options", "set_to_none", "hooked", "width"),
    [
        ({}, True, False, 40),
        ({"bucket_cap_mb": 0.001}, False, False, 40),
        ({"find_unused_parameters": True}, True, True, 40),
        ({"bucket_cap_mb": 0.1}, True, False, 300),
    ],
)
def test_norms(options, set_to_none, hooked, width, ranks):
    first, second = run_ranks(_norms, 2, options, set_to_none, hooked, width, ranks=ranks)
    assert first == second  # to the last bit


def _bad(value, raises):
    model = mlp()
    ddp = DDP(model)
    health = ddp.watch_gradients(raises)
    if dist.get_rank() == 1:
        model[2].weight.register_hook(lambda grad: torch.full_like(grad, value))
    try:
        loss_of(ddp(own(batches(1)[0]))).backward()
    except FloatingPointError as error:
        return str(error), health.bad
    return "", health.bad


@pytest.mark.parametrize(("value", "what"), [(math.nan, "NaN"), (-math.inf, "Inf")])
@pytest.mark.parametrize("raises", [True, False])
def test_what_is_not_finite_is_named_by_parameter_and_rank(value, what, raises):
    for message, bad in run_ranks(_bad, 3, value, raises):
        assert bad == [(1, "2.weight", what)]
        assert bool(message) is raises
        if raises:
            assert re.search(rf"rank 1: {what} in 2\.weight", message)


def _overflows():
    ddp = DDP(torch.nn.Linear(2, 1, bias=False).half())
    ddp.watch_gradients()
    ddp.register_comm_hook(None, lambda state, bucket: _summed(bucket))
    with pytest.raises(FloatingPointError, match="finite on every rank"):
        ddp(torch.full((1, 2), 60000.0).half()).sum().backward()


def _summed(bucket):
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_an_overflow_of_the_sum_is_told_apart():
    run_ranks(_overflows, 2)


def _bad_once():
    ddp = DDP(mlp())
    health = ddp.watch_gradients(raises=False)
    seen = []
    for scale in (float("nan"), 1.0):
        ddp.zero_grad()
        (loss_of(ddp(own(batches(1)[0]))) * (scale if dist.get_rank() == 1 else 1)).backward()
        seen.append({rank for rank, _, _ in health.bad})
    return seen


def test_what_was_bad_is_forgotten_with_the_next_pass():
    assert run_ranks(_bad_once, 3) == [[{1}, set()]] * 3


def _bad_in_a_group():
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        return []
    ddp = DDP(mlp(), process_group=group)
    health = ddp.watch_gradients(raises=False)
    (loss_of(ddp(own(batches(1)[0]))) * (float("inf") if rank == 2 else 1)).backward()
    return health.bad


def test_bad_gradients_are_told_by_ranks_of_the_world():
    _, second, third = run_ranks(_bad_in_a_group, 3)
    assert second == third
    assert {rank for rank, _, _ in second} == {2}
