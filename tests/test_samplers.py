"""Samplers: what each rank gets, epoch after epoch, also when a run stops and goes on."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler as Theirs

import phalanx as dist
from phalanx.data import (
    DistributedSampler,
    EpochSampler,
    LengthGroupedSampler,
    WeightedDistributedSampler,
)
from phalanx.testing import run_ranks

lengths = st.integers(0, 60)
sizes = st.integers(1, 7)
quick = settings(max_examples=60, deadline=None)


def uneven(length):
    """Return lengths of samples, of which none is like another far from it."""
    return [(37 * i) % 101 for i in range(length)]


def make(kind, length, size, rank, drop_last=False, seed=0, batch_size=2):
    place = {"num_replicas": size, "rank": rank, "seed": seed, "drop_last": drop_last}
    if kind == "weighted":
        return WeightedDistributedSampler([1.0] * length, length, replacement=False, **place)
    if kind == "grouped":
        return LengthGroupedSampler(
            range(length), batch_size, lengths=uneven(length), megabatch=3, **place
        )
    return DistributedSampler(range(length), shuffle=kind == "shuffled", **place)


KINDS = ["shuffled", "in order", "weighted", "grouped"]


def everybody(kind, length, size, **arguments):
    return [make(kind, length, size, rank, **arguments) for rank in range(size)]


def possible(kind, length, size, drop_last):
    return not (drop_last and 0 < length < size) and not (kind == "weighted" and length == 0)


@quick
@given(lengths, sizes, st.booleans(), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_indices_are_those_of_torch(length, size, shuffle, epoch, seed, drop_last):
    if not possible("shuffled", length, size, drop_last):
        return
    for rank in range(size):
        arguments = (range(length), size, rank, shuffle, seed, drop_last)
        ours, theirs = DistributedSampler(*arguments), Theirs(*arguments)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(lengths, sizes, st.booleans(), st.integers(0, 2))
def test_every_sample_once_up_to_padding(kind, length, size, drop_last, epoch):
    if not possible(kind, length, size, drop_last):
        return
    samplers = everybody(kind, length, size, drop_last=drop_last)
    parts = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler) == sampler.num_samples
    seen = Counter(itertools.chain(*parts))
    assert len({len(part) for part in parts}) == 1
    if drop_last:
        assert set(seen.values()) <= {1}
        assert len(seen) == length - length % size
    else:
        assert set(seen) == set(range(length))
        assert sum(seen.values()) == math.ceil(length / size) * size


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_a_function_of_seed_and_epoch(kind):
    def epoch(number, seed=0):
        sampler = make(kind, 50, 2, 0, seed=seed)
        sampler.set_epoch(number)
        return list(sampler)

    assert epoch(3) == epoch(3)
    assert (epoch(3) != epoch(4)) == (kind != "in order")
    assert (epoch(3, seed=9) != epoch(3)) == (kind != "in order")


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_generator_is_left_alone(kind):
    before = torch.get_rng_state()
    list(make(kind, 50, 2, 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(
    st.integers(1, 60),
    st.lists(st.tuples(sizes, st.integers(0, 12)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2),
)
def test_stopping_and_going_on_loses_and_repeats_nothing(kind, length, runs, drop_last, epoch):
    """Each run has its own number of ranks, and stops after some samples on each."""
    if any(not possible(kind, length, size, drop_last) for size, _ in runs):
        return
    used, state = [], None
    for size, taken in [*runs, (1, length)]:
        samplers = everybody(kind, length, size, drop_last=drop_last)
        states = []
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)
            expected = min(taken, len(sampler))
            got = list(itertools.islice(sampler, taken))
            assert len(got) == expected
            used.append(got)
            states.append(sampler.state_dict())
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))
    seen = Counter(itertools.chain(*used))
    # Only who has come to the end of an epoch has repeated its beginning, to be even.
    assert set(seen) == set(range(length))
    padding = sum(seen.values()) - length
    assert padding < max(size for size, _ in runs)
    assert not (drop_last and padding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_going_on_with_as_many_ranks_is_as_if_nothing_happened(kind, drop_last):
    for rank in range(3):
        whole = make(kind, 50, 3, rank, drop_last)
        whole.set_epoch(1)
        expected = list(whole)
        for taken in (0, 1, 7, len(expected)):
            first = make(kind, 50, 3, rank, drop_last)
            first.set_epoch(1)
            begun = list(itertools.islice(first, taken))
            second = make(kind, 50, 3, rank, drop_last)
            second.load_state_dict(first.state_dict())
            assert len(second) == len(expected) - taken
            assert begun + list(second) == expected
            assert list(second) == expected  # the next pass is a whole one again
            second.set_epoch(2)
            assert len(second) == len(expected)


def test_loader_workers_run_ahead_and_consumed_says_what_was_used():
    sampler = DistributedSampler(range(40), 2, 0)
    expected = list(sampler)
    loader = DataLoader(range(40), batch_size=2, sampler=sampler, num_workers=1)
    used = []
    for step, batch in enumerate(loader):
        used += batch.tolist()
        if step == 2:
            state = sampler.state_dict(consumed=(step + 1) * 2)
            ahead = sampler.state_dict()
            break
    assert state["position"] == 12
    assert ahead["position"] > 12
    sampler = DistributedSampler(range(40), 2, 0)
    sampler.load_state_dict(state)
    loader = DataLoader(range(40), batch_size=2, sampler=sampler)
    assert len(loader) == 7
    for step, batch in enumerate(loader):
        used += batch.tolist()
        assert sampler.state_dict() == sampler.state_dict(consumed=(step + 1) * 2)
    assert used == expected


def test_a_short_last_batch_may_be_counted_full():
    sampler = DistributedSampler(range(5), 2, 0)
    list(sampler)
    assert sampler.state_dict(consumed=4)["position"] == 5


def test_batch_samplers_wrap_them():
    sampler = DistributedSampler(range(10), 2, 1, shuffle=False)
    assert list(BatchSampler(sampler, 2, drop_last=False)) == [[1, 3], [5, 7], [9]]
    loader = DataLoader(range(10), batch_sampler=BatchSampler(sampler, 2, drop_last=True))
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7]]


def test_a_state_of_another_order_is_refused():
    state = make("shuffled", 50, 2, 0).state_dict()
    for other, fact in [
        (make("shuffled", 51, 2, 0), "length is 50 in the state, 51 here"),
        (make("in order", 50, 2, 0), "shuffle is True in the state, False here"),
        (make("grouped", 50, 2, 0), "'DistributedSampler' in the state"),
    ]:
        with pytest.raises(ValueError, match=fact):
            other.load_state_dict(state)
    weighted = WeightedDistributedSampler([1.0, 2.0], 2, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="weights is"):
        WeightedDistributedSampler([2.0, 1.0], 2, num_replicas=1, rank=0).load_state_dict(
            weighted.state_dict()
        )
    with pytest.raises(ValueError, match="negative: -1"):
        weighted.state_dict(consumed=-1)


def test_states_restore_seed_and_epoch():
    sampler = make("shuffled", 50, 2, 0, seed=5)
    sampler.set_epoch(3)
    other = make("shuffled", 50, 2, 0)
    other.load_state_dict(sampler.state_dict())
    assert (other.seed, other.epoch) == (5, 3)
    assert list(other) == list(sampler)


def test_own_samplers_need_an_order_only():
    class Evens(EpochSampler):
        def order(self):
            return torch.arange(0, 20, 2)

    sampler = Evens(10, num_replicas=3, rank=1, seed=0, drop_last=False)
    assert list(sampler) == [2, 8, 14, 0]


def test_bad_places_are_refused():
    for size, rank in ((2, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"Invalid rank {rank}.*0 to 1"):
            DistributedSampler(range(4), size, rank)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        DistributedSampler(range(4), 0, 0)
    with pytest.raises(ValueError, match="num_replicas and rank"):
        DistributedSampler(range(4), 2)
    assert list(DistributedSampler([], 4, 0, drop_last=True)) == []


def test_fewer_samples_than_ranks_can_all_be_dropped():
    with pytest.warns(UserWarning, match="3 samples are fewer than the 4 ranks"):
        sampler = DistributedSampler(range(3), 4, 0, drop_last=True)
    theirs = Theirs(range(3), 4, 0, drop_last=True)
    assert list(sampler) == list(theirs) == []
    assert len(sampler) == len(theirs) == 0


@pytest.mark.parametrize("cls", [DistributedSampler, LengthGroupedSampler])
def test_a_dataset_that_changed_is_noticed(cls):
    data = ["a"] * 4
    arguments = {"batch_size": 2} if cls is LengthGroupedSampler else {}
    sampler = cls(data, num_replicas=2, rank=0, **arguments)
    data.append("b")
    with pytest.raises(RuntimeError, match=r"were 4 samples .* are 5 now"):
        iter(sampler)


@pytest.mark.parametrize(
    ("weights", "num_samples", "replacement", "fact"),
    [
        ([1.0, -2.0], 2, True, r"weights\[1\] is -2.0"),
        ([math.nan, 1.0], 2, True, r"weights\[0\] is nan"),
        ([1.0, math.inf], 2, True, r"weights\[1\] is inf"),
        ([1.0, 0.0, 2.0], 3, False, "2 of 3 weights are positive.*without"),
        ([0.0, 0.0], 1, True, "0 of 2 weights are positive"),
        ([], 1, True, "0 of 0 weights are positive"),
        ([[1.0]], 1, True, r"shape \(1, 1\)"),
        ([1.0], 0, True, "num_samples must be a positive integer, got 0"),
        ([1.0], 1.5, True, "num_samples must be a positive integer, got 1.5"),
    ],
)
def test_bad_weights_are_refused(weights, num_samples, replacement, fact):
    with pytest.raises(ValueError, match=fact):
        WeightedDistributedSampler(weights, num_samples, replacement, 1, 0)


def test_weights_must_fit_the_dataset():
    with pytest.raises(ValueError, match=r"each of 3 samples, got shape \(2,\)"):
        WeightedDistributedSampler([1.0, 1.0], 2, num_replicas=1, rank=0, dataset=range(3))


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_follow_the_weights(replacement):
    weights = [0.0, 1.0, 3.0, 0.0, 6.0, 0.0]
    counts = Counter()
    for epoch in range(4000 if not replacement else 1):
        sampler = WeightedDistributedSampler(
            torch.tensor(weights), 1 if not replacement else 4000, replacement, 1, 0
        )
        sampler.set_epoch(epoch)
        counts.update(sampler)
    assert set(counts) == {1, 2, 4}
    for index, count in counts.items():
        assert count / 4000 == pytest.approx(weights[index] / 10, abs=0.03)


def test_second_draws_without_replacement_follow_what_is_left():
    counts = Counter()
    for epoch in range(4000):
        sampler = WeightedDistributedSampler([1.0, 3.0, 6.0], 2, False, 1, 0)
        sampler.set_epoch(epoch)
        counts[tuple(sampler)] += 1
    for (a, b), count in counts.items():
        weights = [1, 3, 6]
        expected = weights[a] / 10 * weights[b] / (10 - weights[a])
        assert count / 4000 == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("extreme", [1e-320, 1e300])
def test_extreme_weights(extreme):
    for replacement in (True, False):
        weights = [extreme] * 3 + [0.0]
        sampler = WeightedDistributedSampler(weights, 3, replacement, 1, 0)
        assert set(sampler) <= {0, 1, 2}


def test_draws_are_shared_out():
    samplers = [
        WeightedDistributedSampler(range(1, 9), 10, True, 3, rank, seed=4) for rank in range(3)
    ]
    order = samplers[0].order().tolist()
    dealt = [list(sampler) for sampler in samplers]
    assert [len(part) for part in dealt] == [4, 4, 4]
    assert list(itertools.chain(*zip(*dealt, strict=True))) == order + order[:2]


@quick
@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_batches_of_a_step_are_of_similar_length(length, size, batch_size, shuffle):
    samples = uneven(length)
    samplers = [
        LengthGroupedSampler(
            range(length), batch_size, samples, size, rank, shuffle=shuffle, megabatch=4
        )
        for rank in range(size)
    ]
    batches = [list(BatchSampler(sampler, batch_size, drop_last=False)) for sampler in samplers]
    steps = [[samples[i] for batch in step for i in batch] for step in zip(*batches, strict=True)]
    spans = [max(step) - min(step) for step in steps]
    # Steps of a megabatch divide its range among them, and no length is above 100.
    num_megabatches = math.ceil(length / (4 * size * batch_size)) if shuffle else 1
    assert sum(spans) <= 100 * num_megabatches


def test_grouping_saves_padding_and_balances_ranks():
    samples = uneven(1000)

    def waste(samplers):
        padded, slowest = 0, 0
        loaders = [BatchSampler(sampler, 8, drop_last=False) for sampler in samplers]
        for step in zip(*loaders, strict=True):
            longest = [max(samples[i] for i in batch) for batch in step]
            padded += sum(
                sum(length - samples[i] for i in batch)
                for length, batch in zip(longest, step, strict=True)
            )
            slowest += max(longest) - min(longest)
        return padded / sum(samples), slowest

    grouped = [LengthGroupedSampler(range(1000), 8, samples, 4, r, megabatch=8) for r in range(4)]
    plain = [DistributedSampler(range(1000), 4, r) for r in range(4)]
    assert waste(grouped)[0] < 0.2 * waste(plain)[0]
    assert waste(grouped)[1] < 0.2 * waste(plain)[1]


def test_steps_come_in_random_order():
    samples = uneven(1000)
    sampler = LengthGroupedSampler(range(1000), 8, samples, 1, 0)
    longest = [max(samples[i] for i in batch) for batch in BatchSampler(sampler, 8, False)]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)
    assert len(set(longest[:20])) > 10


def test_padding_is_like_the_last_step():
    """With 9 samples on 4 ranks the last step has one, which is repeated."""
    samples = [100, 90, 80, 70, 60, 50, 40, 30, 1]
    parts = [
        list(LengthGroupedSampler(range(9), 1, samples, 4, r, shuffle=False)) for r in range(4)
    ]
    assert [part[-1] for part in parts] == [8, 8, 8, 8]


def test_lengths_are_derived():
    for data, measure in [
        (["a", "bbb", "cc"], None),
        ([torch.ones(1), torch.ones(3), torch.ones(2)], None),
        ([{"ids": [0]}, {"ids": [0] * 3}, {"ids": [0] * 2}], lambda sample: len(sample["ids"])),
    ]:
        sampler = LengthGroupedSampler(data, 1, measure, 1, 0, shuffle=False)
        assert list(sampler) == [1, 2, 0]


@pytest.mark.parametrize(
    ("data", "arguments", "fact"),
    [
        ([{"ids": 1}], {}, "a sample is a dict.*lengths"),
        ([(1, 2)], {}, "a sample is a tuple"),
        ([1.5], {}, "a sample is a float"),
        (["a"], {"lengths": [1, 2]}, r"each of 1 samples, got shape \(2,\)"),
        (["a"], {"lengths": [-1]}, r"lengths\[0\] is -1"),
        (["a"], {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        (["a"], {"megabatch": 0}, "megabatch must be a positive integer"),
    ],
)
def test_bad_lengths_are_refused(data, arguments, fact):
    arguments = {"batch_size": 1, **arguments}
    with pytest.raises(ValueError, match=fact):
        LengthGroupedSampler(data, num_replicas=1, rank=0, **arguments)


def test_grouping_goes_on_with_another_batch_size():
    """The rest of the epoch keeps its order; the next one is grouped for the new batches."""
    samples = uneven(64)
    first = LengthGroupedSampler(range(64), 4, samples, 4, 0)
    list(itertools.islice(first, 8))
    second = LengthGroupedSampler(range(64), 8, samples, 1, 0)
    second.load_state_dict(first.state_dict())
    assert list(second) == first.order().tolist()[32:]
    second.set_epoch(1)
    fresh = LengthGroupedSampler(range(64), 8, samples, 1, 0)
    fresh.set_epoch(1)
    assert list(second) == list(fresh)


def _part_of_the_world(kind: str) -> tuple[list[int], int, int]:
    arguments = {"weighted": ([1.0] * 11, 11, False), "grouped": (range(11), 2, uneven(11))}
    cls = {"weighted": WeightedDistributedSampler, "grouped": LengthGroupedSampler}
    sampler = cls.get(kind, DistributedSampler)(*arguments.get(kind, (range(11),)))
    state = sampler.state_dict()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    assert all(each == state for each in states)
    return list(DataLoader(range(11), sampler=sampler, batch_size=None)), *_place(sampler)


def _place(sampler: EpochSampler) -> tuple[int, int]:
    return sampler.num_replicas, sampler.rank


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("shuffled", "threads"),
        ("weighted", "threads"),
        ("grouped", "threads"),
        ("shuffled", "processes"),
    ],
)
def test_the_world_is_the_default_place(kind, ranks):
    results = run_ranks(_part_of_the_world, 3, kind, ranks=ranks)
    assert [place for _, *place in results] == [[3, 0], [3, 1], [3, 2]]
    seen = Counter(itertools.chain(*(part for part, *_ in results)))
    assert set(seen) == set(range(11))
    assert sum(seen.values()) == 12


def test_steps_of_similar_lengths_come_in_any_order():
    def steps(epoch):
        sampler = LengthGroupedSampler(range(60), 3, list(range(60)), 1, 0, megabatch=20)
        sampler.set_epoch(epoch)
        order = list(sampler)
        return [order[start : start + 3] for start in range(0, 60, 3)]

    blocks = [list(range(59 - 3 * i, 56 - 3 * i, -1)) for i in range(20)]  # the longest first
    assert sorted(steps(0), reverse=True) == sorted(steps(1), reverse=True) == blocks
    assert blocks != steps(0) != steps(1)


def test_a_state_of_another_megabatch_is_refused():
    first, second = (LengthGroupedSampler(range(9), 2, range(9), 1, 0, megabatch=m) for m in (2, 3))
    with pytest.raises(ValueError, match="megabatch is 2 in the state, 3 here"):
        second.load_state_dict(first.state_dict())
