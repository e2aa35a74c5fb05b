"""A wait has an end: its message says who is missing and why, and the group lives on."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from calls import COLLECTIVES, SPELLED, Call, everybody_goes_on
from outside_worlds import once_waiting
from words import listen, tell

import phalanx as dist
from phalanx.testing import run_ranks

RANKS = pytest.mark.parametrize("ranks", ["threads", "processes"])
LATE = 2  # the rank that does not come in time
SHORT, LONG = 0.3, 60.0
LARGE = 1_000_000  # elements; nobody sends so much into the blue


def timed_out(call: Any, *args: Any, **options: Any) -> str:
    """Call, run out of time, return what was said."""
    with pytest.raises(dist.DistTimeout) as caught:
        call(*args, **options)
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value)


def set_timeout(seconds: float, group: Any = None) -> None:
    (group or dist.group.WORLD).set_timeout(seconds)


# Which timeout holds


def _one_is_late(name: str, where: str) -> str:
    """Try a collective that the late rank joins after all have given it up."""
    group = dist.new_group([1, 2, 3]) if where == "subgroup" else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    members = dist.get_world_size(group)
    everybody_goes_on(group)
    call = Call(name, group)
    if dist.get_rank() == LATE:
        listen("given up", members - 1)
        text = timed_out(call.run)
    else:
        set_timeout(SHORT, group)
        text = timed_out(call.run)
        set_timeout(LONG, group)
        tell("given up")
    assert call.untouched()
    everybody_goes_on(group)

    return text


@pytest.mark.parametrize("where", ["world", "subgroup"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective(name: str, where: str) -> None:
    told = run_ranks(_one_is_late, 4, name, where, group_timeout=LONG)
    for rank, text in enumerate(told):
        if text:
            assert f"{SPELLED.get(name, name)} #2" in text
            assert f"rank {LATE}" in text
            assert "calls.py:" in text
            if rank == LATE:  # who has given up
                assert any(f"rank {other}" in text for other in range(4) if other != LATE)
                assert "timed out" in text
    assert any(f"{SHORT:g} s" in text for text in told)
    assert sum(map(bool, told)) == (3 if where == "subgroup" else 4)


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "barrier"])
def test_every_collective_among_processes(name: str) -> None:
    told = run_ranks(_one_is_late, 3, name, "world", ranks="processes", group_timeout=LONG)
    assert all(f"rank {LATE}" in text for text in told)


def _a_call_has_its_own(name: str) -> str:
    """One rank has no patience in this call, though the group's has much."""
    backend = dist.group.WORLD.backend
    tensor = torch.ones(2)
    if dist.get_rank() == 0:
        call = {
            "all_reduce": lambda: backend.all_reduce(tensor, dist.ReduceOp.SUM, timeout=SHORT),
            "broadcast": lambda: backend.broadcast(tensor, 0, timeout=SHORT),
            "barrier": lambda: dist.barrier(timeout=SHORT),
            "barrier, timedelta": lambda: dist.barrier(timeout=timedelta(seconds=SHORT)),
            "recv": lambda: backend.recv(tensor, 1, timeout=SHORT),
            "recv from anybody": lambda: backend.recv(tensor, None, timeout=SHORT),
            "send": lambda: backend.send(torch.ones(LARGE), 1, timeout=SHORT),
        }[name]
        text = timed_out(call)
        tell("given up")
        return text
    listen("given up", 1)
    return ""


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "broadcast",
        "barrier",
        "barrier, timedelta",
        "recv",
        "recv from anybody",
        "send",
    ],
)
def test_a_calls_own_timeout_comes_first(name: str) -> None:
    told = run_ranks(_a_call_has_its_own, 2, name, group_timeout=LONG)[0]
    assert f"{SHORT:g} s" in told
    assert name.split()[0].rstrip(",") in told
    assert "rank 1" in told or name == "recv from anybody"
    assert "test_timeouts.py:" in told


def _patient_and_impatient() -> str:
    if dist.get_rank() == LATE:
        listen("given up", 2)
        return ""
    limit = SHORT if dist.get_rank() == 0 else None
    text = timed_out(dist.barrier, timeout=limit)
    tell("given up")
    return text


@RANKS
def test_the_least_patient_rank_ends_the_wait_of_all(ranks: Any) -> None:
    told = run_ranks(_patient_and_impatient, 3, ranks=ranks, group_timeout=LONG)
    assert f"{SHORT:g} s" in told[0]
    assert "rank 0" in told[1]
    assert "timed out" in told[1]
    assert f"rank {LATE}" in told[1]


def _defaults() -> tuple[float, float, float, float]:
    usual = dist.new_group()
    own = dist.new_group(timeout=7)
    changed = dist.new_group(timeout=timedelta(seconds=8))
    changed.set_timeout(timedelta(seconds=9))
    groups = (dist.group.WORLD, usual, own, changed)
    return tuple(group.backend.timeout for group in groups)  # type: ignore[return-value]


def test_groups_have_the_timeout_they_were_given_or_the_default() -> None:
    default = dist.default_pg_timeout.total_seconds()
    assert run_ranks(_defaults, 2) == [(default, default, 7, 9)] * 2
    assert run_ranks(_defaults, 2, group_timeout=5)[0][:2] == (5, default)


# What the message says


def _various_places() -> str:
    rank = dist.get_rank()
    pair = dist.new_group([2, 3])
    dist.all_reduce(torch.ones(5))
    if rank == 0:
        once_waiting({1: 0, 2: 3})
        text = timed_out(dist.barrier, timeout=SHORT)
        tell("given up", 2)
        return text
    if rank == 1:
        return timed_out(dist.barrier)
    if rank == 2:
        dist.recv(torch.empty(1), 3, group=pair)
    else:
        listen("given up", 1)
        dist.send(torch.empty(1), 2, group=pair)
    return ""


@RANKS
def test_the_absent_are_named_with_what_they_do(ranks: Any) -> None:
    told = run_ranks(_various_places, 4, ranks=ranks)[0]
    assert "barrier #2" in told
    lines = told.splitlines()
    assert any("ranks 2, 3" in line for line in lines)  # the absent
    assert any("ranks 0, 1" in line for line in lines)  # who is here
    [waiting] = [line for line in lines if "recv(" in line or "recv from" in line]
    assert "rank 2" in waiting
    assert "rank 3" in waiting.replace("rank 2", "", 1)
    assert "test_timeouts.py:" in waiting
    assert "_various_places" in waiting
    [busy] = [line for line in lines if line.strip().startswith("rank 3")]
    assert "all_reduce" in busy
    assert "#1" in busy
    assert "test_timeouts.py:" in busy


def _not_even_once() -> str:
    if dist.get_rank() == 1:
        listen("given up", 1)
        return ""
    text = timed_out(dist.barrier, timeout=SHORT)
    tell("given up")
    return text


def test_a_rank_that_has_done_nothing_is_said_to() -> None:
    told = run_ranks(_not_even_once, 2)[0]
    assert "barrier #1" in told
    assert "rank 1" in told


# What is left afterwards


def _late_with_something_else() -> str:
    if dist.get_rank() == 0:
        text = timed_out(dist.barrier, timeout=SHORT)
        tell("given up")
    else:
        listen("given up", 1)
        text = timed_out(dist.all_reduce, torch.ones(3))
    everybody_goes_on()
    return text


def test_a_late_comer_with_another_operation_is_told_the_same() -> None:
    told = run_ranks(_late_with_something_else, 2)
    assert all("barrier #1" in text and "rank 0" in text for text in told)


def _again_and_again() -> None:
    for number in range(1, 5):
        if dist.get_rank() == number % 3:
            listen("given up", 2 * number)
            assert f"barrier #{number}" in timed_out(dist.barrier)
        else:
            text = timed_out(dist.barrier, timeout=0.1)
            assert f"barrier #{number} " in text
            assert f"rank {number % 3}" in text
            tell("given up")
    everybody_goes_on()


@RANKS
def test_many_timeouts_in_a_row(ranks: Any) -> None:
    run_ranks(_again_and_again, 3, ranks=ranks)


def _large_and_late(count: int) -> None:
    """Have what was offered for one operation not be taken for the next."""
    rank = dist.get_rank()
    lost = torch.full((count,), 100.0)
    if rank == 0:
        backend = dist.group.WORLD.backend
        timed_out(backend.all_reduce, lost, dist.ReduceOp.SUM, timeout=SHORT)
        assert (lost == 100).all()
        lost.fill_(-1)
        tell("given up")
    else:
        listen("given up", 1)
        timed_out(dist.all_reduce, lost)
        assert (lost == 100).all()
    total = torch.full((count,), float(rank + 1))
    dist.all_reduce(total)
    assert (total == 3).all()
    outputs = [torch.empty(count) for _ in range(2)]
    dist.all_gather(outputs, torch.full((count,), float(rank)))
    assert (outputs[0] == 0).all()
    assert (outputs[1] == 1).all()


@RANKS
@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_nothing_of_a_given_up_operation_reaches_the_next(count: int, ranks: Any) -> None:
    run_ranks(_large_and_late, 2, count, ranks=ranks)


def _other_groups() -> None:
    rank = dist.get_rank()
    pair, all_again = dist.new_group([0, 1]), dist.new_group()
    if rank == LATE:
        listen("given up", 2)
        timed_out(dist.barrier)
    else:
        timed_out(dist.barrier, timeout=SHORT)
        everybody_goes_on(pair)
        tell("given up")
        everybody_goes_on(pair)
    everybody_goes_on(all_again)
    everybody_goes_on()


def test_other_groups_are_not_affected() -> None:
    run_ranks(_other_groups, 3)


# Messages


def _receives_in_vain() -> None:
    rank, backend = dist.get_rank(), dist.group.WORLD.backend
    tensor = torch.zeros(3)
    if rank == 0:
        text = timed_out(backend.recv, tensor, 1, 7, timeout=SHORT)
        assert "rank 1" in text
        assert "tag" in text
        assert "7" in text
        assert (tensor == 0).all()
        tell("given up")
        dist.recv(tensor, 1, tag=7)
        assert (tensor == 1).all()
    else:
        listen("given up", 1)
        dist.send(torch.ones(3), 0, tag=7)
    everybody_goes_on()


def test_a_message_can_be_received_after_a_timeout() -> None:
    run_ranks(_receives_in_vain, 2)


def _sends_in_vain() -> None:
    rank, backend = dist.get_rank(), dist.group.WORLD.backend
    if rank == 0:
        text = timed_out(backend.send, torch.full((LARGE,), 5.0), 1, timeout=SHORT)
        assert "send" in text
        assert "rank 1" in text
        tell("given up")
        dist.send(torch.full((LARGE,), 6.0), 1)
    else:
        listen("given up", 1)
        tensor = torch.zeros(LARGE)
        dist.recv(tensor, 0)
        assert (tensor == 6).all()  # what was given up is gone
    everybody_goes_on()


@RANKS
def test_a_message_can_be_sent_after_a_timeout(ranks: Any) -> None:
    run_ranks(_sends_in_vain, 2, ranks=ranks)


def _full_mailbox() -> None:
    """Small messages are taken without a receiver until there is no room for more."""
    rank, backend = dist.get_rank(), dist.group.WORLD.backend
    if rank == 0:
        sent = 0
        with contextlib.suppress(dist.DistTimeout):
            while sent < 10_000:
                backend.send(torch.tensor([sent]), 1, timeout=SHORT)
                sent += 1
        assert 0 < sent < 10_000
        dist.broadcast(torch.tensor([sent]), 0)
    else:
        count, number = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        dist.broadcast(count, 0)
        for expected in range(int(count)):
            dist.recv(number, 0)
            assert number.item() == expected
    everybody_goes_on()


@RANKS
def test_what_was_sent_before_a_timeout_arrives(ranks: Any) -> None:
    run_ranks(_full_mailbox, 2, ranks=ranks)


# Asynchronous operations


def _waits_twice() -> None:
    if dist.get_rank() == 0:
        tensor = torch.ones(2)
        works = [
            dist.all_reduce(tensor, async_op=True),
            dist.irecv(torch.empty(1), 1),
            dist.isend(torch.empty(LARGE), 1),
        ]
        for work in works:
            text = timed_out(work.wait, 0.05)
            assert re.search(r"wait of \d+\.\d+ s", text)
            assert not work.is_completed()
        tell("waited")
        for work in works:
            assert work.wait(timedelta(seconds=LONG))
        assert (tensor == 2).all()
    else:
        listen("waited", 1)
        dist.all_reduce(torch.ones(2))
        dist.send(torch.empty(1), 0)
        dist.recv(torch.empty(LARGE), 0)
    everybody_goes_on()


def test_a_wait_can_be_bounded_without_ending_the_operation() -> None:
    run_ranks(_waits_twice, 2)


def _asynchronous_deadline() -> None:
    rank = dist.get_rank()
    if rank == 0:
        set_timeout(SHORT)
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        receive = dist.irecv(torch.empty(1), 1)
        for number, work in enumerate(works, 1):
            text = timed_out(work.wait)
            assert f"all_reduce #{number} " in text
            assert "rank 1" in text
            assert "test_timeouts.py:" in text
            assert isinstance(work.exception(), dist.DistTimeout)
        assert "rank 1" in timed_out(receive.wait)
        set_timeout(LONG)
        tell("given up")
    else:
        listen("given up", 1)
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        for work in works:
            assert "rank 0" in timed_out(work.wait)
    everybody_goes_on()


@RANKS
def test_an_asynchronous_operation_has_a_deadline(ranks: Any) -> None:
    run_ranks(_asynchronous_deadline, 2, ranks=ranks)


# Making groups


def _makes_a_group(first: int) -> str:
    """The rank that makes the board, or another, comes too late."""
    rank = dist.get_rank()
    text = ""
    if rank == first:
        listen("given up", 1)
    else:
        text = timed_out(dist.new_group, [0, 1], timeout=SHORT)
        tell("given up")
    dist.barrier()  # the world is as it was
    return text


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_that_some_do_not_make(late: int) -> None:
    told = run_ranks(_makes_a_group, 2, late)[1 - late]
    assert f"rank {late}" in told
    assert "group" in told
    assert f"{SHORT:g} s" in told


def _makes_the_next_group() -> None:
    if dist.get_rank() == 0:
        timed_out(dist.new_group, [0, 1], timeout=SHORT)
        tell("given up")
    else:
        listen("given up", 1)
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.new_group([0, 1], timeout=LONG)
    everybody_goes_on(dist.new_group([0, 1]))


@RANKS
def test_the_next_group_can_be_made(ranks: Any) -> None:
    run_ranks(_makes_the_next_group, 2, ranks=ranks)
