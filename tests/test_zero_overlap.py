"""ZeRO's step during backward: the same as the plain optimizer's after it."""

import copy
import logging

import pytest
import torch
from models import batches, loss_of, mlp, own
from test_zero import assert_same, assert_same_state
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from phalanx.optim import ZeroRedundancyOptimizer as Zero
from phalanx.parallel.buckets import GradBucket
from phalanx.testing import run_ranks

HOOKS = [hook_with_zero_step, hook_with_zero_step_interleaved]
BUCKET = 0.0004  # MiB: several buckets


def average(state, bucket):
    """Average into memory of its own, so that results must be carried back."""
    flat = bucket.buffer().clone()
    work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def average_in_place(state, bucket):
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future()


def overlapping(hook_maker, model=None, params=None, reduce=average, shard=False, **options):
    """Return a model and the optimizer that steps it in backward, past the first iterations."""
    ddp = DDP(mlp() if model is None else model, bucket_cap_mb=BUCKET, **options)
    params = ddp.parameters() if params is None else params(ddp.module)
    zero = Zero(params, torch.optim.Adam, overlap_with_ddp=True, lr=0.01, weight_decay=0.1)
    ddp.register_comm_hook(None, hook_maker(reduce, ddp, zero, shard_buckets=shard))
    before = [p.detach().clone() for p in ddp.parameters()]
    for batch in batches(3 if options.get("static_graph") else 2, seed=5):
        assert not zero._is_divided
        loss_of(ddp(own(batch))).backward()
    assert_same(ddp.parameters(), before)
    return ddp, zero


def plain(model=None, params=None):
    ddp = DDP(mlp() if model is None else model, bucket_cap_mb=BUCKET)
    params = ddp.parameters() if params is None else params(ddp.module)
    return ddp, torch.optim.Adam(params, lr=0.01, weight_decay=0.1)


def train(ddp, optimizer, inputs):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for x in inputs:
        optimizer.zero_grad()
        loss_of(ddp(x)).backward()
        if not isinstance(optimizer, Zero):
            optimizer.step()
        schedule.step()


def _overlap(hook_maker, reduce, shard, uneven, options):
    ddp, zero = overlapping(hook_maker, reduce=reduce, shard=shard, **options)
    alone, optimizer = plain()
    inputs = [own(batch) for batch in batches(4 + (2 * dist.get_rank() if uneven else 0))]
    with ddp.join(enable=uneven):
        train(ddp, zero, inputs)
    with alone.join(enable=uneven):
        train(alone, optimizer, inputs)
    assert_same(ddp.parameters(), alone.parameters())
    if not uneven:
        assert_same(*[[p.grad for p in model.parameters()] for model in (ddp, alone)])
    last = dist.get_world_size() - 1
    zero.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        assert_same_state(zero.state_dict(), optimizer.state_dict())
    return len(zero._buckets), sum(p.numel() for p in zero.optim.param_groups[0]["params"])


@pytest.mark.parametrize("hook_maker", HOOKS)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("reduce", "options"),
    [
        (average, {}),
        (average_in_place, {"gradient_as_bucket_view": True}),
        (average_in_place, {"static_graph": True}),
    ],
    ids=["copy", "view", "static"],
)
def test_same_as_the_plain_optimizer(hook_maker, reduce, shard, uneven, options):
    results = run_ranks(_overlap, 2, hook_maker, reduce, shard, uneven, options)
    assert len({num_buckets for num_buckets, _ in results}) == 1
    assert results[0][0] > 2
    assert sum(share for _, share in results) == sum(p.numel() for p in mlp().parameters())


@pytest.mark.parametrize("hook_maker", HOOKS)
@pytest.mark.parametrize("size", [1, 3])
def test_any_number_of_ranks(hook_maker, size):
    run_ranks(_overlap, size, hook_maker, average_in_place, True, False, {})


def test_processes():
    run_ranks(_overlap, 2, HOOKS[1], average_in_place, True, True, {}, ranks="processes")


def groups(model):
    return [
        {"params": [m.weight for m in model if isinstance(m, nn.Linear)]},
        {"params": [m.bias for m in model if isinstance(m, nn.Linear)], "lr": 0.2},
    ]


def weights(model):
    return [m.weight for m in model if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("params", [groups, weights])
def test_groups_schedules_and_only_some_parameters(params):
    def work():
        ddp, zero = overlapping(HOOKS[0], params=params, shard=True)
        alone, optimizer = plain(params=params)
        for model, each in ((ddp, zero), (alone, optimizer)):
            train(model, each, [own(batch) for batch in batches(3)])
        assert_same(ddp.parameters(), alone.parameters())
        zero.consolidate_state_dict()
        if dist.get_rank() == 0:
            assert_same_state(zero.state_dict(), optimizer.state_dict())
        zero.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(ddp, zero, [own(batch) for batch in batches(2, seed=3)])
        train(alone, optimizer, [own(batch) for batch in batches(2, seed=3)])
        assert_same(ddp.parameters(), alone.parameters())

    run_ranks(work, 2)


def test_wrong_use_is_told():
    def work():
        ddp = DDP(mlp())
        group = dist.new_group([0, 1])
        options = {"overlap_with_ddp": True, "lr": 0.1}
        for hook_maker in HOOKS:
            with pytest.raises(ValueError, match="overlap_with_ddp=True"):
                hook_maker(average, ddp, Zero(ddp.parameters(), torch.optim.SGD, lr=0.1))
        elsewhere = Zero(ddp.parameters(), torch.optim.SGD, group, **options)
        with pytest.raises(ValueError, match="one process group, but have 'world' and"):
            hook_with_zero_step(average, ddp, elsewhere)
        skipping = DDP(mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
            hook_with_zero_step(
                average, skipping, Zero(skipping.parameters(), torch.optim.SGD, **options)
            )

    run_ranks(work, 2)


def test_parameters_that_ddp_does_not_reduce_are_told():
    def work():
        extra = nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match=r"parameter 6 of group 0 \(\[3\]\) would never be"):
            overlapping(HOOKS[0], params=lambda model: [*model.parameters(), extra])

    run_ranks(work, 2)


def test_groups_can_be_added_only_before():
    def work():
        ddp = DDP(mlp(), bucket_cap_mb=BUCKET)
        first, second = groups(ddp.module)
        zero = Zero([first], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        zero.add_param_group(second)
        ddp.register_comm_hook(None, hook_with_zero_step(average, ddp, zero))
        for batch in batches(3):
            loss_of(ddp(own(batch))).backward()
        assert len(zero.optim.param_groups) == 2
        with pytest.raises(RuntimeError, match="add all groups before the first backward"):
            zero.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    run_ranks(work, 2)


def test_step_does_nothing(caplog):
    def work():
        model = mlp()
        zero = Zero(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        for operation in (zero.state_dict, zero.consolidate_state_dict, zero.local_state_dict):
            with pytest.raises(RuntimeError, match=f"{operation.__name__}: with overlap_with_ddp"):
                operation()
        loss_of(model(batches(1)[0])).backward()
        zero.step()
        assert_same(model.parameters(), mlp().parameters())

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        run_ranks(work, 1)
    assert "step() does nothing with overlap_with_ddp" in caplog.text


def _other_bucket():
    ddp, _ = overlapping(hook_with_zero_step)
    bucket = ddp.reducer.buckets[0]
    before = [p.detach().clone() for p in ddp.parameters()]
    given = GradBucket(0, 1, bucket.flat, bucket.gradients(), bucket.parameters()[:-1])
    with pytest.raises(RuntimeError, match="bucket 0 holds other parameters"):
        ddp.reducer._run_comm_hook(given)
    assert_same(ddp.parameters(), before)


def test_a_bucket_that_is_not_the_one_divided_is_refused():
    run_ranks(_other_bucket, 2)


def _divides():
    model = mlp()
    model[0].bias.requires_grad_(False)  # which is the optimizer's, and never updated
    ddp, zero = overlapping(hook_with_zero_step, model)
    loss_of(ddp(own(batches(1)[0]))).backward()
    return len(zero.optim.state)


def test_every_rank_has_some_of_the_state():
    counts = run_ranks(_divides, 2)
    assert sum(counts) == 5
    assert min(counts) > 0
