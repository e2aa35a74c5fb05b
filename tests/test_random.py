"""Each rank that is a thread draws its own torch random numbers: those a process would draw."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, random_split

import phalanx as dist
from phalanx.launch.threads import run_threads
from phalanx.testing.ranks import run_ranks


def dropout_in_backward() -> Tensor:
    x = torch.linspace(0, 1, 50, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x * x) * torch.rand(50), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    return torch.cat([y.detach(), x.grad])


def forked() -> Tensor:
    with torch.random.fork_rng():
        inside = torch.rand(3)
    return torch.cat([inside, torch.rand(3)])


def lstm() -> Tensor:
    return nn.LSTM(4, 4, num_layers=2, dropout=0.5)(torch.ones(3, 2, 4))[0].detach()


DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(7),
    "randn": lambda: torch.randn(40, dtype=torch.float64),
    "randint": lambda: torch.randint(100, (9,)),
    "randperm": lambda: torch.randperm(11),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "uniform_": lambda: torch.empty(5).uniform_(),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((3,)),
    "native_dropout": lambda: torch.native_dropout(torch.ones(50), 0.5, True)[0],
    "dropout": lambda: F.dropout(torch.ones(50)),
    "rrelu": lambda: F.rrelu(-torch.ones(50), training=True),
    "attention": lambda: F.scaled_dot_product_attention(*torch.rand(3, 2, 4, 4), dropout_p=0.5),
    "rand of no generator": lambda: torch.rand(3, generator=None),
    "randperm of no generator": lambda: torch.randperm(11, generator=None),
    "randn of the default": lambda: torch.randn(3, generator=torch.default_generator),
    "uniform_ of the default": lambda: torch.empty(3).uniform_(generator=torch.default_generator),
    "poisson of the default": lambda: torch.poisson(torch.ones(9), torch.default_generator),
    "random_split": lambda: torch.tensor(random_split(range(20), [10, 10])[0].indices),
    "linear": lambda: nn.Linear(4, 4).weight.detach(),
    "xavier": lambda: nn.init.xavier_normal_(torch.empty(4, 4)),
    "lstm": lstm,
    "shuffle": lambda: torch.cat(list(DataLoader(torch.arange(20), shuffle=True))),
    "backward": dropout_in_backward,
    "fork_rng": forked,
    "seed": lambda: torch.tensor(torch.initial_seed()),
    "state": lambda: torch.get_rng_state(),
}


def draw(name: str, seed: int, times: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [DRAWS[name]() for _ in range(times)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def _same_state_after() -> object:
    """Put the generator back, and see that nothing a rank draws moves it."""
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_what_a_process_draws(name: str) -> None:
    expected = [draw(name, seed, times=10) for seed in range(3)]
    before = torch.get_rng_state()
    drawn = run_threads(lambda: draw(name, dist.get_rank(), times=10), 3)
    assert all(equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def draw_everything() -> list[Tensor]:
    return [x for name in sorted(DRAWS) for x in draw(name, 10 + dist.get_rank())]


def test_ranks_as_threads_and_as_processes_draw_the_same() -> None:
    threads = run_ranks(draw_everything, 2, ranks="threads")
    processes = run_ranks(draw_everything, 2, ranks="processes")
    assert all(equal(a, b) for a, b in zip(threads, processes, strict=True))


def draw_four() -> Tensor:
    return torch.rand(4)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_streams_start_where_the_caller_stands(ranks: Any) -> None:
    torch.manual_seed(3)
    torch.rand(5)
    drawn = run_ranks(draw_four, 2, ranks=ranks)
    expected = torch.rand(4)
    assert all(torch.equal(x, expected) for x in drawn)


def test_a_nested_world_starts_where_its_rank_stands() -> None:
    def outer() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(dist.get_rank())
        return run_threads(lambda: torch.rand(4), 2), torch.rand(4)

    for inner, after in run_threads(outer, 2):
        assert all(torch.equal(x, after) for x in inner)


def test_threads_of_a_rank_share_its_stream() -> None:
    def fn() -> Tensor:
        torch.manual_seed(dist.get_rank())
        parts = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: parts.append(torch.rand(2)))
            thread.start()
            thread.join()
        return torch.cat(parts)

    for rank, drawn in enumerate(run_threads(fn, 2)):
        torch.manual_seed(rank)
        assert torch.equal(drawn, torch.cat([torch.rand(2) for _ in range(3)]))


def test_a_given_generator_is_left_alone() -> None:
    def fn() -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(5)
        before = torch.get_rng_state()
        drawn = torch.cat(
            [
                torch.rand(3, generator=own),
                torch.empty(3).normal_(generator=own),
                torch.poisson(torch.ones(3), generator=own),
            ]
        )
        assert torch.equal(torch.get_rng_state(), before)
        return drawn, own.get_state()

    expected = fn()
    for drawn in run_threads(fn, 2):
        assert equal(list(drawn), list(expected))


def test_seeding_concerns_one_rank() -> None:
    torch.manual_seed(1)
    seeded = threading.Barrier(2)

    def fn() -> tuple[int, int, float]:
        if dist.get_rank() == 1:
            torch.seed()
        seeded.wait()
        first = torch.initial_seed()
        state = torch.get_rng_state()
        value = torch.rand(())
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(()), value)
        return first, torch.manual_seed(7).initial_seed(), torch.rand(()).item()

    (seed0, again0, value0), (seed1, again1, value1) = run_threads(fn, 2)
    assert seed0 == 1
    assert seed1 != 1
    assert again0 == again1 == 7
    assert value0 == value1
    assert torch.initial_seed() == 1


def test_without_streams_ranks_share_the_generator() -> None:
    torch.manual_seed(3)
    drawn = torch.cat(run_threads(lambda: torch.rand(4, dtype=torch.float64), 2, rng=False))
    torch.manual_seed(3)
    expected = torch.rand(8, dtype=torch.float64)
    assert torch.equal(drawn.sort().values, expected.sort().values)


def test_other_operators_do_not_pass_through_python() -> None:
    run_threads(torch.rand, 1, 1)
    caught = torch._C._dispatch_has_kernel_for_dispatch_key
    assert caught("aten::uniform_", "TESTING_ONLY_GenericMode")
    for name in ("aten::add.Tensor", "aten::mm", "aten::dropout", "aten::lstm.input"):
        assert not caught(name, "TESTING_ONLY_GenericMode")
