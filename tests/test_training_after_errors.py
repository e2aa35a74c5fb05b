"""What holds of everything that has state in training after an exception has passed through it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from phalanx.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from phalanx.algorithms.model_averaging.averagers import PeriodicModelAverager
from phalanx.data import DistributedSampler
from phalanx.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from phalanx.optim.subset import step_only
from phalanx.parallel.precision import MixedPrecision
from phalanx.testing import run_ranks

SIZE = 3
RATE = 0.25


class Planned(Exception):
    """What the tests raise."""


class Explodes(torch.autograd.Function):
    """The identity, whose backward may raise."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise Planned
        return grad, None


class Fragile(nn.Module):
    """A model of which parts stay unused, sparse or common to all ranks, and that may raise."""

    def __init__(self, kind: str, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        if kind in ("static", "unused"):
            self.never = nn.Linear(2, 2)
        if "sparse" in kind:
            self.table = nn.Embedding(6, 5, sparse=True)
        if kind == "syncbn":
            self.norm = nn.BatchNorm1d(5) if alone else dist.SyncBatchNorm(5)
        self.double()

    def forward(self, x: Tensor, ids: Tensor, place: str = "") -> Tensor:
        hidden = self.first(x)
        if "sparse" in self.kind:
            hidden = hidden + self.table(ids)
        if self.kind == "syncbn":
            hidden = self.norm(hidden)
        if place == "forward":
            raise Planned
        return self.second(Explodes.apply(hidden, place in ("backward", "no_sync")).tanh())


OPTIONS = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "mixed": {"mixed_precision": MixedPrecision(torch.float32, torch.float32)},
    "sparse": {},
    "mixed sparse": {"mixed_precision": MixedPrecision(torch.float32, torch.float32)},
    "syncbn": {},
    "watched": {},
}
# Where on all ranks; and where on one of them, so that the others have to be told.
EVERYWHERE = (
    "forward",
    "loss",
    "above",
    "backward",
    "no_sync",
    "block",
    "param",
    "hook",
    "callback",
)
ONCE = ("backward", "param", "hook", "callback")


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2 + rank, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(6 - rank, (2 + rank,), generator=generator)


def loss_of(output: Tensor, rank: int) -> Tensor:
    return (output.double() - 0.5 * rank).square().mean() * (1 + rank)


class Hook:
    """Averages, and may raise when it is called or when its average is there."""

    armed = ""

    def __call__(self, state, bucket):
        armed = self.armed if bucket.index() == 0 else ""
        if armed == "hook":
            raise Planned
        future = allreduce_hook(state, bucket)

        def then(done):
            if armed == "callback":
                raise Planned
            return done.value()

        return future.then(then)


def attempt(ddp: DDP, hook: Hook, place: str, step: int) -> None:
    """Make a forward and a backward pass, with an exception at a place."""
    rank = dist.get_rank()
    hook.armed = place
    handles = []
    if place == "param":

        def explode(grad: Tensor) -> None:
            raise Planned

        handles.append(ddp.module.first.bias.register_hook(explode))
    try:
        with ddp.no_sync() if place in ("no_sync", "block") else nullcontext():
            output = ddp(*data(step, rank), place)
            if place in ("loss", "block"):
                raise Planned
            loss_of(Explodes.apply(output, place == "above"), rank).backward()
    finally:
        hook.armed = ""
        for handle in handles:
            handle.remove()


FAILED = (0, 3)  # the steps with exceptions: the first one, and one with the later buckets
STEPS = 6


def expected(kind: str) -> list[dict[str, Tensor | None]]:
    """Return the gradients of each step in one process with the data of all ranks."""
    net = Fragile(kind, alone=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    results = []
    for step in range(STEPS):
        if step in FAILED:
            results.append({})
            continue
        optimizer.zero_grad()
        rows = [data(step, rank) for rank in range(SIZE)]
        output = net(torch.cat([x for x, _ in rows]), torch.cat([ids for _, ids in rows]))
        parts = output.split([len(x) for x, _ in rows])
        (sum(loss_of(part, rank) for rank, part in enumerate(parts)) / SIZE).backward()
        results.append(
            {n: None if p.grad is None else p.grad.to_dense() for n, p in net.named_parameters()}
        )
        optimizer.step()
    return results


def _survives(kind: str, place: str, ranks: list[int]):
    """Train some steps, of which two fail; return the gradients and what was raised."""
    net = Fragile(kind)
    hook = Hook()
    ddp = DDP(net, bucket_cap_mb=0.00001, **OPTIONS[kind])
    if place in ("hook", "callback"):
        ddp.register_comm_hook(None, hook)
    health = ddp.watch_gradients() if kind == "watched" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    grads, errors = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in net.parameters()]
        where = place if step in FAILED and dist.get_rank() in ranks else ""
        try:
            attempt(ddp, hook, where, step)
        except (RuntimeError, Planned) as error:
            errors.append((step, type(error), str(error)))
            if place not in ("loss", "above", "block"):  # which DDP does not hear of
                assert all(p.dtype is torch.float64 for p in net.parameters())
                assert all(map(torch.equal, before, net.parameters()))
            grads.append({})
            continue
        assert ddp.require_backward_grad_sync
        assert all(p.dtype is torch.float64 for p in net.parameters())
        grads.append(
            {
                n: None if p.grad is None else p.grad.to_dense().clone()
                for n, p in net.named_parameters()
            }
        )
        if health is not None:
            total = sum(float(g.square().sum()) for g in grads[-1].values() if g is not None)
            assert health.norm == pytest.approx(total**0.5)
            assert set(health.local_norms) == set(grads[-1])
        optimizer.step()
    return grads, errors


def _compare(kind: str, results) -> None:
    tolerance = 3e-6 if "mixed" in kind else 1e-10
    for step, true in enumerate(expected(kind)):
        for rank, (grads, _) in enumerate(results):
            assert grads[step].keys() == true.keys(), (rank, step)
            for name, grad in true.items():
                mine = grads[step][name]
                if grad is None or mine is None:
                    assert mine is grad, (rank, step, name)
                else:
                    torch.testing.assert_close(mine, grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("kind", OPTIONS)
def test_ddp_after_an_exception_on_all_ranks(kind: str, place: str) -> None:
    results = run_ranks(_survives, SIZE, kind, place, [0, 1, 2])
    for _, errors in results:
        assert tuple(step for step, _, _ in errors) == FAILED
    _compare(kind, results)


@pytest.mark.parametrize("place", ONCE)
@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind != "syncbn"])
def test_ddp_after_an_exception_on_one_rank(kind: str, place: str) -> None:
    results = run_ranks(_survives, SIZE, kind, place, [1])
    for rank, (_, errors) in enumerate(results):
        assert tuple(step for step, _, _ in errors) == FAILED
        if rank != 1:
            for _, _, message in errors:
                assert "rank 1 left its backward pass by an exception" in message
    _compare(kind, results)


def _nothing_left(cap: float):
    net = Fragile("plain")
    ddp = DDP(net, bucket_cap_mb=cap)
    rank, hook = dist.get_rank(), Hook()
    for step in range(3):
        ddp.zero_grad()
        attempt(ddp, hook, "", step)
    ddp.zero_grad()
    with pytest.raises(Planned):
        attempt(ddp, hook, "backward", 3)
    output = ddp(*data(4, rank))  # no zero_grad
    assert all(p.grad is None for p in net.parameters())
    loss_of(output, rank).backward()
    return net.first.weight.grad


@pytest.mark.parametrize("cap", [25, 0.00001])
def test_gradients_of_a_pass_that_was_left_are_dropped(cap: float) -> None:
    for grad in run_ranks(_nothing_left, SIZE, cap):
        torch.testing.assert_close(grad, _one_gradient(4))


def _watched():
    """Leave a pass with a gradient that is not finite; then leave that parameter out."""
    rank = dist.get_rank()
    net = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("early", "late")})

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, names, place=""):
            return sum(Explodes.apply(net[name](x), place == name).sum() for name in names)

    ddp = DDP(Two(), find_unused_parameters=True, bucket_cap_mb=0.00001)
    health = ddp.watch_gradients()
    x = torch.tensor([[1.0, 2.0]]) * (rank + 1)
    ddp(x, ["early", "late"]).backward()
    with pytest.raises(Planned):
        ddp(x * 1e9, ["early", "late"], "early").backward()
    ddp.zero_grad()
    ddp(x, ["early"]).backward()
    return health.local_norms, health.norm


def test_norms_of_a_pass_that_was_left_are_forgotten() -> None:
    for rank, (norms, norm) in enumerate(run_ranks(_watched, SIZE)):
        assert norms == pytest.approx({"net.early.weight": 10**0.5 * (rank + 1)})
        assert norm == pytest.approx(10**0.5 * 2)


def _changed_group():
    net = Fragile("plain")
    ddp = DDP(net, bucket_cap_mb=0.00001, static_graph=True)
    hook = Hook()
    for step in range(2):
        attempt(ddp, hook, "", step)
    assert ddp.reducer.rebuilt
    ddp._update_process_group(dist.new_group())
    assert ddp.reducer.learning
    for step in range(2, 4):
        assert not ddp.reducer.rebuilt
        ddp.zero_grad()
        attempt(ddp, hook, "", step)
        if step == 2:
            ddp._update_process_group(dist.new_group())
    return net.first.weight.grad


def test_a_changed_group_begins_anew() -> None:
    for grad in run_ranks(_changed_group, SIZE):
        torch.testing.assert_close(grad, _one_gradient(3))


def _left_in_a_group():
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        return ""
    ddp = DDP(Fragile("plain"), process_group=group)
    with pytest.raises((RuntimeError, Planned)) as caught:
        ddp(*data(0, rank), "backward" if rank == 2 else "").sum().backward()
    ddp(*data(1, rank)).sum().backward()
    return str(caught.value)


def test_the_rank_that_has_left_is_named_as_in_the_world() -> None:
    assert "rank 2 left its backward pass" in run_ranks(_left_in_a_group, SIZE)[1]


def _refused_again():
    net = Fragile("plain")
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": RATE})
    late = [("second.weight", net.second.weight)]
    ddp = DDP(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.first.weight)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stepped during backward"):
            ddp(*data(0, dist.get_rank()))


def test_what_is_refused_at_first_is_refused_again() -> None:
    run_ranks(_refused_again, SIZE)


# Parameters in low precision


def _changed(how: str, ranks: list[int], forward_only: bool):
    """Change a parameter between forward and backward; return what was raised, and a gradient."""
    net = Fragile("mixed")
    ddp = DDP(net, mixed_precision=MixedPrecision(torch.float32))
    rank, errors = dist.get_rank(), []
    before = net.first.weight.detach().clone()
    for step in range(3):
        ddp.zero_grad()
        try:
            output = ddp(*data(step, rank))
            if step == 1 and rank in ranks:
                with torch.no_grad():
                    if how == "in place":
                        net.first.weight.add_(1 + rank)
                    else:
                        net.first.weight.data = net.first.weight.data + 1
                if forward_only:
                    ddp(*data(step, rank))
            loss_of(output, rank).backward()
        except RuntimeError as error:
            errors.append((step, str(error)))
        assert net.first.weight.dtype is torch.float64
        assert torch.equal(net.first.weight, before)
    return errors, net.first.weight.grad


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_parameter_changed_in_low_precision_is_told_once(how: str, forward_only: bool) -> None:
    results = run_ranks(_changed, SIZE, how, [0, 1, 2], forward_only)
    true = _one_gradient(2)
    for errors, grad in results:
        assert [step for step, _ in errors] == [1]
        assert "(5, 4) was changed between a forward pass and its backward" in errors[0][1]
        torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-5)


def _changed_and_left():
    net = Fragile("mixed")
    ddp = DDP(net, mixed_precision=MixedPrecision(torch.float32))
    before = net.first.weight.detach().clone()
    for no_sync in (False, True):
        with ddp.no_sync() if no_sync else nullcontext():
            output = ddp(*data(0, dist.get_rank()), "backward")
            with torch.no_grad():
                net.first.weight.add_(1)
            with pytest.raises(Planned):  # which hides nothing, and is not hidden
                output.sum().backward()
        assert torch.equal(net.first.weight, before)


def test_a_parameter_changed_in_a_pass_that_was_left() -> None:
    run_ranks(_changed_and_left, SIZE)


def test_a_parameter_changed_on_one_rank_is_told_there() -> None:
    results = run_ranks(_changed, SIZE, "in place", [1], False)
    assert [len(errors) for errors, _ in results] == [0, 1, 0]
    for _, grad in results:
        torch.testing.assert_close(grad, _one_gradient(2), rtol=1e-5, atol=1e-5)


def _one_gradient(step: int, ranks: tuple[int, ...] = (0, 1, 2), divisor: int = SIZE) -> Tensor:
    """Return the gradient of the first weight in one process with the data of all ranks."""
    net = Fragile("plain")
    for rank in ranks:
        (loss_of(net(*data(step, rank)), rank) / divisor).backward()
    grad = net.first.weight.grad
    assert grad is not None
    return grad


# Uneven inputs


def _leaves_join(throws: bool):
    """Leave a join context by exceptions after one rank has run out; train on without it."""
    net = Fragile("plain")
    ddp = DDP(net)
    rank, seen = dist.get_rank(), []

    def loop() -> None:
        with ddp.join(divide_by_initial_world_size=False, throw_on_early_termination=throws):
            for step in range(1 if rank == 2 else 2):
                ddp.zero_grad()
                loss_of(ddp(*data(step, rank)), rank).backward()
                seen.append(net.first.weight.grad.clone())
            if rank != 2:
                dist.barrier()  # which rank 2 does not shadow

    with pytest.raises(RuntimeError) as caught:
        loop()
    ddp.zero_grad()
    loss_of(ddp(*data(5, rank)), rank).backward()
    return str(caught.value), seen, net.first.weight.grad


@pytest.mark.parametrize("throws", [False, True])
def test_ddp_after_a_join_that_was_left(throws: bool) -> None:
    for rank, (message, seen, grad) in enumerate(run_ranks(_leaves_join, SIZE, throws)):
        assert ("exhausted" in message) == throws
        assert len(seen) == (1 if throws or rank == 2 else 2)
        torch.testing.assert_close(seen[0], _one_gradient(0))
        if len(seen) > 1:
            torch.testing.assert_close(seen[1], _one_gradient(1, (0, 1), 2))
        torch.testing.assert_close(grad, _one_gradient(5))


# Optimizers


class Moody(torch.optim.SGD):
    """Raises in the middle of a step, if it is told to."""

    armed = False

    def step(self, closure=None):
        if closure is not None:
            closure()
        if type(self).armed:
            raise Planned
        return super().step()


def _zero(as_views: bool, in_closure: bool):
    rank = dist.get_rank()
    torch.manual_seed(2)
    params = [nn.Parameter(torch.randn(3, 2 + i)) for i in range(4)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]

    class Own(Moody):  # the flag is this rank's
        pass

    def explode() -> None:
        raise Planned

    options = {"lr": 0.5, "momentum": 0.5}
    zero = ZeroRedundancyOptimizer(params, Own, parameters_as_bucket_view=as_views, **options)
    plain = torch.optim.SGD(twins, **options)
    for step in range(4):
        for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad = torch.full_like(param, step + i / 4 - 1)
            twin.grad = param.grad.clone()
        if step == 2:
            zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.125
            before = [p.detach().clone() for p in params]
            Own.armed = not in_closure
            with pytest.raises(Planned):
                zero.step(explode) if in_closure else zero.step()
            Own.armed = False
            assert all(map(torch.equal, before, params)), rank
        zero.step()
        plain.step()
        assert all(map(torch.equal, params, twins)), (rank, step)
        assert zero.optim.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


@pytest.mark.parametrize("in_closure", [False, True])
@pytest.mark.parametrize("as_views", [False, True])
def test_zero_after_an_exception_in_a_step(as_views: bool, in_closure: bool) -> None:
    run_ranks(_zero, SIZE, as_views, in_closure)


def test_a_step_of_some_parameters_that_fails_changes_nothing() -> None:
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    own = [torch.full((2,), 10.0 + i) for i in range(3)]
    for param, grad in zip(params, own, strict=True):
        param.grad = grad

    class Own(Moody):
        armed = True

    optimizer = Own([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    with pytest.raises(Planned):
        step_only(optimizer, params[1:], [torch.ones(2), torch.ones(2)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert all(p.grad is grad for p, grad in zip(params, own, strict=True))
    Own.armed = False
    step_only(optimizer, [params[1]], [torch.full((2,), 5.0)])
    assert [p.tolist() for p in params] == [[0.0, 0.0], [0.5, 0.5], [2.0, 2.0]]


# Averages of models


def _averages(kind: str):
    rank = dist.get_rank()
    param = nn.Parameter(torch.full((2,), 3.0 * rank))
    param.grad = torch.zeros(2)
    averager = PeriodicModelAverager(2, warmup_steps=1)

    class Own(Moody):
        pass

    optimizer = PostLocalSGDOptimizer(Own([param], lr=1.0), averager)
    counts = []
    for step in range(5):
        if step == 1:  # the first time that it averages
            if kind == "optimizer":
                Own.armed = True
                with pytest.raises(Planned):
                    optimizer.step()
                Own.armed = False
            else:
                wrong = [param, 7] if kind == "before" else [param] * (rank + 1)
                with pytest.raises((TypeError, dist.CollectiveMismatch)):
                    averager.average_parameters(wrong)
            assert param.tolist() == [4.0 * rank] * 2
        counts.append(averager.step)
        optimizer.step()
        param.data += rank
    return counts, param.tolist()


@pytest.mark.parametrize("kind", ["optimizer", "before", "exchange"])
def test_averagers_count_no_step_that_failed(kind: str) -> None:
    for rank, (counts, values) in enumerate(run_ranks(_averages, SIZE, kind)):
        assert counts == [0, 1, 2, 3, 4]
        # Averages in steps 1 (of 4 r) and 3 (of 4 + 2 r); each step adds r.
        assert values == [6.0 + 2 * rank] * 2


# Batch normalization


def _batch_norm():
    layer = dist.SyncBatchNorm(2).double()
    rank = dist.get_rank()
    x = torch.arange(2.0 * (rank + 2)).double().view(-1, 2) * (rank + 1)
    layer(x)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(int(rank == 1), 2).double())
    with pytest.raises(ValueError, match="3 channels"):
        layer(torch.ones(4, 3).double())
    with pytest.raises((RuntimeError, dist.CollectiveMismatch)):
        # One rank has another number of channels, which no rank can know before.
        dist.SyncBatchNorm(2 + (rank == 1))(torch.ones(4, 2 + (rank == 1)))
    assert all(map(torch.equal, before.values(), layer.state_dict().values()))
    return layer(x), layer.running_var


def test_batch_norm_after_errors() -> None:
    results = run_ranks(_batch_norm, SIZE)
    layer = nn.BatchNorm1d(2).double()
    inputs = [torch.arange(2.0 * (r + 2)).double().view(-1, 2) * (r + 1) for r in range(SIZE)]
    layer(torch.cat(inputs))
    output = layer(torch.cat(inputs))
    torch.testing.assert_close(torch.cat([out for out, _ in results]), output)
    for _, variance in results:
        torch.testing.assert_close(variance, layer.running_var)


# Samplers


def test_a_sampler_after_an_epoch_that_was_left() -> None:
    sampler = DistributedSampler(range(20), num_replicas=3, rank=1, seed=4)
    whole = list(sampler)
    left = iter(sampler)
    assert [next(left) for _ in range(3)] == whole[:3]
    state = sampler.state_dict()
    assert state["position"] == 9
    assert len(sampler) == 7
    assert list(sampler) == whole  # a new iteration is a new epoch
    next(iter(sampler))
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0
    sampler.set_epoch(0)
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="another order"):
        sampler.load_state_dict({**state, "length": 21})
    assert len(sampler) == 4
    assert list(sampler)[:3] == whole[3:6]


# PowerSGD


def _power(place: str):
    """Approximate exactly, with an exception on one rank or all; return gradients and state."""
    net = Fragile("plain")
    ddp = DDP(net, bucket_cap_mb=0.00001)
    state = PowerSGDState(
        None, matrix_approximation_rank=9, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    ddp.register_comm_hook(state, powerSGD_hook)
    rank, grads, errors = dist.get_rank(), [], []
    for step in range(6):
        ddp.zero_grad()
        where = "backward" if step == 4 and (place == "all" or rank == 1) else ""
        try:
            loss_of(ddp(*data(step, rank), where), rank).backward()
        except (RuntimeError, Planned):
            errors.append(step)
        grads.append(None if net.first.weight.grad is None else net.first.weight.grad.clone())
    return grads, errors, state.iter, sorted(state.q_memory_dict)


@pytest.mark.parametrize("place", ["all", "one"])
def test_power_sgd_after_an_exception_in_backward(place: str) -> None:
    results = run_ranks(_power, SIZE, place)
    for grads, errors, iterations, kept in results:
        assert errors == [4]
        assert iterations == 6
        assert kept == results[0][3]
        for step in (3, 5):
            torch.testing.assert_close(grads[step], _one_gradient(step), rtol=1e-8, atol=1e-8)
