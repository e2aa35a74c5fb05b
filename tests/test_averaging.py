"""Averaging models: what is averaged, when, and over whom."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import phalanx as dist
from phalanx import _native
from phalanx.algorithms.model_averaging import utils
from phalanx.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from phalanx.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from phalanx.optim import PostLocalSGDOptimizer
from phalanx.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
SHAPES = [(3, 5), (7,), (), (2, 3, 2, 2), (0,)]


def parameters(rank: int) -> list[nn.Parameter]:
    """Return parameters of several dtypes and layouts, with gradients, another for each rank."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        value = torch.randn(shape, generator=generator).to(dtype)
        if len(shape) == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        found.append(nn.Parameter(value))
    found.append(nn.Parameter(torch.randn(4, 6, generator=generator).t()))
    for parameter in found:
        parameter.grad = torch.full_like(parameter, rank)
    return found


def assert_average(values, ranks):
    """Make sure that values are the averages of ``parameters`` of some ranks."""
    for value, *each in zip(values, *map(parameters, ranks), strict=True):
        true = torch.stack([p.detach().double() for p in each]).mean(0)
        tolerance = 2 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(value.detach().double(), true, rtol=tolerance, atol=tolerance)


def _average(form, ranks):
    rank = dist.get_rank()
    own = parameters(rank)
    places = [parameter.data_ptr() for parameter in own]
    strides = [parameter.stride() for parameter in own]
    group = None if ranks is None else dist.new_group(ranks)
    form(own, group)
    assert [parameter.data_ptr() for parameter in own] == places
    assert [parameter.stride() for parameter in own] == strides
    for parameter in own:
        assert (parameter.grad == rank).all()
        assert parameter.requires_grad
        assert parameter.is_leaf
    return own, [entry["op"] for entry in dist.group.WORLD.backend.history()]


def _as_iterator(own, group):
    utils.average_parameters(iter(own), group)


def _as_list(own, group):
    utils.average_parameters(own, process_group=group)


def _either_list(own, group):
    utils.average_parameters_or_parameter_groups(own, group)


def _either_groups(own, group):
    optimizer = torch.optim.SGD([{"params": own[:2]}, {"params": own[2:], "lr": 0.2}], lr=0.1)
    utils.average_parameters_or_parameter_groups(optimizer.param_groups, group)


FORMS = [_as_iterator, _as_list, _either_list, _either_groups]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_average(form, size):
    for values, _ in run_ranks(_average, size, form, None):
        assert_average(values, range(size))


@pytest.mark.parametrize("form", FORMS)
def test_ranks_outside_keep_their_own(form):
    results = run_ranks(_average, 3, form, [0, 2])
    for rank, (values, _) in enumerate(results):
        assert_average(values, [1] if rank == 1 else [0, 2])


def test_one_exchange_per_dtype():
    for _, exchanges in run_ranks(_average, 2, _as_list, None):
        assert exchanges == ["all_reduce"] * len(set(DTYPES))


def _bits(steps):
    own = parameters(dist.get_rank())
    for _ in range(steps):
        utils.average_parameters(own, None)
    return [parameter.detach() for parameter in own]


def test_the_same_bits_everywhere():
    first, *others = run_ranks(_bits, 3, 1) + run_ranks(_bits, 3, 1, ranks="processes")
    for values in others:
        for value, other in zip(values, first, strict=True):
            assert torch.equal(value, other)


def test_memory_is_given_back():
    def work():
        model = nn.Linear(1000, 1000)
        dist.barrier()
        before = _native.heap_used()
        utils.average_parameters(model.parameters(), None)
        return before, _native.heap_used()

    ((before, after),) = run_ranks(work, 1)
    assert after == before


def test_only_what_has_gradients():
    own = parameters(0)
    own[1].grad = None
    chosen = utils.get_params_to_average(iter(own))
    assert [id(p) for p in chosen] == [id(p) for p in [own[0], *own[2:]]]
    groups = torch.optim.SGD([{"params": own[:3]}, {"params": own[3:]}], lr=1).param_groups
    assert [id(p) for p in utils.get_params_to_average(groups)] == [id(p) for p in chosen]
    with pytest.raises(TypeError, match="str"):
        utils.get_params_to_average(["weight"])


def _unused(unused):
    rank = dist.get_rank()
    own = [nn.Parameter(torch.full((2,), float(10 * index + rank))) for index in range(3)]
    for index, parameter in enumerate(own):
        if index not in unused[rank]:
            parameter.grad = torch.zeros(2)
    utils.average_parameters_or_parameter_groups(own, None)
    return [parameter[0].item() for parameter in own]


def test_what_one_rank_did_not_use_is_averaged_all_the_same():
    """Ranks that used different parameters must not mix them up."""
    assert run_ranks(_unused, 2, [{0}, {1}]) == [[0.5, 10.5, 20.5]] * 2
    assert run_ranks(_unused, 2, [{1}, {1}]) == [[0.5, 10.0, 20.5], [0.5, 11.0, 20.5]]
    assert run_ranks(_unused, 2, [{0, 1, 2}] * 2) == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


def test_nothing_to_average():
    def work():
        utils.average_parameters([], None)
        utils.average_parameters_or_parameter_groups(iter([]), None)
        return dist.group.WORLD.sequence_number()

    assert run_ranks(work, 2) == [0, 0]


def test_models_that_differ_are_told():
    def work():
        model = nn.Linear(3, 2 + dist.get_rank())
        with pytest.raises(dist.CollectiveMismatch, match=r"8.*\n*.*12"):
            utils.average_parameters(model.parameters(), None)

    run_ranks(work, 2)


def test_integers_have_no_average():
    def work():
        mixed = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
        with pytest.raises((TypeError, ValueError), match="int64"):
            utils.average_parameters(mixed, None)
        return dist.group.WORLD.sequence_number()

    assert run_ranks(work, 2) == [0, 0]


def _steps(make, steps, as_groups=False):
    """Return what a parameter, set to the rank before each step, is after each."""
    averager = make()
    parameter = nn.Parameter(torch.empty(1))
    parameter.grad = torch.zeros(1)
    params = torch.optim.SGD([parameter], lr=1).param_groups if as_groups else [parameter]
    seen = []
    for step in range(steps):
        assert averager.step == step
        parameter.data.fill_(dist.get_rank())
        averager.average_parameters(iter(params))
        seen.append(parameter.item())
    return seen


@pytest.mark.parametrize("as_groups", [False, True])
@pytest.mark.parametrize("warmup", [0, 3, 4])
@pytest.mark.parametrize("period", [2, 3])
def test_periods(period, warmup, as_groups):
    def work():
        return _steps(lambda: PeriodicModelAverager(period, warmup), 10, as_groups)

    for rank, seen in enumerate(run_ranks(work, 3)):
        for step, value in enumerate(seen):
            is_due = step >= warmup and (step - warmup) % period == 0
            assert value == (1 if is_due else rank)


def test_a_period_for_a_subgroup():
    def work():
        group = dist.new_group([0, 2])
        averager = PeriodicModelAverager(2, process_group=group)
        assert averager.process_group is group
        return _steps(lambda: averager, 2)

    assert run_ranks(work, 3) == [[1, 0], [1, 1], [1, 2]]


def test_the_default_group_is_found():
    def work():
        assert PeriodicModelAverager(period=2).process_group is dist.group.WORLD
        single = HierarchicalModelAverager({2: 1})
        assert single.process_group is dist.group.WORLD
        assert single.period_process_group_dict == {2: dist.group.WORLD}

    run_ranks(work, 1)
    with pytest.raises(TypeError, match="abstract"):
        ModelAverager()


@pytest.mark.parametrize(
    ("arguments", "fact"), [((0,), "period.*0"), ((-1,), "period.*-1"), ((2, -3), "warmup.*-3")]
)
def test_periods_that_cannot_be(arguments, fact):
    def work():
        with pytest.raises(ValueError, match=fact):
            PeriodicModelAverager(*arguments)

    run_ranks(work, 1)


def test_averaging_at_every_step_is_warned_of():
    def work():
        for make in (lambda: PeriodicModelAverager(1), lambda: HierarchicalModelAverager({1: 1})):
            with pytest.warns(UserWarning, match="DistributedDataParallel alone") as caught:
                make()
            assert caught[0].filename == __file__

    run_ranks(work, 1)  # warnings are caught for all threads at once


def test_hierarchy():
    warmup, sizes = 5, OrderedDict([(2, 2), (4, 4), (8, 8)])

    def work():
        averager = HierarchicalModelAverager(sizes, warmup)
        ranks = {
            period: dist.get_process_group_ranks(group)
            for period, group in averager.period_process_group_dict.items()
        }
        return ranks, dist.get_pg_count(), _steps(lambda: averager, 18)

    for rank, (ranks, num_groups, seen) in enumerate(run_ranks(work, 8)):
        parts = {s: list(range(rank // s * s, rank // s * s + s)) for s in (2, 4, 8)}
        assert ranks == parts  # the sizes happen to be equal to the periods
        assert num_groups == 1 + 4 + 2
        for step, value in enumerate(seen):
            due = [period for period in sizes if step % period == 0 and step >= warmup]
            expected = sum(parts[due[-1]]) / due[-1] if due else rank
            assert value == expected


def test_a_hierarchy_in_a_subgroup():
    """The ranks outside know nothing of it, and later groups are in order."""

    def work():
        group = dist.new_group([4, 1, 2, 3])
        seen = ranks = None
        if dist.get_rank():
            averager = HierarchicalModelAverager({2: 2, 4: 4}, process_group=group)
            ranks = dist.get_process_group_ranks(averager.period_process_group_dict[2])
            seen = _steps(lambda: averager, 5)
        else:
            with pytest.raises(ValueError, match="process group"):
                HierarchicalModelAverager({4: 4}, process_group=group)
        after = dist.new_group([0, 4])
        value = torch.ones(1)
        if not dist._rank_not_in_group(after):
            dist.all_reduce(value, group=after)
        return ranks, seen, value.item()

    results = run_ranks(work, 5)
    assert results[0] == (None, None, 2)
    for rank, (ranks, seen, _) in enumerate(results[1:], 1):
        assert ranks == ([1, 2] if rank < 3 else [3, 4])
        assert seen == [2.5, rank, sum(ranks) / 2, rank, 2.5]


@pytest.mark.parametrize(
    ("sizes", "warmup", "fact"),
    [
        (None, 0, "must not be empty"),
        ({}, 0, "must not be empty"),
        ({0: 2, 2: 4}, 0, "positive"),
        ({-2: 4}, 0, "positive"),
        ({4: 2, 2: 4}, 0, r"ascending.*\[4, 2\]"),
        ({2: 2, 4: 2}, 0, "last group size.*4, got 2"),
        ({2: 3, 4: 4}, 0, r"groups of 3 \(period 2\).*4 ranks"),
        ({2: 0, 4: 4}, 0, "groups of 0"),
        ({2: 8}, 0, "groups of 8"),
        ({2: 4}, -1, "warmup_steps.*-1"),
    ],
)
def test_hierarchies_that_cannot_be(sizes, warmup, fact):
    def work():
        with pytest.raises(ValueError, match=fact):
            HierarchicalModelAverager(sizes, warmup)
        return dist.get_pg_count()

    assert run_ranks(work, 4) == [1] * 4


def _train(model, optimizer, steps, averager=None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


def _model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def test_the_optimizer_averages_as_its_averager_does():
    def work():
        for make in (
            lambda: PeriodicModelAverager(4, 3),
            lambda: HierarchicalModelAverager({2: 2, 4: 4}, 1),
        ):
            plain, averaged = _model(), _model()
            by_hand = make()
            sgd = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
            expected = _train(plain, sgd, 11, by_hand)
            inner = torch.optim.SGD(averaged.parameters(), lr=0.01, momentum=0.9)
            optimizer = PostLocalSGDOptimizer(inner, make())
            found = _train(averaged, optimizer, 11)
            assert by_hand.step == optimizer.averager.step == 11
            assert all(map(torch.equal, found, expected))
            assert optimizer.state is inner.state
            assert repr(optimizer) == repr(inner)
            assert isinstance(optimizer, torch.optim.Optimizer)

    run_ranks(work, 4)


def test_the_optimizer_can_be_saved(tmp_path):
    def work():
        rank = dist.get_rank()
        model, other = _model(), _model()

        def optimizer_of(model):
            inner = torch.optim.Adam(model.parameters(), lr=0.01)
            return PostLocalSGDOptimizer(inner, PeriodicModelAverager(3, 2))

        first, second = optimizer_of(model), optimizer_of(other)
        _train(model, first, 6)
        torch.save([model.state_dict(), first.state_dict()], tmp_path / str(rank))
        weights, state = torch.load(tmp_path / str(rank))
        assert state["step"] == 6
        other.load_state_dict(weights)
        second.load_state_dict(state)
        assert state["step"] == 6  # what was given is left as it was
        assert second.averager.step == 6
        assert all(map(torch.equal, _train(model, first, 4), _train(other, second, 4)))

    run_ranks(work, 2)


def test_a_state_without_a_step_is_warned_of():
    def work():
        inner = torch.optim.SGD(_model().parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(3))
        optimizer.averager.step = 5
        with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
            optimizer.load_state_dict(inner.state_dict())
        return optimizer.averager.step

    assert run_ranks(work, 1) == [0]


def test_schedulers_closures_and_hooks():
    def work():
        model = _model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2))
        optimizer.load_state_dict(optimizer.state_dict())  # gives `inner` new parameter groups
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append("hook"))
        loss = optimizer.step(lambda: called.append("closure") or torch.tensor(3.0))
        scheduler.step()
        assert called == ["closure", "hook"]
        assert loss == 3
        assert inner.param_groups[0]["lr"] == 0.5
        assert optimizer.averager.step == 1

        extra = nn.Parameter(torch.ones(2))
        extra.grad = torch.ones(2)
        optimizer.add_param_group({"params": [extra]})
        assert len(optimizer.param_groups) == len(inner.param_groups) == 2
        assert optimizer.defaults is inner.defaults
        optimizer.zero_grad(set_to_none=False)
        assert not extra.grad.any()
        optimizer.zero_grad()
        assert extra.grad is None
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = optimizer.no_such_thing

    run_ranks(work, 1)
