"""Each rank that is a thread can draw its own numbers from `random` and NumPy, too."""

from __future__ import annotations

import random
import threading
from random import gauss as imported_gauss
from random import random as imported_random
from random import seed as imported_seed
from random import shuffle as imported_shuffle

import numpy as np
import pytest
import torch
from numpy.random import rand as imported_rand
from numpy.random import seed as imported_numpy_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as dist
from phalanx.launch.threads import run_threads
from phalanx.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def _same_state_after():
    """See that nothing a rank draws moves the process's generators."""
    python, numpy = random.getstate(), str(np.random.get_state(legacy=False))
    names = vars(random).copy(), vars(np.random).copy(), globals().copy()
    yield
    assert names == (vars(random), vars(np.random), globals())
    assert random.getstate() == python
    assert str(np.random.get_state(legacy=False)) == numpy


def shuffled():
    items = list(range(9))
    random.shuffle(items)
    np.random.shuffle(items)
    imported_shuffle(items)
    return items


DRAWS = {
    "module": lambda: [random.random(), random.getrandbits(70), random.randbytes(3)],
    "distributions": lambda: [random.gauss(), random.betavariate(1, 2), random.choice("abc")],
    "cached gauss": lambda: [random.gauss(), imported_gauss(), random.gauss()],
    "imported": lambda: [imported_random(), imported_rand(2).tolist()],
    "shuffle": shuffled,
    "numpy": lambda: [np.random.rand(), np.random.randint(9, size=3).tolist()],
    "cached normal": lambda: [np.random.randn(3).tolist(), np.random.normal()],
    "aliases": lambda: [np.random.sample(2).tolist(), np.random.ranf()],
    "permutation": lambda: np.random.permutation(7).tolist(),
    "hidden": lambda: [random._inst.random(), np.random.mtrand._rand.rand()],
    "state": lambda: [random.getstate(), str(np.random.get_state())],
    "bit generator": lambda: str(np.random.get_bit_generator().state),
}


def drawn(name, seed, times=5):
    random.seed(seed)
    np.random.seed(seed)
    return [DRAWS[name]() for _ in range(times)]


def in_process(name, seed):
    """Return what a process of its own would draw, and leave this one's generators alone."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        return drawn(name, seed)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_what_a_process_draws(name):
    expected = [in_process(name, seed) for seed in range(3)]
    meeting = threading.Barrier(3)

    def draw():
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        meeting.wait()  # all are seeded before anybody draws
        return drawn(name, dist.get_rank())

    assert run_threads(draw, 3, rng="all") == expected


def seeds_by_imported_names():
    imported_seed(dist.get_rank())
    imported_numpy_seed(dist.get_rank())
    dist.barrier()
    return imported_random(), imported_rand(3).tolist()


def test_names_that_modules_have_given_are_caught():
    threads = run_ranks(seeds_by_imported_names, 2, rng="all")
    assert threads == run_ranks(seeds_by_imported_names, 2, ranks="processes")


def test_streams_start_where_the_caller_stands():
    def draw():
        return random.random(), np.random.randn()

    python, numpy = random.getstate(), np.random.get_state()
    np.random.randn()  # so that half a pair is left over
    found = run_threads(draw, 3, rng="all")
    assert found == [draw()] * 3
    random.setstate(python)
    np.random.set_state(numpy)


def test_another_kind_of_generator_is_taken_over():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        expected = np.random.RandomState(np.random.PCG64(7)).rand(3).tolist()
        assert run_threads(lambda: np.random.rand(3).tolist(), 2, rng="all") == [expected] * 2

        def change():
            np.random.set_bit_generator(np.random.PCG64(dist.get_rank()))
            dist.barrier()
            return np.random.rand()

        assert run_threads(change, 2, rng="all") == [
            np.random.RandomState(np.random.PCG64(rank)).rand() for rank in range(2)
        ]
    finally:
        np.random.set_bit_generator(before)


def test_threads_of_a_rank_share_its_stream():
    def draw():
        random.seed(dist.get_rank())
        found = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: found.append(random.random()))
            thread.start()
            thread.join()
        return found

    assert run_threads(draw, 2, rng="all") == [
        [own.random() for _ in range(3)] for own in map(random.Random, range(2))
    ]


def test_a_nested_world_starts_where_its_rank_stands():
    def outer():
        random.seed(dist.get_rank())
        return run_threads(lambda: random.random(), 2, rng="all"), random.random()

    assert run_threads(outer, 2, rng="all") == [
        ([first, first], first) for first in (random.Random(rank).random() for rank in range(2))
    ]


def test_who_belongs_to_no_rank_draws_from_the_process_s():
    state = random.getstate()
    inside, outside = threading.Event(), threading.Event()

    def draw():
        random.seed(1)
        inside.set()
        outside.wait(60)
        return random.random()

    found = []

    def bystander():
        inside.wait(60)
        found.append(random.random())
        outside.set()

    thread = threading.Thread(target=bystander)
    thread.start()
    assert run_threads(draw, 1, rng="all") == [random.Random(1).random()]
    thread.join()
    random.setstate(state)
    assert found == [random.random()]
    random.setstate(state)


def test_objects_of_one_s_own_are_left_alone():
    own, numpy = random.Random(3), np.random.RandomState(3)
    expected = random.Random(3).random(), np.random.RandomState(3).rand()
    assert run_threads(lambda: (own.random(), numpy.rand()), 1, rng="all") == [expected]


def test_what_others_take_for_numpy_s_generator_is_one():
    def kind():
        generator = np.random.mtrand._rand
        return isinstance(generator, np.random.RandomState), isinstance(random._inst, random.Random)

    assert run_threads(kind, 1, rng="all") == [(True, True)]


def test_nothing_is_exchanged_unless_asked_for():
    functions = [random.random, np.random.rand]
    assert run_threads(lambda: [random.random, np.random.rand], 1) == [functions]
    (exchanged,) = run_threads(lambda: [random.random, np.random.rand], 1, rng="all")
    assert not set(exchanged) & set(functions)
    assert [random.random, np.random.rand] == functions


@pytest.mark.parametrize("rng", ["torch", 2, None])
def test_an_unknown_choice_is_refused(rng):
    with pytest.raises(ValueError, match=r"unknown rng .*'all'"):
        run_threads(random.random, 1, rng=rng)


# A training run, in all of whose parts something is drawn.


def augmented(inputs):
    """Change a batch as data pipelines do: some of it by `random`, some by NumPy."""
    noise = torch.from_numpy(np.random.normal(scale=0.1, size=inputs.shape)).float()
    inputs = inputs.flip(1) if random.random() < 0.5 else inputs
    return inputs[np.random.permutation(len(inputs))] + noise * random.uniform(0.5, 1.5)


def train(seed=5):
    """Train for some steps; return the losses and the parameters, bit by bit."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    body, head = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3)), nn.Linear(16, 1)
    model = dist.DistributedDataParallel(nn.Sequential(body, head))
    optimizers = [
        torch.optim.AdamW(body.parameters(), lr=0.01),
        torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9),
    ]
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(100 + rank)
    data = TensorDataset(torch.linspace(-1, 1, 144).reshape(24, 6))
    sampler = dist.DistributedSampler(data, shuffle=True, seed=3)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in DataLoader(data, batch_size=3, sampler=sampler):
            inputs = augmented(inputs)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [parameter.tolist() for parameter in model.parameters()], random.random()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_training_run_has_the_same_bits_on_threads_and_on_processes(size):
    threads = run_ranks(train, size, rng="all")
    assert threads == run_ranks(train, size, ranks="processes")
    assert len({tuple(losses) for losses, *_ in threads}) == size  # ranks draw different numbers
    assert all(parameters == threads[0][1] for _, parameters, _ in threads)
