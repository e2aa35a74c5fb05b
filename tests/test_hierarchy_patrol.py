"""What becomes of those who ask a store that does not answer, or that others died over."""

import threading

import pytest
import torch
from pretended_hosts import on_hosts

import phalanx as dist
from phalanx.backends.hierarchy.patrol import Patrol


@pytest.fixture
def lost():
    return threading.Event()


@pytest.fixture
def patrol(lost):
    patrol = Patrol(lambda: None, 0.01, lost.is_set)
    patrol.start()
    yield patrol
    patrol.close()


def test_an_errand_is_run_by_the_patrol(patrol):
    assert patrol.do(threading.current_thread).name == "phalanx-warden"
    assert patrol.do(lambda: patrol.do(lambda: 3)) == 3


def test_an_errand_that_fails_brings_nothing(patrol):
    def fail():
        raise RuntimeError("no store")

    assert patrol.do(fail) is None
    assert patrol.do(lambda: 3) == 3


def test_nobody_waits_for_a_store_that_is_lost(patrol, lost):
    answer = threading.Event()

    def hang():
        lost.set()  # as the heart finds out while a request hangs
        return answer.wait(60)

    assert patrol.do(hang) is None
    assert patrol.do(lambda: 3) is None
    answer.set()


def leave_a_gap():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.group.WORLD.backend._warden._store.add("log", 1)  # and is killed before it writes
    dist.barrier()
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def test_a_word_that_nobody_finished_keeps_no_other_from_being_read():
    for error in on_hosts(leave_a_gap, "abc", return_exceptions=True):
        assert isinstance(error, dist.CollectiveMismatch)
