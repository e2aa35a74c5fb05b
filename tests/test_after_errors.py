"""What ranks do right after an error that leaves them a usable group."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from outside_worlds import once_waiting

import phalanx as dist
from phalanx.testing import run_ranks

LARGE = 2_000_000


def _sends_after_a_deadlock() -> list[str]:
    rank, seen = dist.get_rank(), []
    for turn in range(4):
        time.sleep(0.01 * turn * rank)  # now one finds the deadlock, now the other
        tensor = torch.zeros(LARGE)
        if rank == 1:
            with pytest.raises(dist.Deadlock):
                dist.recv(torch.empty(4), 0)
            dist.send(torch.ones(LARGE), 0)
            continue
        try:
            dist.recv(tensor, 1)
        except dist.Deadlock:
            assert not tensor.any()
            seen.append("told")
            dist.recv(tensor, 1)
        else:
            seen.append("received")
        assert tensor.all()
    return seen


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_message_may_follow_a_deadlock(ranks: str) -> None:
    seen = run_ranks(_sends_after_a_deadlock, 2, ranks=ranks)[0]
    assert len(seen) == 4


def _keeps_the_error() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(dist.Deadlock):
            dist.recv(torch.empty(4), 1)
        return
    with pytest.raises(dist.Deadlock) as kept:
        dist.new_group([0, 1])
    with pytest.raises(dist.PeerFailed):
        dist.irecv(torch.empty(4), 0).wait()
    assert "rank 0" in str(kept.value)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_error_that_is_kept_keeps_nothing_from_being_noticed(ranks: str) -> None:
    run_ranks(_keeps_the_error, 2, ranks=ranks)


def _is_stopped_in_a_meeting(size: int) -> list[float]:
    rank = dist.get_rank()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    sleeper = int(pids[-1])
    total = torch.ones(4)
    if rank == size - 1:
        dist.all_reduce(total)  # stopped in here, once the others are on their way
        with pytest.raises(dist.DistTimeout):
            dist.barrier()
    else:
        if rank == 0:
            once_waiting({size - 1: 0})
            os.kill(sleeper, signal.SIGSTOP)
        time.sleep(0.5)
        dist.all_reduce(total)
        with pytest.raises(dist.DistTimeout):
            dist.barrier(timeout=0.3)
    later = torch.full((4,), 1000.0)
    work = dist.all_reduce(later, async_op=True)
    if rank == 0:
        time.sleep(0.3)
        os.kill(sleeper, signal.SIGCONT)
    work.wait()
    assert (later == 1000 * size).all()
    return total.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_slept_reads_what_was_meant_for_it(size: int) -> None:
    results = run_ranks(_is_stopped_in_a_meeting, size, size, ranks="processes")
    assert results == [[float(size)] * 4] * size


def _forks_with_a_message_on_its_way() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.5)
        tensor = torch.zeros(LARGE)
        dist.recv(tensor, 0)
        assert tensor.all()
        return
    work = dist.isend(torch.ones(LARGE), 1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    work.wait()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_messages_alone() -> None:
    run_ranks(_forks_with_a_message_on_its_way, 2, ranks="processes")
