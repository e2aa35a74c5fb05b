"""Whose gradients are whose, on Pythons that count references in other ways."""

import sys
import weakref

import pytest
import torch
from models import batches, loss_of, mlp, own

from phalanx import DistributedDataParallel as DDP
from phalanx.parallel import buckets, ownership
from phalanx.testing import run_ranks

_count = sys.getrefcount


class Sometimes:
    """Counts one less at times."""

    def __init__(self):
        self._calls = 0

    def __call__(self, thing):
        self._calls += 1
        return _count(thing) - (self._calls % 7 == 0)


# By whether they tell a tensor that somebody else has.
PYTHONS = {
    "this": (lambda: _count, True),
    "borrows": (lambda: lambda thing: _count(thing) - 2, True),
    "counts more": (lambda: lambda thing: _count(thing) + 3, True),
    "does not count": (lambda: lambda thing: 1, False),
    "immortal": (lambda: lambda thing: 2**32 - 1, False),
    "counts twice": (lambda: lambda thing: 2 * _count(thing), False),
    "changes": (Sometimes, False),
}


@pytest.fixture(params=PYTHONS)
def tells(request, monkeypatch):
    """Count references in another way; give whether references can be told by it."""
    make, tells = PYTHONS[request.param]
    monkeypatch.setattr(sys, "getrefcount", make())
    held = ownership.Holdings()
    monkeypatch.setattr(ownership, "held", held)
    monkeypatch.setattr(buckets, "held", held)
    assert [way.is_known() for way in vars(held).values()] == [tells] * 3
    return tells


def _steps(model, ddp, count):
    for step, batch in enumerate(batches(count)):
        model.zero_grad()
        loss_of(ddp(own(batch) + step)).backward()
        yield step


def _keeps_gradients():
    model = mlp()
    ddp, kept = DDP(model), []
    for step in _steps(model, ddp, 4):
        grads = [param.grad for param in model.parameters()]
        kept += [(grad, grad.clone()) for grad in grads[step % 2 :: 2]]
        del grads
    for grad, copied in kept:
        assert torch.equal(grad, copied)
    return len(kept)


def test_a_gradient_that_is_kept_is_never_overwritten(tells):
    assert run_ranks(_keeps_gradients, 2)[0] > 4


def _brings_gradients():
    """Give parameters gradients before: some that the caller has as well, some that nobody has."""
    model = mlp()
    ddp, mine, theirs = DDP(model), {}, []
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 0.5)
        if number % 2:
            mine[number] = param.grad
        else:
            theirs.append(weakref.ref(param.grad))
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    (batch,) = batches(1)
    loss_of(ddp(own(batch))).backward()
    loss_of(plain(batch)).backward()
    for number, (param, other) in enumerate(
        zip(model.parameters(), plain.parameters(), strict=True)
    ):
        torch.testing.assert_close(param.grad, other.grad + number + 0.5)
        if number % 2:
            assert param.grad is mine[number]
    return sum(each() is None for each in theirs), len(theirs)


def test_a_gradient_that_was_brought_gets_the_result(tells):
    for gone, count in run_ranks(_brings_gradients, 2):
        # What nobody else has need not stay, which saves the way back.
        assert gone == (count if tells else 0)


def _keeps_nothing():
    model = mlp()
    ddp, places = DDP(model), set()
    for step in _steps(model, ddp, 5):
        if step > 1:  # buckets are built anew after the first
            places.add(tuple(param.grad.data_ptr() for param in model.parameters()))
    return len(places)


def test_memory_that_nobody_has_is_used_again(tells):
    for places in run_ranks(_keeps_nothing, 2):
        assert (places == 1) == tells
