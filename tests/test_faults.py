"""Faults on purpose: what the ranks concerned and their peers see of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed
from outside_worlds import once_waiting
from torch_ranks import run_torch

import phalanx as dist
from phalanx.launch.outcomes import Killed
from phalanx.testing import faults, injection, run_ranks
from phalanx.testing.handle import WorldHandle
from phalanx.testing.injection import Injected

KINDS = ("threads", "processes")


def count_to(number: int) -> float:
    x = torch.ones(1)
    for _ in range(number):
        dist.all_reduce(x)
    return x.item()


def outcome_of(fn: Any, *args: Any) -> str:
    """Return what went wrong in a call, as text."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", []))
    return "nothing"


def survive_a_kill() -> tuple[str, int]:
    with faults(kill=2, at="all_reduce#3"):
        told = outcome_of(count_to, 5)
    return told, dist.group.WORLD.sequence_number()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_looks_dead_to_the_others(kind: Any) -> None:
    results = run_ranks(survive_a_kill, 3, ranks=kind)
    assert results[2] is None
    for told, _ in results[:2]:
        assert told.startswith("PeerFailed: all_reduce #3 on group 'world'")
        assert "rank 2 " in told
        assert "was killed by faults(kill=2, at='all_reduce#3')" in told
        assert "test_faults.py" in told
        assert "in count_to" in told


def test_the_end_of_a_thread_names_the_fault_and_the_line() -> None:
    told, _ = run_ranks(survive_a_kill, 3)[0]
    assert "faults(kill=2, at='all_reduce#3') before all_reduce on group 'world'" in told
    line = count_to.__code__.co_firstlineno + 3
    assert f"on group 'world' at test_faults.py:{line} in count_to" in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_is_the_result_where_exceptions_are_wanted(kind: Any) -> None:
    *_, killed = run_ranks(survive_a_kill, 3, ranks=kind, return_exceptions=True)
    assert isinstance(killed, Killed)
    assert "faults(kill=2" in str(killed)


def test_peers_that_do_not_expect_a_kill_fail() -> None:
    def body() -> None:
        with faults(kill=0, at="barrier"):
            dist.barrier()

    with pytest.raises(dist.PeerFailed, match="rank 0 was killed by faults") as caught:
        run_ranks(body, 2)
    assert "under faults(kill=0, at='barrier')" in "".join(caught.value.__notes__)


def test_a_killed_thread_communicates_no_more_on_its_way_out() -> None:
    seen = []

    def body() -> None:
        try:
            with faults(kill=1):
                try:
                    dist.barrier()
                finally:
                    if dist.get_rank() == 1:
                        with pytest.raises(Killed):
                            dist.send(torch.ones(1), 0)
                        seen.append("inside")
        finally:
            if dist.get_rank() == 1:
                with pytest.raises(Killed):
                    dist.barrier()
                seen.append("outside")

    with pytest.raises(dist.PeerFailed):
        run_ranks(body, 2)
    assert seen == ["inside", "outside"]


def catch_a_kill(then: str) -> str:
    with faults(kill=1, at="barrier"):
        try:
            dist.barrier()
        except BaseException as error:
            if then == "raise":
                raise OSError("on the way out") from error
            return type(error).__name__


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_rank_does_afterwards_counts_for_nothing(kind: Any) -> None:
    assert run_ranks(catch_a_kill, 2, "return", ranks=kind) == ["PeerFailed", None]
    _, killed = run_ranks(catch_a_kill, 2, "raise", ranks=kind, return_exceptions=True)
    assert isinstance(killed, Killed)


def fail_beside_a_fault(number: int) -> None:
    with faults(raises=1, at=f"barrier#{number}"):
        dist.barrier() if dist.get_rank() == 0 else outcome_of(dist.barrier)
        if dist.get_rank() == 0:
            raise OSError("another matter")


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_beside_a_fault_says_whether_that_had_come_to_pass(kind: Any) -> None:
    def notes(number: int) -> str:
        outcomes = run_ranks(fail_beside_a_fault, 2, number, ranks=kind, return_exceptions=True)
        return "".join(outcomes[0].__notes__)

    assert "under faults(raises=1, at='barrier#2'), which had not come to pass" in notes(2)
    assert "come to pass" not in notes(1)


def lose_a_rank() -> tuple[str, bool]:
    dist.barrier()
    dist.group.WORLD.set_timeout(1)
    told = ""
    with faults(drop=1, at="all_reduce#2"):
        told = outcome_of(count_to, 3)
    return told, dist.get_rank() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_rank_hangs_until_the_others_have_left(kind: Any) -> None:
    results = run_ranks(lose_a_rank, 3, ranks=kind)
    assert results[1] == ("", True)
    for told, _ in (results[0], results[2]):
        assert told.startswith("DistTimeout: all_reduce #3")
        assert "rank 1" in told


def test_a_dropped_rank_does_not_outlive_the_others() -> None:
    def body() -> None:
        dist.barrier()
        dist.group.WORLD.set_timeout(0.3)
        with faults(drop=1):
            dist.barrier()

    with pytest.raises(dist.DistTimeout, match="rank 1"):
        run_ranks(body, 3)


@pytest.mark.parametrize("error", [None, KeyError, OSError("disk")])
def test_a_rank_can_raise(error: Any) -> None:
    def body() -> str:
        with faults(raises=1, at="#2", error=error):
            return outcome_of(count_to, 2)

    first, second = run_ranks(body, 2, return_exceptions=True)
    if isinstance(error, OSError):
        error.__traceback__ = None  # which would keep the world for as long as pytest keeps this
    assert second.startswith({None: "Injected", KeyError: "KeyError"}.get(error, "OSError: disk"))
    assert issubclass(Injected, RuntimeError)
    assert first.startswith("PeerFailed")


def count_in_faults(given: dict[str, Any]) -> None:
    with faults(**given):
        count_to(2)
        dist.barrier()


@pytest.mark.parametrize(
    ("given", "late"),
    [
        ({"delay": 0.5, "rank": 1, "at": "all_reduce"}, [(1, 0.5)] * 2),
        ({"delay": 0.5, "ranks": [0, 2], "at": "all_reduce#2"}, [(0, 0.5), (2, 0.5)]),
        ({"delay": 0.5, "at": "barrier"}, [(0, 0.5), (1, 0.5), (2, 0.5)]),
        ({"straggler": 1, "delay": 0.5}, [(1, 0.5)] * 3),
        ({"straggler": 2}, [(2, 0.05)] * 3),
    ],
)
def test_ranks_come_late(given: Any, late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[tuple[int, float]] = []
    monkeypatch.setattr(
        injection, "_sleep", lambda seconds: slept.append((dist.get_rank(), seconds))
    )
    run_ranks(count_in_faults, 3, given)
    assert sorted(slept) == late


def sum_with_a_late_rank() -> list[float]:
    tensor = torch.tensor([1.0, 10.0]) * (dist.get_rank() + 1)
    with faults(straggler=1, delay=0.05):
        dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = []

    def sleep(seconds: float) -> None:
        once_waiting({0: 1, 2: 1})  # the others are in the operation, and this one is not
        late.append((dist.get_rank(), seconds))

    monkeypatch.setattr(injection, "_sleep", sleep)
    assert run_ranks(sum_with_a_late_rank, 3) == [[6, 60]] * 3
    assert late == [(1, 0.05)]


def decisions(seed: int | None) -> tuple[list[float], str]:
    with faults(reorder=True, seed=seed) as block:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        polls = 0
        while not work.is_completed():
            polls += 1
            time.sleep(0)
        work.wait()
        dist.barrier()
        return [block._random.random(), polls], repr(block)


def test_reordering_is_replayed_by_its_seed() -> None:
    first, second = run_ranks(decisions, 3, 7), run_ranks(decisions, 3, 7)
    other = run_ranks(decisions, 3, 8)
    draws = [[draws[0] for draws, _ in run] for run in (first, second, other)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) == 3
    assert first[0][1] == "faults(reorder=True, seed=7)"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_on_a_seed_that_nobody_gave(kind: Any) -> None:
    blocks = {block for _, block in run_ranks(decisions, 2, None, ranks=kind)}
    assert len(blocks) == 1


def fail_later(inside: bool) -> None:
    with faults(reorder=True, seed=1234):
        dist.barrier()
        assert not inside or dist.get_rank() != 1, "wrong"
    assert dist.get_rank() != 1, "wrong"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [True, False])
def test_a_failure_tells_the_seed(kind: Any, inside: bool) -> None:
    with pytest.raises(AssertionError, match="wrong") as caught:
        run_ranks(fail_later, 2, inside, ranks=kind)
    assert caught.value.__notes__.count("under faults(reorder=True, seed=1234)") == 1


def hit_number(fn: Any, **given: Any) -> str:
    """Return what rank 0 is told as it raises."""

    def body() -> str:
        with faults(raises=0, **given):
            return outcome_of(fn)

    return str(run_ranks(body, 2, return_exceptions=True)[0])


def objects() -> None:
    for _ in range(2):
        dist.all_gather_object([None] * 2, "x")
    dist.broadcast_object_list(["x"])


def messages() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    peer = 1 - dist.get_rank()
    for _ in range(2):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
        )
        for work in works:
            work.wait()


def coalesced() -> None:
    dist.all_reduce_coalesced([torch.ones(1), torch.ones(2)])
    dist.all_reduce(torch.ones(1))


def gathered() -> None:
    dist.all_gather_into_tensor(torch.ones(2), torch.ones(1))


@pytest.mark.parametrize(
    ("fn", "at", "title"),
    [
        (objects, "all_gather_object#2", "all_gather_object"),
        (objects, "broadcast_object_list", "broadcast_object_list"),
        (objects, "#3", "broadcast_object_list"),
        (messages, "send#2", "batch_isend_irecv"),
        (messages, "irecv#2", "batch_isend_irecv"),
        (messages, "batch_isend_irecv#2", "batch_isend_irecv"),
        (coalesced, "all_reduce#2", "all_reduce on"),
        (coalesced, "all_reduce_coalesced", "all_reduce_coalesced"),
        (gathered, "all_gather_into_tensor@world", "all_gather_single"),
        (gathered, "all_gather_single", "all_gather_single"),
    ],
)
def test_operations_are_counted_as_programs_name_them(fn: Any, at: str, title: str) -> None:
    told = hit_number(fn, at=at)
    assert told.startswith(f"Injected: faults(raises=0, at={at!r}) before {title}")
    assert f"in {fn.__name__}" in told


def test_objects_do_not_count_as_what_they_are_sent_by() -> None:
    def body() -> None:
        with faults(raises=0, at="all_gather"):
            objects()

    with pytest.raises(AssertionError, match="rank 0 made no all_gather calls"):
        run_ranks(body, 2)


def train() -> None:
    model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


def test_the_buckets_of_ddp_count() -> None:
    assert hit_number(train, at="all_reduce#3").startswith("Injected")


def torch_objects() -> None:
    for _ in range(3):
        torch.distributed.all_gather_object([None] * 2, "x")


def train_with_torch() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


def survive_in_torch() -> tuple[str, str]:
    with faults(raises=[0, 1], at="monitored_barrier"):
        told = outcome_of(torch.distributed.monitored_barrier)
    with faults(kill=1, at="all_reduce#2"):
        return told, outcome_of(train_with_torch)


def test_programs_of_torch_have_faults() -> None:
    survivor, killed = run_torch(survive_in_torch, 2)
    assert killed is None
    assert survivor[0].startswith("Injected")
    assert "PeerFailed" in survivor[1]
    assert "rank 1" in survivor[1]
    assert "was killed by faults(kill=1, at='all_reduce#2')" in survivor[1]


def count_objects_of_torch() -> str:
    with faults(raises=[0, 1], at="all_gather_object#2"):
        return outcome_of(torch_objects)


def test_functions_of_torch_are_counted_as_programs_name_them() -> None:
    for told in run_torch(count_objects_of_torch, 2):
        assert told.startswith("Injected")
        assert "before all_gather_object on group 'world'" in told
        assert "in torch_objects" in told


def test_a_group_can_be_chosen() -> None:
    def body() -> list[str]:
        named = dist.new_group(group_desc="pair")
        with faults(raises=1, at="all_reduce@pair"):
            before = outcome_of(count_to, 2)
            return [before, outcome_of(dist.all_reduce, torch.ones(1), dist.ReduceOp.SUM, named)]

    first, second = run_ranks(body, 2)[1]
    assert first == "nothing"
    assert second.startswith("Injected")


def test_groups_that_are_made_in_the_block_have_the_fault() -> None:
    def body() -> str:
        with faults(raises=0, at="barrier"):
            return outcome_of(dist.barrier, dist.new_group())

    assert run_ranks(body, 2)[0].startswith("Injected")


def test_blocks_can_be_nested() -> None:
    def body() -> list[str]:
        with faults(raises=0, at="barrier"), faults(raises=0, at="all_reduce#2", error=KeyError):
            told = [outcome_of(count_to, 2), outcome_of(dist.barrier)]
        return [*told, type(dist.group.WORLD.transport).__name__]

    *told, below = run_ranks(body, 1)[0]
    assert [text.partition(":")[0] for text in told] == ["KeyError", "Injected"]
    assert below == "LocalBackend"


def test_a_fault_that_does_not_come_to_pass_is_an_error() -> None:
    def body(strict: bool) -> None:
        with faults(kill=1, at="all_reduce#17", strict=strict):
            count_to(3)

    run_ranks(body, 2, False)
    with pytest.raises(AssertionError, match="rank 1 made 3 all_reduce calls") as caught:
        run_ranks(body, 2, True)
    assert "faults(kill=1, at='all_reduce#17') did not come to pass" in str(caught.value)
    assert "raised by rank 1 of 2" in caught.value.__notes__


def test_operations_of_a_rank_s_threads_count() -> None:
    def body() -> list[str]:
        told: list[str] = []
        with faults(raises=0, at="barrier"):
            thread = threading.Thread(target=lambda: told.append(outcome_of(dist.barrier)))
            thread.start()
            thread.join()
        return told

    assert run_ranks(body, 1)[0][0].startswith("Injected")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs one of kill, drop"),
        ({"kill": 0, "drop": 1}, "got kill and drop"),
        ({"kill": 2}, "there is no rank 2 in a world of 2"),
        ({"kill": True}, "there is no rank True"),
        ({"kill": []}, "concerns no rank"),
        ({"kill": 0, "at": "allreduce#1"}, r"unknown operation .*known: .*all_reduce, "),
        ({"kill": 0, "at": "all_reduce#0"}, "cannot read at='all_reduce#0'"),
        ({"kill": 0, "at": ""}, "cannot read at=''"),
        ({"kill": 0, "at": "all reduce"}, "cannot read"),
        ({"kill": 0, "delay": 1}, "no use for delay"),
        ({"reorder": True, "at": "barrier"}, "no use for at"),
        ({"delay": -1}, "at least 0"),
        ({"delay": float("nan")}, "at least 0, got nan"),
        ({"delay": float("inf")}, "at least 0, got inf"),
        ({"delay": True}, "at least 0, got True"),
        ({"kill": 1.0}, "there is no rank 1.0"),
        ({"raises": 0, "error": "disk full"}, "must be an exception .* got 'disk full'"),
        ({"raises": 0, "error": int}, "must be an exception .* got <class 'int'>"),
        ({"reorder": True, "seed": "a"}, "seed must be an integer, got 'a'"),
        ({"reorder": 1}, "reorder must be True or False, got 1"),
        ({"delay": 1, "rank": 0, "ranks": [1]}, "not both"),
    ],
)
def test_wrong_arguments_are_told_at_once(given: Any, match: str) -> None:
    def body() -> None:
        with faults(**given):
            raise KeyError("the block was entered")

    with pytest.raises(ValueError, match=match):
        run_ranks(body, 2)


def test_a_block_is_entered_once() -> None:
    block = faults(delay=0)

    def body() -> None:
        with block:
            dist.barrier()

    with pytest.raises(ValueError, match="every rank makes its own"):
        run_ranks(body, 2)


def test_a_world_has_faults() -> None:
    def body() -> str:
        world = WorldHandle(dist.get_rank(), dist.get_world_size())
        with world.faults(raises=0):
            return outcome_of(dist.barrier)

    assert run_ranks(body, 1)[0].startswith("Injected: faults(raises=0) before barrier")


def test_faults_outside_of_a_world_are_refused() -> None:
    with pytest.raises(ValueError, match="has not been initialized"), faults(kill=0):
        pass
