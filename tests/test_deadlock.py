"""Ranks that wait for each other are told so, all of them; ranks that may still move never are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from outside_worlds import once_waiting, ranks_of_this_world
from trials.cases import deadlock_case
from trials.verdicts import ranks_named

import phalanx as dist
from phalanx.testing import run_ranks

LARGE = 500_000  # elements of a message that waits for its receiver
LATE = 0.8  # seconds after which a deadlock would long have been found
PROGRAMS = int(os.environ.get("PHALANX_TRIALS", "40"))

both = pytest.mark.parametrize("ranks", ["threads", "processes"])


def _deadlocks(
    body: Callable[..., None],
    size: int,
    words: set[str],
    ranks: str = "threads",
    stuck: set[int] | None = None,
) -> list[Any]:
    """Run `body`; all `stuck` ranks must get a Deadlock that tells of each of them, with words."""
    stuck = set(range(size)) if stuck is None else stuck
    results = run_ranks(
        body, size, ranks=ranks, timeout=30, group_timeout=20, return_exceptions=True
    )
    for rank, result in enumerate(results):
        if rank not in stuck:
            assert result is None, f"rank {rank}: {result}"
            continue
        assert isinstance(result, dist.Deadlock), f"rank {rank}: {result!r}"
        assert ranks_named(str(result)) >= stuck
        for word in {*words, "test_deadlock.py:", f"in {body.__name__}"}:
            assert word in str(result), f"{word} is not in: {result}"
    return results


def crossed_recv() -> None:
    dist.recv(torch.empty(3), 1 - dist.get_rank())


@both
def test_two_that_receive_from_each_other(ranks: str) -> None:
    _deadlocks(crossed_recv, 2, {"recv", "float32[3]"}, ranks)


def crossed_send() -> None:
    dist.send(torch.empty(LARGE), 1 - dist.get_rank())


def test_two_that_send_large_messages_to_each_other() -> None:
    _deadlocks(crossed_send, 2, {"send", f"float32[{LARGE}]"})


def opposite_order() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if dist.get_rank() == 1:
        groups.reverse()
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)


@both
def test_two_groups_in_opposite_order(ranks: str) -> None:
    results = _deadlocks(opposite_order, 2, {"all_reduce"}, ranks)
    for result in results:
        assert "'1'" in str(result)
        assert "'2'" in str(result)


def sends_into_a_collective() -> None:
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        dist.send(torch.empty(LARGE), 1)
    elif dist.get_rank() == 1:
        dist.broadcast(torch.ones(1), 1, group=pair)
        dist.recv(torch.empty(LARGE), 0)
    else:
        dist.recv(torch.empty(1), 0)


def test_a_large_send_to_one_that_is_in_a_collective_of_another_group() -> None:
    _deadlocks(sends_into_a_collective, 3, {"send", "broadcast", "recv"})


def never_reaches_the_barrier() -> None:
    if dist.get_rank() == 1:
        once_waiting({0: 1, 2: 1})
        dist.recv(torch.empty(1), 0)
    dist.barrier()


@both
def test_a_barrier_that_one_never_reaches_because_it_receives(ranks: str) -> None:
    _deadlocks(never_reaches_the_barrier, 3, {"barrier", "recv"}, ranks)


def three_groups() -> None:
    rank = dist.get_rank()
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = {pair: dist.new_group(pair) for pair in pairs}
    # Each begins with the one on its right.
    right = {0: (0, 1), 1: (1, 2), 2: (0, 2)}[rank]
    dist.all_gather([torch.empty(2)] * 2, torch.ones(2), group=groups[right])


def test_a_cycle_of_three_over_three_groups() -> None:
    _deadlocks(three_groups, 3, {"all_gather"})


def waits_for_works() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    work = dist.all_reduce(torch.ones(1), group=groups[rank], async_op=True)
    assert not work.is_completed()
    work.wait()


@both
def test_asynchronous_works_in_a_cycle(ranks: str) -> None:
    _deadlocks(waits_for_works, 2, {"all_reduce"}, ranks)


def waits_for_messages() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.isend(torch.ones(LARGE), 1).wait()
    elif rank == 1:
        once_waiting({0: 1, 2: 0})
        dist.irecv(torch.empty(1), 2).wait()
    else:
        dist.broadcast(torch.ones(1), 0)


def test_asynchronous_messages_in_a_cycle() -> None:
    _deadlocks(waits_for_messages, 3, {"send", "recv", "broadcast"})


def receives_from_anybody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1))
    dist.barrier()


def test_a_receive_from_any_source_while_all_others_wait() -> None:
    _deadlocks(receives_from_anybody, 3, {"recv", "barrier"})


def receives_from_those_that_are_left() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.empty(1))


def test_a_receive_from_any_source_when_some_have_left() -> None:
    _deadlocks(receives_from_those_that_are_left, 3, {"recv"}, stuck={0, 1})


def drops_a_work() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)  # the end of the rank waits for it
    else:
        dist.recv(torch.empty(1), 0)


@both
def test_a_rank_that_waits_for_its_groups_to_be_destroyed(ranks: str) -> None:
    results = run_ranks(
        drops_a_work, 2, ranks=ranks, timeout=30, group_timeout=20, return_exceptions=True
    )
    assert isinstance(results[1], dist.Deadlock)
    assert ranks_named(str(results[1])) == {0, 1}
    assert "all_reduce" in str(results[1])


def some_make_a_group() -> None:
    if dist.get_rank() < 2:
        dist.barrier(dist.new_group([0, 1, 2]))
    else:
        once_waiting({0: 2, 1: 2})
        dist.all_reduce(torch.ones(1))


@both
def test_a_group_that_not_all_make(ranks: str) -> None:
    _deadlocks(some_make_a_group, 3, {"all_reduce"}, ranks)


def first_does_not_make_the_group() -> None:
    if dist.get_rank() > 0:
        dist.new_group([0, 1, 2])
    else:
        once_waiting({1: 0, 2: 0})
        dist.all_reduce(torch.ones(1))


def test_a_group_that_its_first_rank_does_not_make() -> None:
    _deadlocks(first_does_not_make_the_group, 3, {"all_reduce"})


def waits_for_a_cycle() -> None:
    rank = dist.get_rank()
    whom = {0: 1, 1: 0, 2: 1, 3: 2}
    if rank == 0:
        once_waiting({each: whom[each] for each in (1, 2, 3)})
    dist.recv(torch.empty(1), whom[rank])


def test_ranks_that_wait_for_a_cycle_are_told_as_well() -> None:
    _deadlocks(waits_for_a_cycle, 4, {"recv"})


def comes_after_a_cycle() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank < 2:
        dist.recv(torch.empty(1), 1 - rank)
    else:
        while all(each.presence == "here" for each in ranks_of_this_world()):
            time.sleep(0.01)
        dist.barrier()


@both
def test_a_rank_that_comes_when_a_cycle_was_told_hears_of_it(ranks: str) -> None:
    *stuck, late = run_ranks(
        comes_after_a_cycle, 3, ranks=ranks, timeout=30, group_timeout=20, return_exceptions=True
    )
    assert all(isinstance(each, dist.Deadlock) for each in stuck)
    assert isinstance(late, dist.PeerFailed)
    assert ranks_named(str(late)) >= {0, 1}
    assert "barrier" in str(late)
    assert "Deadlock" in str(late)


def bystanders() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([2, 3])
    if rank < 2:
        dist.recv(torch.empty(1), 1 - rank)
        return
    tensor = torch.ones(1)
    until = time.monotonic() + LATE
    while tensor.item() > 0:  # all that time they exchange something
        tensor.fill_(float(time.monotonic() < until))
        dist.broadcast(tensor, 2, group=pair)


@both
def test_others_go_on(ranks: str) -> None:
    _deadlocks(bystanders, 4, {"recv"}, ranks, stuck={0, 1})


def all_threads_wait() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
        return
    errors = []

    def receive() -> None:
        try:
            dist.recv(torch.empty(2), 1, tag=7)
        except dist.Deadlock as error:
            errors.append(error)

    helper = threading.Thread(target=receive)
    helper.start()
    try:
        dist.recv(torch.empty(3), 1, tag=8)
    finally:
        helper.join()
        assert len(errors) == 1


@both
def test_a_rank_all_of_whose_threads_wait(ranks: str) -> None:
    for result in _deadlocks(all_threads_wait, 2, {"recv", "float32[2]", "float32[3]"}, ranks):
        assert "tag=7" in str(result)


def goes_on_afterwards() -> None:
    peer = 1 - dist.get_rank()
    for _ in range(2):
        with pytest.raises(dist.Deadlock):
            dist.recv(torch.empty(1), peer)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2]
    work = dist.isend(torch.ones(1), peer)
    dist.recv(torch.empty(1), peer)
    work.wait()


def test_messages_go_on_after_a_deadlock() -> None:
    run_ranks(goes_on_afterwards, 2, timeout=30)


def goes_on_with_collectives() -> None:
    rank = dist.get_rank()
    if rank == 0:
        once_waiting({1: 0, 2: 0})
        with pytest.raises(dist.Deadlock, match="barrier"):
            dist.recv(torch.empty(1), 1)
    else:
        with pytest.raises(dist.Deadlock, match="recv"):
            dist.barrier()
        dist.send(torch.ones(1), 0, tag=1)
    # The barrier was given up: rank 0, which has yet to come to it, is told so.
    if rank == 0:
        for peer in (1, 2):
            dist.recv(torch.empty(1), peer, tag=1)
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [3, 3]


@both
def test_collectives_go_on_after_a_deadlock(ranks: str) -> None:
    run_ranks(goes_on_with_collectives, 3, ranks=ranks, timeout=30)


def _comes_late(how: str) -> list[float]:
    rank = dist.get_rank()
    if rank == 1:
        until = time.monotonic() + LATE
        if how == "sleeps":
            time.sleep(LATE)
        while time.monotonic() < until:
            pass
    tensor = torch.arange(3.0) + 10 * rank
    dist.all_reduce(tensor)
    if rank == 1:
        dist.send(tensor * 2, 0)
    if rank == 0:
        dist.recv(tensor, 1)
    return tensor.tolist()


@both
@pytest.mark.parametrize("how", ["computes", "sleeps"])
def test_a_rank_that_computes_is_waited_for(ranks: str, how: str) -> None:
    total = [30.0, 33.0, 36.0]
    results = run_ranks(_comes_late, 3, how, ranks=ranks, timeout=30)
    assert results == [[2 * each for each in total], total, total]


def _helper_acts() -> None:
    rank = dist.get_rank()

    def act() -> None:
        time.sleep(LATE)
        dist.send(torch.arange(LARGE) + rank, 1 - rank)

    helper = threading.Thread(target=act)
    helper.start()
    received = torch.zeros(LARGE, dtype=torch.int64)
    assert dist.recv(received, 1 - rank) == 1 - rank
    assert torch.equal(received, torch.arange(LARGE) + 1 - rank)
    helper.join()


@both
def test_a_rank_with_a_thread_that_may_act_is_waited_for(ranks: str) -> None:
    run_ranks(_helper_acts, 2, ranks=ranks, timeout=30)


def _pool_acts() -> None:
    rank = dist.get_rank()

    def act() -> None:
        time.sleep(LATE)
        dist.send(torch.tensor([7 + rank]), 1 - rank)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(act)
        received = torch.tensor([0])
        dist.recv(received, 1 - rank)
        assert received.item() == 8 - rank
        sent.result()


def test_a_rank_with_a_task_in_a_pool_is_waited_for() -> None:
    run_ranks(_pool_acts, 2, timeout=30)


def _others_complete_late() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    received, total = torch.zeros(LARGE), torch.arange(5.0) + 10 * rank
    works = []
    if rank == 1:
        works.append(dist.irecv(received, 0))
        works.append(dist.all_reduce(total, group=group, async_op=True))
    else:
        time.sleep(LATE)
        works.append(dist.all_reduce(total, group=group, async_op=True))
        works.append(dist.isend(torch.arange(float(LARGE)), 1))
    dist.barrier()
    for work in works:
        work.wait()
    assert total.tolist() == [10, 12, 14, 16, 18]
    assert rank == 0 or torch.equal(received, torch.arange(float(LARGE)))


@both
def test_pending_works_that_others_complete_late(ranks: str) -> None:
    run_ranks(_others_complete_late, 2, ranks=ranks, timeout=30)


def _works_move_by_themselves() -> None:
    """Both sleep in a wait that only the other's asynchronous operations can end."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 1:
        time.sleep(LATE)
    sent = dist.isend(torch.arange(LARGE) + rank, 1 - rank)
    totals = torch.tensor([1.0 + rank, 10.0 + rank])
    works = [
        dist.all_reduce(total, group=group, async_op=True)
        for total, group in zip(totals.split(1), (first, second), strict=True)
    ]
    received = torch.zeros(LARGE, dtype=torch.int64)
    dist.recv(received, 1 - rank)
    assert torch.equal(received, torch.arange(LARGE) + 1 - rank)
    for work in [*reversed(works), sent] if rank else [sent, *works]:
        work.wait()
    assert totals.tolist() == [3, 21]


def test_works_move_by_themselves() -> None:
    run_ranks(_works_move_by_themselves, 2, timeout=30)


def _spins() -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    until = time.monotonic() + LATE
    count, rounds, received = 0, torch.ones(1), torch.zeros(2)
    while rounds.item() > 0:
        count += 1
        end = time.monotonic() + 0.01 * (rank % 3)
        while time.monotonic() < end:
            pass
        rounds.fill_(float(time.monotonic() < until))
        dist.broadcast(rounds, 0)
        work = dist.isend(torch.tensor([float(rank), float(count)]), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert received.tolist() == [(rank - 1) % size, count]
        work.wait()
    return count


def test_a_loaded_machine_raises_no_alarm() -> None:
    counts = run_ranks(_spins, 8, timeout=60)
    assert len({*counts}) == 1  # all have gone the same number of rounds
    assert counts[0] > 1


def _has_patience() -> None:
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(dist.DistTimeout):
            dist.barrier(timeout=timedelta(seconds=LATE))
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
        with pytest.raises(dist.DistTimeout):
            dist.barrier()  # given up by rank 0
    with pytest.raises(dist.DistTimeout):
        dist.irecv(torch.empty(1), 1 - rank, tag=9).wait(timedelta(seconds=LATE))
    dist.barrier()


@both
def test_a_wait_with_a_timeout_of_its_own_is_no_deadlock(ranks: str) -> None:
    run_ranks(_has_patience, 2, ranks=ranks, timeout=30)


def test_waits_for_what_is_outside_the_world_are_no_deadlock() -> None:
    """A key of a store and an event, which somebody who is no rank will set."""
    event, stores = threading.Event(), []

    def outsider() -> None:
        while len(stores) < 1:
            time.sleep(0.01)
        time.sleep(LATE)
        stores[0].set("go", "now")
        time.sleep(LATE / 2)
        event.set()

    def body() -> None:
        rank = dist.get_rank()
        store = dist.group.WORLD.get_group_store()
        dist.barrier()
        if rank == 1:
            stores.append(store)
            store.wait(["go"], timedelta(seconds=20))
            dist.send(torch.ones(1), 0)
        elif rank == 2:
            assert event.wait(20)
            dist.barrier()
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        if rank < 2:
            dist.barrier()

    helper = threading.Thread(target=outsider)
    helper.start()
    run_ranks(body, 3, timeout=30)
    helper.join()


def _many_small_messages() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    for tag in range(300):
        dist.send(torch.full((3,), float(tag)), peer, tag=tag)
    if rank == 1:
        time.sleep(LATE)
    tensor = torch.empty(3)
    for tag in reversed(range(300)):
        dist.recv(tensor, peer, tag=tag)
        assert tensor.tolist() == [tag] * 3


def test_many_messages_on_their_way_are_no_deadlock() -> None:
    run_ranks(_many_small_messages, 2, timeout=30)


def _joins_a_waiting_thread() -> None:
    """The main thread waits in Python: nobody can know that it will not act."""
    rank = dist.get_rank()
    errors: list[Exception] = []

    def receive() -> None:
        try:
            dist.recv(torch.empty(1), 1 - rank)
        except Exception as error:
            errors.append(error)

    if rank == 0:
        helper = threading.Thread(target=receive)
        helper.start()
        helper.join()
    else:
        receive()
    assert isinstance(errors[0], dist.DistTimeout)
    dist.barrier()


def test_a_thread_that_waits_in_python_might_act() -> None:
    run_ranks(_joins_a_waiting_thread, 2, group_timeout=1.5, timeout=30)


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_random_programs_end_as_foretold(number: int) -> None:
    case = deadlock_case(0, number, "threads")
    trial = case.run()
    assert not trial.complaints, f"{case.replay}\n{trial}"


@pytest.mark.parametrize("number", range(1000, 1003))
def test_random_programs_of_processes_end_as_foretold(number: int) -> None:
    case = deadlock_case(0, number, "processes")
    trial = case.run()
    assert not trial.complaints, f"{case.replay}\n{trial}"
