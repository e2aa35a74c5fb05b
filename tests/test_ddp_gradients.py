"""Gradients that somebody else has to do with: users, their hooks, other wrappers, checkpoints."""

import gc
import time

import pytest
import torch
from models import batches, loss_of, mlp, own
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx import _native
from phalanx.parallel.precision import MixedPrecision
from phalanx.testing import run_ranks

SMALL = {"bucket_cap_mb": 0.001}  # many buckets, most of them reduced during backward


def averages(model, batch):
    """Return the gradients of the whole batch, computed on this rank alone."""
    alone = mlp()
    alone.load_state_dict(model.state_dict())
    loss_of(alone(batch)).backward()
    return [p.grad for p in alone.parameters()]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def _flat_buffer():
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    pieces = flat.split([p.numel() for p in model.parameters()])
    for param, piece in zip(model.parameters(), pieces, strict=True):
        param.grad = piece.view_as(param)
    ddp = DDP(model, **SMALL)
    for batch in batches(4):
        flat.zero_()
        loss_of(ddp(own(batch))).backward()
        same(
            flat.split([p.numel() for p in model.parameters()]),
            [grad.flatten() for grad in averages(model, batch)],
        )


def _kept_objects():
    model = mlp()
    ddp = DDP(model)
    kept = None
    for batch in batches(4):
        ddp.zero_grad(set_to_none=False)
        loss_of(ddp(own(batch))).backward()
        kept = kept or [p.grad for p in model.parameters()]
        same(kept, averages(model, batch))
        assert all(grad is p.grad for grad, p in zip(kept, model.parameters(), strict=True))


def _hooks_of_others():
    model = mlp()
    ddp = DDP(model, **SMALL)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_double)
    model[0].weight.register_post_accumulate_grad_hook(_replace)
    for batch in batches(4):
        ddp.zero_grad()
        loss_of(ddp(own(batch))).backward()
        same([p.grad for p in model.parameters()], [2 * grad for grad in averages(model, batch)])


def _double(param):
    param.grad.mul_(2)


def _replace(param):
    param.grad = param.grad.clone()


def _two_wrappers():
    model = mlp()
    first, second = DDP(model, **SMALL), DDP(model, **SMALL)
    for batch in batches(6):
        model.zero_grad()
        (loss_of(first(own(batch))) + loss_of(second(own(batch)))).backward()
        same([p.grad for p in model.parameters()], [2 * grad for grad in averages(model, batch)])


def _nested():
    inner = DDP(mlp(), **SMALL)
    outer = DDP(nn.Sequential(inner), **SMALL)
    for batch in batches(6):
        outer.zero_grad()
        loss_of(outer(own(batch))).backward()
        same([p.grad for p in inner.parameters()], averages(inner.module, batch))


def _checkpointed(reentrant):
    ddp = DDP(mlp(), **SMALL)
    for batch in batches(3):
        ddp.zero_grad()
        part = own(batch).requires_grad_()
        loss_of(checkpoint(ddp, part, use_reentrant=reentrant)).backward()
        same([p.grad for p in ddp.parameters()], averages(ddp.module, batch))


def _for_inputs():
    ddp = DDP(mlp())
    for batch in batches(2):
        ddp.zero_grad()
        part = own(batch).requires_grad_()
        loss_of(ddp(part)).backward(inputs=[part])
        assert part.grad is not None
        assert ddp.module[0].weight.grad is None
        loss_of(ddp(own(batch))).backward()
        same([p.grad for p in ddp.parameters()], averages(ddp.module, batch))


def _retried():
    """Backward over the same graph, once more, after an exception in the middle."""
    model = mlp()
    ddp = DDP(model, **SMALL)
    fails = []
    model[0].weight.register_hook(lambda grad: 1 / 0 if fails.pop() else None)
    for batch in batches(3):
        ddp.zero_grad()
        loss = loss_of(ddp(own(batch)))
        fails[:] = [False, True]
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        ddp.zero_grad()
        loss.backward()
        same([p.grad for p in model.parameters()], averages(model, batch))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (_flat_buffer, ()),
        (_kept_objects, ()),
        (_hooks_of_others, ()),
        (_two_wrappers, ()),
        (_nested, ()),
        (_checkpointed, (False,)),
        (_checkpointed, (True,)),
        (_for_inputs, ()),
        (_retried, ()),
    ],
)
def test_gradients_are_averages(program, arguments, ranks):
    run_ranks(program, 2, *arguments, ranks=ranks)


def _low_precision():
    model = nn.Linear(4, 2)
    ddp = DDP(model, mixed_precision=MixedPrecision(torch.bfloat16))
    seen = []
    for _ in range(3):
        output = ddp(torch.ones(2, 4))
        with torch.no_grad():
            ddp(torch.ones(2, 4))
        ddp.zero_grad()
        output.float().sum().backward()
        seen.append(model.bias.grad[0].item())
        assert model.weight.dtype == torch.float32
    with pytest.raises(RuntimeError, match="shape"):
        ddp(torch.ones(2, 3))
    assert model.weight.dtype == torch.float32
    ddp(torch.ones(2, 4))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="low precision"):
        ddp(torch.ones(2, 4))
    return seen


def test_low_precision_hides_no_gradients_and_loses_no_steps():
    assert run_ranks(_low_precision, 2) == [[2.0] * 3] * 2


def _rewrapped():
    model = mlp(width=300)
    used = []
    for _ in range(5):
        ddp = DDP(model)
        loss_of(ddp(own(batches(1)[0]))).backward()
        model.zero_grad()
        del ddp
        gc.collect()
        used.append(_native.heap_used())
    assert len(model[0].weight._post_accumulate_grad_hooks) == 0
    return used


def test_a_wrapper_leaves_nothing_behind():
    (used,) = run_ranks(_rewrapped, 1)
    assert used[-1] <= used[0]  # garbage of other tests may go meanwhile


# What hooks do with futures


def _waits(how):
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
        if how == "wait":
            future.wait()
        elif how == "polling":
            deadline = time.monotonic() + 20
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.001)
        elif how == "collected":
            torch.futures.wait_all([future])
        return future

    ddp = DDP(mlp())
    ddp.register_comm_hook(None, hook)
    batch = batches(1)[0]
    loss_of(ddp(own(batch))).backward()
    same([p.grad for p in ddp.parameters()], averages(ddp.module, batch))


@pytest.mark.parametrize("how", ["not", "wait", "polling", "collected"])
def test_hooks_may_wait_in_any_way(how):
    run_ranks(_waits, 2, how, timeout=30)


def _returns(value):
    ddp = DDP(mlp())
    ddp.register_comm_hook(None, lambda state, bucket: value)
    with pytest.raises(TypeError, match=r"Future"):
        loss_of(ddp(own(batches(1)[0]))).backward()


@pytest.mark.parametrize("value", [None, torch.ones(3)])
def test_hooks_must_return_futures(value):
    run_ranks(_returns, 1, value)
