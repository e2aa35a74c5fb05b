"""Uneven inputs: ranks that leave their loop early shadow those that go on."""

import pytest
import torch
from models import batches, loss_of, mlp, own

import phalanx as dist
from phalanx import DistributedDataParallel
from phalanx.algorithms import join
from phalanx.algorithms.join import Join, Joinable, JoinHook
from phalanx.errors import CollectiveMismatch, Deadlock
from phalanx.testing import run_ranks


class SumHook(JoinHook):
    def __init__(self, total, options):
        self.total = total
        total.options = options

    def main_hook(self):
        self.total.add(0.0)

    def post_hook(self, is_last_joiner):
        self.total.is_last_joiner = is_last_joiner


class Sum(Joinable):
    """Adds up the numbers of all ranks, one per iteration."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.value = 0.0
        self.num_active = []

    def __call__(self, number):
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
            self.num_active.append(int(work.result()[0].item()))
        self.add(number)

    def add(self, number):
        number = torch.tensor([number])
        dist.all_reduce(number, group=self.group)
        self.value += number.item()

    def join_hook(self, **kwargs):
        return SumHook(self, kwargs)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def uneven(lengths, num_sums=1, **options):
    sums = [Sum() for _ in range(num_sums)]
    with Join(sums, **options):
        for i in range(lengths[dist.get_rank()]):
            for each in sums:
                each(float(i))
    return [(each.value, each.num_active, each.is_last_joiner, each.options) for each in sums]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_ranks_leave_together(ranks):
    lengths = [3, 0, 4, 3]
    results = run_ranks(uneven, 4, lengths, ranks=ranks)
    total = float(sum(sum(range(length)) for length in lengths))
    assert [value for [(value, *_)] in results] == [total] * 4
    assert [counts for [(_, counts, *_)] in results] == [[3, 3, 3], [], [3, 3, 3, 1], [3, 3, 3]]
    assert [last for [(_, _, last, _)] in results] == [False, False, True, False]


@pytest.mark.parametrize("lengths", [[2], [2, 2], [0, 0, 0]])
def test_even_inputs_make_everybody_last(lengths):
    results = run_ranks(uneven, len(lengths), lengths)
    assert all(last for [(_, _, last, _)] in results)
    assert all(counts == [len(lengths)] * lengths[0] for [(_, counts, *_)] in results)


def test_the_first_joinable_counts_and_all_get_the_options():
    for first, *others in run_ranks(uneven, 2, [1, 3], num_sums=3, scale=2):
        assert first[1]
        assert all(counts == [] for _, counts, *_ in others)
        assert all(options == {"scale": 2} for *_, options in [first, *others])
        assert {value for value, *_ in [first, *others]} == {3.0}


def stop_with_the_first(lengths, group=None):
    total, length = Sum(group), lengths[dist.get_rank()]
    done = 0
    try:
        with Join([total], throw_on_early_termination=True):
            for i in range(length):
                total(float(i))
                done += 1
    except RuntimeError as error:
        return str(error), done, total._join_config.enable
    return "", done, total._join_config.enable


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_early_termination_stops_all(ranks):
    results = run_ranks(stop_with_the_first, 3, [4, 2, 2], ranks=ranks)
    assert [done for _, done, _ in results] == [2, 2, 2]
    assert "Detected at least one rank that exhausted inputs" in results[0][0]
    assert "1 of 3" in results[0][0]
    assert results[1][0].startswith("Rank 1 exhausted all inputs")
    assert results[2][0].startswith("Rank 2 exhausted all inputs")
    assert not any(enabled for *_, enabled in results)


def test_early_termination_of_even_inputs_is_no_error():
    assert run_ranks(stop_with_the_first, 2, [3, 3]) == [("", 3, False)] * 2


def test_disabled_context_does_nothing():
    def work():
        total = Sum()
        before = dist.group.WORLD.sequence_number()
        with Join([total], enable=False):
            total(1.0)
            within = total._join_config
        return dist.group.WORLD.sequence_number() - before, within.enable, total.num_active

    assert run_ranks(work, 2) == [(1, False, [])] * 2


def test_iterations_behind_the_context_do_not_count():
    def work():
        total = Sum()
        with Join([total]):
            total(1.0)
        total(1.0)
        return total.num_active, total.value

    assert run_ranks(work, 2) == [([2], 4.0)] * 2


def test_exceptions_of_the_block_come_out():
    def work():
        total = Sum()
        with pytest.raises(KeyError, match="lost"), Join([total]):
            raise KeyError("lost")
        return total._join_config.enable, hasattr(total, "is_last_joiner")

    assert run_ranks(work, 2) == [(False, False)] * 2


def test_on_a_subgroup():
    def work():
        group = dist.new_group([2, 1])
        if dist.get_rank() == 0:
            return None
        total = Sum(group)
        with Join([total]):
            for _ in range(dist.get_rank()):
                total(1.0)
        return total.value, stop_with_the_first([0, 1, 2], group)

    _, (first, (message, done, _)), (second, _) = run_ranks(work, 3)
    assert first == second == 3.0
    assert done == 1
    assert message.startswith("Rank 1 exhausted")  # of the world, not of the group


def test_wrong_use_is_told():
    class Forgetful(Sum):
        def __init__(self):
            self.group = None

    def work():
        with pytest.raises(ValueError, match="at least one joinable"):
            Join([])
        with pytest.raises(AssertionError, match=r"Forgetful .* Joinable.__init__"):
            Join([Forgetful()])
        with pytest.raises(AssertionError, match="Forgetful"):
            Join.notify_join_context(Forgetful())
        group = dist.new_group([0, 1])
        with pytest.raises(ValueError, match=r"multiple process groups.*'world'.*joinable 1"):
            Join([Sum(), Sum(group)])
        with Join([Sum(), Sum(dist.group.WORLD)]):
            pass
        with pytest.raises(TypeError, match="abstract"):
            Joinable()

    run_ranks(work, 2)


def test_great_skew_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(join, "_SKEW", 3)
    with pytest.warns(UserWarning, match="greater than 3: rank 0") as seen:
        run_ranks(uneven, 2, [0, 6])
    assert len(seen) == 1


class Statistics(torch.autograd.Function):
    """A collective in the forward pass, as SyncBatchNorm has."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def before(total, group):
    dist.all_reduce(torch.tensor([1]))  # as one counts samples
    total(1.0)


def within(total, group):
    if total._join_config.enable:
        Join.notify_join_context(total)
    Statistics.apply(torch.ones(1))  # just as long as what the joinable reduces
    total.add(1.0)


def behind(total, group):
    total(1.0)
    dist.all_reduce(torch.tensor([1]))


def of_another_kind(total, group):
    total(1.0)
    dist.barrier()


def on_another_group(total, group):
    total(1.0)
    dist.all_reduce(torch.ones(1), group=group)


def blind_spot(step):
    group = dist.new_group([0, 1])
    total = Sum()
    with Join([total]):
        for _ in range(2 + dist.get_rank()):
            step(total, group)


@pytest.mark.parametrize("step", [before, within, behind, of_another_kind, on_another_group])
def test_collectives_besides_the_joinables_are_reported(step):
    """Both ranks learn of it in the iteration in which it happens; nothing is silently wrong."""
    errors = run_ranks(blind_spot, 2, step, return_exceptions=True)
    kind = Deadlock if step is on_another_group else CollectiveMismatch
    for error in errors:
        assert isinstance(error, kind)
        text = str(error)
        assert "for join" in text
        assert "in blind_spot" in text
        assert f"in {'add' if step is within else step.__name__}" in text
        assert text.count("shadows, under Join, the calls of the joinables and no others") == 1


def test_other_mismatches_get_no_advice():
    def work():
        total = Sum()
        with Join([total]):
            total(1.0)
            dist.all_reduce(torch.ones(1 + dist.get_rank()))

    for error in run_ranks(work, 2, return_exceptions=True):
        assert isinstance(error, CollectiveMismatch)
        assert "Join" not in str(error)


class Watcher(Sum):
    """Notes the gradients that it sees while it shadows."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.seen = []

    def add(self, number):
        self.seen.append([p.grad.clone() for p in self.model.parameters()])


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("by_initial", [False, True])
def test_joined_ranks_have_the_gradients_of_the_others_for_a_while(view, keep, by_initial):
    def work():
        ddp = DistributedDataParallel(mlp(), gradient_as_bucket_view=view)
        watcher = Watcher(ddp)
        with Join([ddp, watcher], divide_by_initial_world_size=by_initial):
            for batch in batches(1 + 2 * dist.get_rank()):
                ddp.zero_grad()
                loss_of(ddp(own(batch))).backward()
                watcher.add(0.0)
            if not keep:
                ddp.zero_grad()
            before = [p.grad if p.grad is None else p.grad.clone() for p in ddp.parameters()]
        after = [p.grad for p in ddp.parameters()]
        assert [g is None for g in before] == [g is None for g in after] == [not keep] * 6
        if keep:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return watcher.seen, [p.detach() for p in ddp.parameters()]

    (first, ours), (second, theirs) = run_ranks(work, 2)
    assert len(first) == len(second) == 3
    for a, b in zip([*first, ours], [*second, theirs], strict=True):
        assert all(map(torch.equal, a, b))
