"""A monitored barrier names who is missing, tells all who came, and leaves the group as it was."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from calls import everybody_goes_on
from words import listen, tell

import phalanx as dist
from phalanx.testing import run_ranks

RANKS = pytest.mark.parametrize("ranks", ["threads", "processes"])
SHORT, LONG = 0.3, 60.0


def fails(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> str:
    """Fail at a monitored barrier and return what was said."""
    with pytest.raises(dist.DistBackendError) as caught:
        dist.monitored_barrier(group, timeout, wait_all_ranks)
    return str(caught.value)


def _all_come() -> int:
    for timeout in (None, LONG, timedelta(seconds=LONG)):
        dist.monitored_barrier(timeout=timeout)
        dist.monitored_barrier(wait_all_ranks=True, timeout=timeout)
    everybody_goes_on()
    dist.monitored_barrier(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    return 1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_pass_if_all_come(size: int) -> None:
    assert run_ranks(_all_come, size) == [1] * size


def _nobody_passes_before_all_have_come(come: list[int], lock: threading.Lock) -> None:
    for number in range(1, 20):
        with lock:
            come.append(number)
        dist.monitored_barrier()
        assert come.count(number) == 3


def test_nobody_passes_before_all_have_come() -> None:
    run_ranks(_nobody_passes_before_all_have_come, 3, [], threading.Lock())


def _some_are_missing(missing: list[int], wait_all_ranks: bool) -> str:
    rank = dist.get_rank()
    dist.barrier()
    if rank in missing:
        listen("told", dist.get_world_size() - len(missing))
        return ""
    if rank == 0:
        listen("coming", dist.get_world_size() - len(missing) - 1)
    else:
        tell("coming")
    text = fails(None, SHORT if rank == 0 else LONG, wait_all_ranks)
    tell("told")
    return text


@RANKS
def test_rank_0_names_the_first_missing_rank_and_the_others_learn(ranks: Any) -> None:
    told = run_ranks(_some_are_missing, 4, [2, 3], False, ranks=ranks)
    assert "Rank 2 failed to pass monitoredBarrier" in told[0]
    assert "3" not in told[0].partition("failed to pass")[0].partition("Rank 2")[2]
    assert f"{SHORT:g} s" in told[0]
    assert "Rank 1 successfully reached monitoredBarrier" in told[1]
    assert "rank 2" in told[1].lower()  # not only "ask rank 0"


def test_rank_0_names_all_missing_ranks_if_asked_to() -> None:
    told = run_ranks(_some_are_missing, 5, [1, 3, 4], True)
    assert "Ranks 1, 3, 4 failed to pass monitoredBarrier" in told[0]
    assert "Rank 2 successfully reached monitoredBarrier" in told[2]


def test_a_single_missing_rank_is_named_either_way() -> None:
    for wait_all_ranks in (False, True):
        told = run_ranks(_some_are_missing, 3, [2], wait_all_ranks)
        assert "2 failed to pass monitoredBarrier" in told[0]
        assert "Rank 1 successfully reached" in told[1]


def _says_where_they_are() -> str:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(7))
    if rank == 0:
        listen("in recv")
        text = fails(None, SHORT, wait_all_ranks=True)
        dist.send(torch.ones(1), 1)
        tell("told")
        return text
    if rank == 1:
        tell("in recv")
        dist.recv(torch.empty(1), 0)
    else:
        listen("told")
    return ""


@RANKS
def test_it_says_what_the_missing_do(ranks: Any) -> None:
    told = run_ranks(_says_where_they_are, 3, ranks=ranks)[0]
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in told
    assert "recv" in told
    assert "all_reduce" in told
    assert "test_monitored_barrier.py:" in told
    assert "_says_where_they_are" in told


def _rank_0_is_missing() -> str:
    if dist.get_rank() == 0:
        listen("told", 2)
        return ""
    text = fails(timeout=SHORT)
    tell("told")
    return text


def test_the_others_notice_that_rank_0_is_missing() -> None:
    told = run_ranks(_rank_0_is_missing, 3)
    for rank in (1, 2):
        assert f"Rank {rank} successfully reached monitoredBarrier" in told[rank]
        assert "rank 0" in told[rank]


def _subgroup() -> str:
    rank = dist.get_rank()
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        listen("told")
    else:
        dist.monitored_barrier(group)
        if rank == 1:  # the first of the group
            text = fails(group, SHORT)
            tell("told")
            everybody_goes_on()
            return text
        listen("told")
    everybody_goes_on()
    return ""


def test_it_works_in_a_part_of_the_world() -> None:
    told = run_ranks(_subgroup, 4)[1]
    assert "Rank 2 failed to pass monitoredBarrier" in told  # the world's number


def _group_timeout() -> str:
    dist.barrier()
    dist.group.WORLD.set_timeout(SHORT)
    if dist.get_rank() == 1:
        listen("told")
        return ""
    text = fails()
    tell("told")
    return text


def test_its_timeout_is_the_groups_by_default() -> None:
    assert f"{SHORT:g} s" in run_ranks(_group_timeout, 2)[0]


def _late_comers() -> str:
    rank = dist.get_rank()
    text = ""
    if rank == 2:
        listen("told", 2)
        text = fails(timeout=LONG)  # at once: it was given up
    else:
        fails(timeout=SHORT if rank == 0 else LONG)
        tell("told")
    dist.monitored_barrier(timeout=LONG)
    everybody_goes_on()
    return text


@RANKS
def test_a_late_comer_learns_that_it_was_given_up(ranks: Any) -> None:
    told = run_ranks(_late_comers, 3, ranks=ranks)[2]
    assert "rank 0" in told.lower()


def _late_comers_do_not_count() -> None:
    rank = dist.get_rank()
    if rank == 0:
        fails(timeout=SHORT)
        tell("told")
        listen("came late")
        assert "1 failed to pass" in fails(timeout=SHORT)  # it has come to the first one only
        tell("told again")
    else:
        listen("told")
        fails(timeout=LONG)
        tell("came late")
        listen("told again")
        fails(timeout=LONG)
    dist.monitored_barrier(timeout=LONG)


def test_who_came_late_to_one_does_not_count_for_the_next() -> None:
    run_ranks(_late_comers_do_not_count, 2)


def _end(kind: str) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("lost")


def _one_is_dead(kind: str, wait_all_ranks: bool) -> str:
    dist.barrier()
    if dist.get_rank() == 2:
        _end(kind)
    return fails(None, LONG, wait_all_ranks)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize(
    ("kind", "ranks", "says"),
    [
        ("killed", "processes", "SIGKILL"),
        ("raised", "processes", "KeyError"),
        ("raised", "threads", "KeyError"),
    ],
)
def test_a_dead_rank_is_named_at_once(
    kind: str, ranks: Any, says: str, wait_all_ranks: bool
) -> None:
    told = run_ranks(
        _one_is_dead, 3, kind, wait_all_ranks, ranks=ranks, return_exceptions=True, timeout=30
    )
    assert all("rank 2" in text.lower() and says in text for text in told[:2])
    if kind == "killed":  # who raises ends the whole group, even for those who have not come yet
        assert "2 failed to pass monitoredBarrier" in told[0]
        assert "Rank 1 successfully reached monitoredBarrier" in told[1]


def _on_another_operation() -> tuple[str, str]:
    """A rank that waits in a collective instead is missing, too."""
    if dist.get_rank() == 1:
        tell("coming")
        try:
            dist.barrier(timeout=LONG)
        except dist.DistBackendError as error:
            return "barrier", str(error)
    listen("coming")
    return "monitored", fails(timeout=SHORT)


def test_a_rank_in_another_operation_is_named() -> None:
    told = run_ranks(_on_another_operation, 2)
    assert "1 failed to pass monitoredBarrier" in told[0][1]
    assert "barrier(" in told[0][1]
