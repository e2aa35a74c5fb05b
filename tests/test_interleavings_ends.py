"""Orders of ranks by seed: how runs end that cannot go well in any order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_interleavings import sends_around_a_ring_before_receiving

import phalanx as dist
from phalanx.testing import explore, faults, schedule


def crosses() -> None:
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second) if dist.get_rank() == 0 else (second, first):
        dist.barrier(group)


def test_a_deadlock_is_told_as_ever() -> None:
    with pytest.raises(dist.Deadlock, match="ranks 0, 1 wait for each other") as caught:
        explore(crosses, 2)
    assert "test_interleavings_ends.py" in str(caught.value)
    assert "in crosses" in str(caught.value)
    assert "in the order of seed 0" in caught.value.__notes__[-1]


def two_send_before_receiving() -> None:
    if dist.get_rank() < 2:
        dist.send(torch.ones(1), 1 - dist.get_rank())
        dist.recv(torch.ones(1), 1 - dist.get_rank())


def two_hold_a_lock_crosswise() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    lock = threading.Lock()

    def meet(group: Any) -> None:
        with lock:
            dist.barrier(group)

    if dist.get_rank() < 2:
        thread = threading.Thread(target=meet, args=(groups[dist.get_rank()],))
        thread.start()
        meet(groups[1 - dist.get_rank()])
        thread.join()


@pytest.mark.parametrize("fn", [two_send_before_receiving, two_hold_a_lock_crosswise])
def test_a_deadlock_beside_ranks_that_have_returned_is_told(fn: Any) -> None:
    with pytest.raises(dist.Deadlock, match="ranks 0, 1 wait and none of them can go on") as caught:
        explore(fn, 4, timeout=30)
    assert "ranks 2, 3: ended before" in str(caught.value)


def test_a_failure_comes_before_the_deadlock_that_it_leads_to() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.send(torch.ones(1), 1)

    with pytest.raises(KeyError, match="mine"):
        explore(body, 2, buffered=False)


def differs() -> None:
    works = [dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)]
    dist.barrier()
    for work in works:
        assert work is not None
        work.wait()


def test_a_mismatch_names_the_lines_of_what_was_posted() -> None:
    with pytest.raises(dist.CollectiveMismatch) as caught:
        explore(differs, 2)
    line = differs.__code__.co_firstlineno + 1
    assert str(caught.value).count(f"test_interleavings_ends.py:{line} in differs") >= 2


def test_an_exception_of_a_rank_is_raised() -> None:
    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        explore(body, 3)
    assert "raised by rank 1 of 3" in caught.value.__notes__[0]


def test_a_rank_that_leaves_is_told() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(dist.PeerFailed, match="rank 1"):
        explore(body, 2)


def test_timeouts_pass_when_nobody_else_can_go_on() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            return "left alone"
        with pytest.raises(dist.DistTimeout):
            dist.barrier(timeout=1000)
        work = dist.irecv(torch.zeros(1), 1)
        assert work is not None
        with pytest.raises(dist.DistTimeout):
            work.wait(1000)
        return "in time"

    assert schedule(body, 2, seed=0).results == ["in time", "left alone"]


def test_faults_can_be_explored() -> None:
    def body() -> str:
        with faults(kill=1, at="all_reduce#2"):
            try:
                for _ in range(3):
                    dist.all_reduce(torch.ones(1))
            except dist.PeerFailed as error:
                return str(error)
        return ""

    for run in explore(body, 3, seeds=range(3)):
        assert run.results[1] is None
        assert "rank 1 was killed by faults" in run.results[0]


def test_a_rank_that_hangs_is_waited_for_until_the_timeout() -> None:
    def body() -> None:
        with faults(drop=1):
            dist.barrier()

    with pytest.raises(dist.DistTimeout, match="not arrived: rank 1") as caught:
        explore(body, 2, group_timeout=0.5)
    assert "(x" in caught.value.__notes__[-1]  # turns that are alike are told once


def gets_a_message_of_another_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(2), 0)


def test_a_message_that_does_not_fit_is_told() -> None:
    with pytest.raises(dist.CollectiveMismatch, match="sent float32"):
        explore(gets_a_message_of_another_size, 2, seeds=range(5))


def test_any_message_can_be_the_first() -> None:
    def body() -> int:
        x = torch.zeros(1)
        if dist.get_rank() > 0:
            dist.send(x, 0)
            return 0
        work = dist.irecv(x)
        assert work is not None
        work.wait()
        dist.recv(x)
        return work.source_rank()

    assert {run.results[0] for run in explore(body, 3, seeds=range(20))} == {1, 2}


def test_messages_sent_before_the_end_arrive() -> None:
    def body() -> float:
        x = torch.full((1,), 5.0)
        if dist.get_rank() == 0:
            dist.isend(x, 1)
            return 0
        y = torch.zeros(1)
        dist.recv(y, 0)
        return y.item()

    for run in explore(body, 2, seeds=range(20)):
        assert run.results == [0, 5]


def test_sends_can_be_said_to_be_buffered() -> None:
    explore(sends_around_a_ring_before_receiving, 3, seeds=range(10), buffered=True)
    with pytest.raises(dist.Deadlock) as caught:
        explore(sends_around_a_ring_before_receiving, 3, seeds=[3], buffered=False)
    assert (
        "explore(sends_around_a_ring_before_receiving, 3, buffered=False, seeds=[3])"
        in caught.value.__notes__[-1]
    )
