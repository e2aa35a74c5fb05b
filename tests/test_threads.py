"""Worlds whose ranks are threads: identity, failures, endings."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import phalanx as dist
from phalanx.errors import DistError, DistTimeout, PeerFailed
from phalanx.launch.threads import run_threads


def total() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("size", [1, 3])
def test_returns_results_by_rank(size: int) -> None:
    def fn(factor: int, *, offset: int) -> tuple[int, int]:
        return dist.get_rank() * factor + offset, dist.get_world_size()

    assert run_threads(fn, size, 10, offset=5) == [(10 * r + 5, size) for r in range(size)]


def test_ranks_communicate() -> None:
    assert run_threads(total, 4) == [10.0] * 4


def test_many_ranks_in_one_process() -> None:
    assert run_threads(total, 256) == [256 * 257 / 2] * 256


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_threads(total, 0)


def test_worlds_nest() -> None:
    def outer() -> tuple[int, list[float], int]:
        before = dist.get_rank()
        return before, run_threads(total, 2 + before), dist.get_rank()

    assert run_threads(outer, 2) == [(0, [3.0] * 2, 0), (1, [6.0] * 3, 1)]


def test_a_rank_may_leave_and_join_again() -> None:
    def fn() -> bool:
        dist.destroy_process_group()
        return dist.is_initialized()

    assert run_threads(fn, 2) == [False, False]


class TestIdentity:
    """`get_rank()` is right wherever code runs on behalf of a rank."""

    def test_in_threads_that_a_rank_starts(self) -> None:
        class Child(threading.Thread):
            def run(self) -> None:
                grandchild = threading.Thread(target=lambda: ranks.append(dist.get_rank()))
                grandchild.start()
                grandchild.join()
                ranks.append(dist.get_rank())

        ranks: list[int] = []

        def fn() -> None:
            child = Child()
            child.start()
            child.join()

        run_threads(fn, 3)
        assert sorted(ranks) == [0, 0, 1, 1, 2, 2]

    def test_in_tasks_of_a_pool_that_all_ranks_share(self) -> None:
        with ThreadPoolExecutor(2) as pool:

            def fn() -> list[int]:
                return list(pool.map(lambda _: dist.get_rank(), range(8)))

            assert run_threads(fn, 3) == [[rank] * 8 for rank in range(3)]
            assert pool.submit(dist.is_initialized).result() is False

    def test_in_autograd_hooks(self) -> None:
        def fn() -> list[int]:
            ranks = []
            x = torch.ones(3, requires_grad=True)
            x.register_post_accumulate_grad_hook(lambda _: ranks.append(dist.get_rank()))
            (x * 2).sum().backward()
            return ranks

        assert run_threads(fn, 3) == [[0], [1], [2]]

    def test_ends_with_the_world(self) -> None:
        before = threading.Thread.start, ThreadPoolExecutor.submit, torch.random.default_generator
        threads = threading.active_count()
        run_threads(total, 2)
        with pytest.raises(ZeroDivisionError):
            run_threads(lambda: 1 / 0, 2)
        after = threading.Thread.start, ThreadPoolExecutor.submit, torch.random.default_generator
        assert after == before
        assert threading.active_count() == threads
        assert not dist.is_initialized()


class TestFailures:
    def test_the_first_real_error_is_raised_with_its_rank(self) -> None:
        def fn() -> None:
            if dist.get_rank() == 2:
                raise KeyError("lost")
            dist.barrier()

        with pytest.raises(KeyError, match="lost") as caught:
            run_threads(fn, 4)
        assert "rank 2 of 4" in "".join(caught.value.__notes__)
        assert "also failed" not in "".join(caught.value.__notes__)

    def test_peers_are_told_why(self) -> None:
        def fn() -> int:
            if dist.get_rank() == 1:
                raise KeyError("lost")
            dist.barrier()
            return 7

        outcomes = run_threads(fn, 3, return_exceptions=True)
        assert isinstance(outcomes[1], KeyError)
        for rank in (0, 2):
            assert isinstance(outcomes[rank], PeerFailed)
            assert "rank 1" in str(outcomes[rank])
            assert "KeyError: 'lost'" in str(outcomes[rank])

    def test_equal_errors_are_one_and_others_are_mentioned(self) -> None:
        all_here = threading.Barrier(4)

        def fn() -> None:
            all_here.wait()
            raise ValueError("too large") if dist.get_rank() < 3 else KeyError("lost")

        with pytest.raises((ValueError, KeyError)) as caught:
            run_threads(fn, 4)
        first, *others = "".join(caught.value.__notes__).splitlines()
        told = {"raised by ranks 0-2 of 4": "'lost'", "raised by rank 3 of 4": "too large"}
        assert first in told
        assert len(others) == 1
        assert told[first] in others[0]

    def test_exit_is_an_error(self) -> None:
        with pytest.raises(DistError, match=r"sys\.exit\(3\)") as caught:
            run_threads(lambda: sys.exit(3), 1)
        assert "rank 0 of 1" in "".join(caught.value.__notes__)

    def test_a_bad_backend_is_the_error_of_every_rank(self) -> None:
        with pytest.raises(ValueError, match="nonsense"):
            run_threads(total, 2, backend="nonsense")


class TestEndings:
    def test_a_deadline_shows_where_ranks_stand(self) -> None:
        ended = []

        def fn() -> None:
            try:
                for _ in itertools.count() if dist.get_rank() == 1 else ():
                    time.sleep(0.001)
            finally:
                ended.append(dist.get_rank())

        with pytest.raises(DistTimeout, match=r"rank 1 of 2 .* 0\.2 s") as caught:
            run_threads(fn, 2, deadline=0.2)
        assert "test_threads.py" in str(caught.value)
        assert "in fn" in str(caught.value)
        assert sorted(ended) == [0, 1]

    def test_a_deadline_wakes_ranks_that_wait_for_others(self) -> None:
        def fn() -> None:
            if dist.get_rank() == 0:
                dist.barrier()
            else:
                forever.wait()

        forever = threading.Event()
        threading.Timer(0.5, forever.set).start()
        with pytest.raises(DistTimeout, match="ranks 0, 1 of 2"):
            run_threads(fn, 2, deadline=0.2)

    def test_an_interrupt_ends_the_ranks(self) -> None:
        ended = []
        both_run = threading.Barrier(2)

        def fn() -> None:
            try:
                both_run.wait(20)
                if dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGINT)
                while True:
                    time.sleep(0.001)
            finally:
                ended.append(dist.get_rank())

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run_threads(fn, 2)
        finally:
            signal.signal(signal.SIGINT, before)
        assert sorted(ended) == [0, 1]
