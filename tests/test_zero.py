"""Optimizer state divided among the ranks: the same results as the plain optimizer's."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import batches, loss_of, mlp, own
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.join import Join
from phalanx.optim import ZeroRedundancyOptimizer as Zero
from phalanx.optim import shards
from phalanx.testing import run_ranks


def assert_same(ours, theirs):
    """Compare bit by bit."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_same_state(ours, theirs):
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert_same(
            [torch.as_tensor(ours["state"][number][key]) for key in state],
            [torch.as_tensor(value) for value in state.values()],
        )


def train(model, optimizer, steps=4, seed=1):
    for batch in batches(steps, seed):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()


def same_as_plain(optimizer_class, model, steps=4, view=False, **options):
    """Train with and without sharing on the same gradients; return the sharing optimizer."""
    alone = copy.deepcopy(model)
    zero = Zero(model.parameters(), optimizer_class, parameters_as_bucket_view=view, **options)
    plain = optimizer_class(alone.parameters(), **options)
    train(model, zero, steps)
    train(alone, plain, steps)
    assert_same(model.parameters(), alone.parameters())
    zero.consolidate_state_dict(to=zero.world_size - 1)
    if zero.rank == zero.world_size - 1:
        assert_same_state(zero.state_dict(), plain.state_dict())
    return zero


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "maximize": True, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def _plain(name, view):
    optimizer_class, options = OPTIMIZERS[name]
    zero = same_as_plain(optimizer_class, mlp(), view=view, **options)
    return [p.numel() for p in zero.optim.param_groups[0]["params"]], len(zero.optim.state)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_the_plain_optimizer(name, view):
    shares = run_ranks(_plain, 2, name, view)
    assert shares == [([1600], 1), ([240, 120, 40, 40, 3], 5)]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("size", "ranks"), [(1, "threads"), (3, "threads"), (2, "processes")])
def test_same_on_any_number_of_ranks(size, ranks, view):
    run_ranks(_plain, size, "adam", view, ranks=ranks)


def test_more_ranks_than_parameters():
    def work():
        zero = same_as_plain(torch.optim.Adam, nn.Linear(6, 2, bias=False), lr=0.1)
        return len(zero.optim.state)

    assert run_ranks(work, 3) == [1, 0, 0]


class Odd(nn.Module):
    """Other memory formats and element types, parameters of no size and of no dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.none = nn.Parameter(torch.ones(0))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.spread = nn.Parameter(torch.randn(6, 2)[:, 0])

    def forward(self, x):
        image = x[:, :3, None, None].expand(-1, -1, 4, 4)
        y = x @ self.transposed.t() * self.scalar
        extra = (x.double() @ self.wide).float() + (x.bfloat16() @ self.narrow).float()
        return y + (extra + x @ self.spread + self.none.sum())[:, None] + self.conv(image).mean()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("piece", [None, 64, 0], ids=["one piece", "pieces", "all large"])
def test_odd_parameters(monkeypatch, piece, view):
    if piece is not None:
        monkeypatch.setattr(shards, "_PIECE", piece)

    def work():
        model = Odd()
        strides = [p.stride() for p in model.parameters()]
        same_as_plain(torch.optim.SGD, model, view=view, lr=0.01, momentum=0.9)
        if not view:  # else what has gaps is laid out dense
            assert [p.stride() for p in model.parameters()] == strides
        assert model.conv.weight.stride() == Odd().conv.weight.stride()

    run_ranks(work, 2)


def test_a_step_is_one_exchange():
    def work(view):
        model = mlp()
        zero = Zero(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=view, lr=0.1)
        train(model, zero, 1)
        before = dist.group.WORLD.sequence_number()
        train(model, zero, 2)
        return dist.group.WORLD.sequence_number() - before

    assert run_ranks(work, 2, False) == run_ranks(work, 2, True) == [2, 2]


def test_parameters_may_get_other_memory():
    def work(view):
        model, alone = mlp(), mlp()
        zero = Zero(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=view, lr=0.1)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        for each in (model, alone):
            each[0].weight.data = each[0].weight.data.clone()
        for pair in ((model, zero), (alone, plain)):
            train(*pair)
        assert_same(model.parameters(), alone.parameters())
        model.double()
        alone.double()
        for each, optimizer in ((model, zero), (alone, plain)):
            each.zero_grad()
            for batch in batches(2):
                loss_of(each(batch.double())).backward()
                optimizer.step()
        assert_same(model.parameters(), alone.parameters())
        assert model[0].weight.dtype is torch.float64

    run_ranks(work, 2, False)
    run_ranks(work, 2, True)


def test_frozen_parameters_are_treated_as_by_the_plain_optimizer():
    def work(view):
        model, alone = mlp(), mlp()
        options = {"lr": 0.1, "momentum": 0.9}
        zero = Zero(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=view, **options)
        plain = torch.optim.SGD(alone.parameters(), **options)
        for each, optimizer in ((model, zero), (alone, plain)):
            train(each, optimizer, 2)
            each[0].weight.requires_grad_(False)  # and keeps its gradient for one more step
            optimizer.step()
            train(each, optimizer, 2)
            each[0].weight.requires_grad_()
            train(each, optimizer, 1)
        assert_same(model.parameters(), alone.parameters())

    run_ranks(work, 2, False)
    run_ranks(work, 2, True)


def groups_of(model):
    return [
        {"params": [m.weight for m in model if isinstance(m, nn.Linear)], "weight_decay": 0.1},
        {"params": [m.bias for m in model if isinstance(m, nn.Linear)], "lr": 0.2},
    ]


def _groups(view, later):
    model, alone = mlp(), mlp()
    first, *others = groups_of(model)
    zero = Zero(
        [first] if later else [first, *others],
        torch.optim.SGD,
        parameters_as_bucket_view=view,
        lr=0.1,
        momentum=0.9,
    )
    if later:
        zero.add_param_group(others[0])
    plain = torch.optim.SGD(groups_of(alone), lr=0.1, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (zero, plain)]
    for _ in range(3):
        train(model, zero, 1)
        train(alone, plain, 1)
        for schedule in schedules:
            schedule.step()
    assert_same(model.parameters(), alone.parameters())
    assert [g["lr"] for g in zero.param_groups] == [g["lr"] for g in plain.param_groups]
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same_state(zero.state_dict(), plain.state_dict())
    return [len(group["params"]) for group in zero.optim.param_groups]


@pytest.mark.parametrize("view", [False, True])
def test_groups_and_schedules(view):
    at_once = run_ranks(_groups, 2, view, False)
    assert at_once == run_ranks(_groups, 2, view, True)
    assert [sum(each) for each in zip(*at_once, strict=True)] == [3, 3]


def test_named_parameters():
    def work():
        model = mlp()
        zero = Zero(model.named_parameters(), torch.optim.SGD, lr=0.1)
        (local,) = zero.optim.param_groups
        names = dict(model.named_parameters())
        assert all(
            names[name] is param
            for name, param in zip(local["param_names"], local["params"], strict=True)
        )
        zero.consolidate_state_dict()
        train(model, zero, 1)
        if dist.get_rank() == 0:
            assert zero.state_dict()["param_groups"][0]["param_names"] == list(names)
            zero.load_state_dict(zero.state_dict())
        return local["param_names"]

    shares = run_ranks(work, 2)
    assert sorted(shares[0] + shares[1]) == sorted(name for name, _ in mlp().named_parameters())


def test_closures_and_other_arguments_reach_the_optimizer():
    class Noting(torch.optim.SGD):
        def step(self, closure=None, note=None):
            loss = super().step(closure)
            if note is not None:
                note.append(loss)
            self.param_groups[0]["seen"] = True
            return loss

    def work():
        model, alone, note = mlp(), mlp(), []
        zero = Zero(model.parameters(), Noting, lr=0.1)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        (batch,) = batches(1)

        def closure(each):
            each.zero_grad()
            loss = loss_of(each(batch))
            loss.backward()
            return loss

        loss = zero.step(lambda: closure(model), note=note)
        assert note == [loss]
        assert torch.equal(loss, plain.step(lambda: closure(alone)))
        assert zero.param_groups[0]["seen"]
        assert_same(model.parameters(), alone.parameters())

    run_ranks(work, 2)


def test_state_goes_from_the_plain_optimizer_and_back():
    def work():
        model, alone, other = mlp(), mlp(), mlp()
        zero = Zero(model.parameters(), torch.optim.Adam, lr=0.5)
        plain = torch.optim.Adam(alone.parameters(), lr=0.01)
        train(alone, plain)
        saved = copy.deepcopy(plain.state_dict())
        kept = copy.deepcopy(saved)
        model.load_state_dict(alone.state_dict())
        zero.load_state_dict(saved)
        assert_same_state(saved, kept)
        assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.01
        assert len(zero.state) == 0
        train(model, zero, seed=2)
        train(alone, plain, seed=2)
        assert_same(model.parameters(), alone.parameters())

        zero.consolidate_state_dict(to=1)
        if zero.rank == 1:
            loaded = torch.optim.Adam(other.parameters())
            other.load_state_dict(model.state_dict())
            loaded.load_state_dict(zero.state_dict())
            train(other, loaded, seed=3)
            train(alone, plain, seed=3)
            assert_same(other.parameters(), alone.parameters())
        else:
            with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
                zero.state_dict()
        return len(zero.local_state_dict()["state"])

    assert sum(run_ranks(work, 2)) == len(list(mlp().parameters()))


def test_a_consolidated_state_is_of_its_time():
    def work():
        model = mlp()
        zero = Zero(model.parameters(), torch.optim.Adam, lr=0.01)
        train(model, zero, 2)
        zero.consolidate_state_dict()
        if zero.rank == 0:
            before = copy.deepcopy(zero.state_dict())
            train_on = zero.state_dict()
        train(model, zero, 2)
        if zero.rank == 0:
            assert_same_state(train_on, before)

    run_ranks(work, 2)


def test_hooks_of_the_state_are_run():
    def work():
        model, seen = mlp(), []
        zero = Zero(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        train(model, zero, 1)
        zero.register_load_state_dict_pre_hook(lambda _, state: seen.append("load"))
        zero.register_step_post_hook(lambda *_: seen.append("step"))
        zero.consolidate_state_dict()
        if zero.rank == 0:
            zero.load_state_dict(zero.state_dict())
        train(model, zero, 1)
        return seen

    assert run_ranks(work, 2) == [["load", "step"], ["step"]]


def test_on_a_subgroup():
    def work():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return None
        model, alone = mlp(), mlp()
        zero = Zero(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        plain = torch.optim.Adam(alone.parameters(), lr=0.01)
        train(model, zero)
        train(alone, plain)
        assert_same(model.parameters(), alone.parameters())
        zero.consolidate_state_dict(to=0)
        return zero.rank, zero.global_rank, bool(zero._all_state_dicts)

    assert run_ranks(work, 3) == [(0, 0, True), None, (1, 2, False)]


def test_wrong_use_is_told():
    def work():
        model = mlp()
        parameters = list(model.parameters())
        for wrong, error in [
            ([], ValueError),
            (torch.ones(1), TypeError),
            (1.2, TypeError),
            ([*parameters, 42], TypeError),
            ([torch.ones(2, 3).to_sparse()], ValueError),
            ([parameters[0] * 2], ValueError),
        ]:
            with pytest.raises(error):
                Zero(wrong, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="LBFGS needs a closure"):
            Zero(parameters, torch.optim.LBFGS, overlap_with_ddp=True)
        zero = Zero(parameters, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="to=2, but the group has ranks 0 to 1"):
            zero.consolidate_state_dict(to=2)
        with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={dist.get_rank()}\)"):
            zero.state_dict()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            zero.load_state_dict({"state": {}, "param_groups": []})

    run_ranks(work, 2)


@pytest.mark.parametrize("same_number", [True, False])
def test_different_parameters_are_told_on_all_ranks(same_number):
    def work():
        model = mlp()
        if dist.get_rank() == 1:
            model = nn.Sequential(*model[:-1], nn.Linear(40, 4)) if same_number else model[:-1]
        zero = Zero(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="the ranks have different parameters") as caught:
            zero.step()
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second
    found = "parameter 4 is float32[3, 40] on rank 0 and float32[4, 40] on rank 1"
    assert (found if same_number else "rank 0 has 6, rank 1 has 4") in first


sizes = st.lists(st.integers(0, 50), max_size=30)
loads = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@given(sizes, loads)
def test_assignment_gives_everything_once(sizes, loads):
    after = list(loads)
    given_items = shards.assign(sizes, after)
    assert sorted(item for items in given_items for item in items) == list(range(len(sizes)))
    assert after == [
        load + sum(sizes[item] for item in items)
        for load, items in zip(loads, given_items, strict=True)
    ]
    # Nobody who got something has more than another had when it was given, and that.
    largest = max(sizes, default=0)
    assert max(after) <= max(max(loads), min(after) + largest)


def test_assignment_is_by_size():
    assert shards.assign([3, 9, 7, 5, 9, 7, 5, 3], [0, 0]) == [[1, 2, 3, 0], [4, 5, 6, 7]]


@given(sizes, loads)
def test_cuts_are_runs_of_even_size(sizes, loads):
    after = list(loads)
    runs = shards.cut(sizes, after)
    assert sorted(item for run in runs for item in run) == list(range(len(sizes)))
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs if run)
    assert sum(after) == sum(loads) + sum(sizes)
    even = sum(sizes) / len(loads)
    assert all(sum(sizes[i] for i in run) <= even + max(sizes, default=0) for run in runs)


def _uneven(view):
    ddp, alone = DDP(mlp(), bucket_cap_mb=0.001), DDP(mlp(), bucket_cap_mb=0.001)
    zero = Zero(ddp.parameters(), torch.optim.Adam, parameters_as_bucket_view=view, lr=0.01)
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    inputs = [own(batch) for batch in batches(2 * dist.get_rank())]
    for model, optimizer in ((ddp, zero), (alone, plain)):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        with Join([model, zero] if model is ddp else [model]):
            for x in inputs:
                optimizer.zero_grad()
                loss_of(model(x)).backward()
                optimizer.step()
                schedule.step()
    assert_same(ddp.parameters(), alone.parameters())
    last = dist.get_world_size() - 1
    zero.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        assert_same_state(zero.state_dict(), plain.state_dict())


@pytest.mark.parametrize("view", [False, True])
def test_uneven_inputs(view):
    """Ranks that have joined update their share, with the learning rate of the others.

    Rank 0 has no input at all.
    """
    run_ranks(_uneven, 3, view)


def test_uneven_inputs_of_processes():
    run_ranks(_uneven, 2, True, ranks="processes")


def test_joining_in_the_wrong_order_is_told():
    def work():
        ddp = DDP(mlp())
        zero = Zero(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with Join([zero, ddp]):
            for batch in batches(2 * dist.get_rank()):
                loss_of(ddp(own(batch))).backward()
                zero.step()

    for error in run_ranks(work, 2, return_exceptions=True):
        assert isinstance(error, dist.CollectiveMismatch)
        assert "the one that communicates first in an iteration must be the first" in str(error)


def _refused_group():
    torch.manual_seed(1)
    first, second = (nn.Parameter(torch.randn(3, i + 2)) for i in range(2))
    zero = Zero([first], torch.optim.SGD, lr=0.5)
    wrong = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="dense parameters: parameter 1"):
        zero.add_param_group({"params": [wrong]})
    assert len(zero.param_groups) == 1
    zero.add_param_group({"params": [second], "lr": 0.25})
    before = [first.detach().clone(), second.detach().clone()]
    for param in (first, second):
        param.grad = torch.ones_like(param)
    zero.step()
    torch.testing.assert_close(first.detach(), before[0] - 0.5)
    torch.testing.assert_close(second.detach(), before[1] - 0.25)


def test_a_group_that_was_refused_is_not_there():
    run_ranks(_refused_group, 3)


def _different_groups():
    first = nn.Parameter(torch.ones(4))
    zero = Zero([first], torch.optim.SGD, lr=0.5)
    first.grad = torch.ones(4)
    zero.step()
    later = nn.Parameter(torch.ones(2 + (dist.get_rank() == 2)))
    zero.add_param_group({"params": [later]})
    with pytest.raises(ValueError, match=r"float32\[2\] on rank 0 and float32\[3\] on rank 2"):
        zero.step()


def test_groups_that_are_added_are_compared_too():
    run_ranks(_different_groups, 3)


def _consolidates_in_a_group():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    params = [nn.Parameter(torch.ones(2 + i)) for i in range(3)]
    zero = Zero(params, torch.optim.SGD, process_group=group, lr=0.5, momentum=0.5)
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, i + 1.0)
    zero.step()
    zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="not been consolidated on this rank"):
            zero.state_dict()
        return None
    state = zero.state_dict()["state"]
    return [state[i]["momentum_buffer"].tolist() for i in range(3)]


def test_states_come_to_a_rank_of_the_group():
    expected = [[1.0] * 2, [2.0] * 3, [3.0] * 4]
    assert run_ranks(_consolidates_in_a_group, 3) == [None, None, expected]
