"""An exception leaves every object that has state as it was, or says that it has ended.

Each case disturbs one object, on one rank only where that is possible: what is left behind on all
ranks alike would not show. Then all ranks do the same with unequal numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from words import listen, tell

import phalanx as dist
from phalanx import trace, world
from phalanx.debug.in_flight import of as flights_of
from phalanx.launch.outcomes import Killed
from phalanx.launch.pool import Pool
from phalanx.testing import faults, run_ranks
from phalanx.work import Deferral

SIZE = 3


def goes_on(group: Any = None) -> None:
    """Check that a group works, with sums, roots and messages that only one result is right for."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = torch.tensor([1.0, 10.0]) * (rank + 1)
    dist.all_reduce(total, group=group)
    times = size * (size + 1) / 2
    assert total.tolist() == [times, 10 * times]
    outputs = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([rank + 5.0]), group=group)
    assert torch.cat(outputs).tolist() == [other + 5.0 for other in range(size)]
    received = torch.zeros(1)
    sent = dist.isend(torch.tensor([rank + 0.5]), group=group, group_dst=(rank + 1) % size)
    dist.recv(received, group=group, group_src=(rank - 1) % size)
    sent.wait()
    assert received.item() == (rank - 1) % size + 0.5


class Enough(Exception):
    """What a program raises in the middle of something."""


# What is disturbed. Rank 0 is the one it happens to, where it happens to one.


def arguments_of_every_operation() -> None:
    if dist.get_rank() != 0:
        return
    one, wrong = torch.ones(1), "not a tensor"
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(wrong),
        lambda: dist.broadcast(wrong, 1),
        lambda: dist.broadcast(one, 7),
        lambda: dist.reduce(one, 7),
        lambda: dist.all_gather([one], one),
        lambda: dist.all_gather_into_tensor(one, one),
        lambda: dist.gather(one, [one]),
        lambda: dist.scatter(one, [one]),
        lambda: dist.reduce_scatter(one, [one]),
        lambda: dist.reduce_scatter_tensor(one, one),
        lambda: dist.all_to_all([one], [one]),
        lambda: dist.all_to_all_single(one, one),
        lambda: dist.all_reduce_coalesced([one, wrong]),
        lambda: dist.all_gather_coalesced([[one]], [one]),
        lambda: dist.barrier(timeout=-1),
        lambda: dist.monitored_barrier(timeout=-1),
        lambda: dist.send(one, 0),
        lambda: dist.isend(one, 1, tag=-1),
        lambda: dist.recv(wrong, 1),
        lambda: dist.batch_isend_irecv([wrong]),
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.scatter_object_list([None], [1]),
        lambda: dist.all_gather_object([None] * SIZE, threading.Lock()),  # has no pickle
        lambda: dist.broadcast_object_list([threading.Lock()], 0),
    ]
    for number, call in enumerate(calls):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call()
        assert dist.group.WORLD.sequence_number() == 0, f"call {number} has posted something"


def making_groups() -> None:
    count = dist.get_pg_count()
    if dist.get_rank() == 0:
        for call in (
            lambda: dist.new_group([0, 7]),
            lambda: dist.new_group([0, 0]),
            lambda: dist.new_group([0, 1], backend="unheard of"),
            lambda: dist.new_group([0, 1], timeout=-1),
            lambda: dist.split_group(split_ranks=[[0], [0, 1]]),
            lambda: dist.split_group(split_ranks=[[0, 1, 2]], backend="unheard of"),
            lambda: dist.split_group(split_ranks=[[0, 1, 2]], timeout=-1),
            lambda: dist.init_device_mesh("cpu", (SIZE, 7)),
            lambda: dist.init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("a", "a")),
            lambda: dist.new_subgroups(2),
            lambda: dist.init_process_group(),
        ):
            with pytest.raises((ValueError, RuntimeError)):
                call()
        assert dist.get_pg_count() == count
    # Groups are counted on each rank by itself: a rank that counted its errors would be ahead.
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        goes_on(pair)
    parts = dist.split_group(split_ranks=[[1], [0, 2]])
    goes_on(parts)
    mesh = dist.init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("one", "all"))
    goes_on(mesh["all"].get_group())
    assert mesh.get_local_rank("all") == dist.get_rank()


def coalescing_block() -> None:
    transport, tensor = dist.group.WORLD.transport, torch.tensor([4.0])
    if dist.get_rank() == 0:
        with suppress(Enough), dist._coalescing_manager(async_ops=True) as work:
            dist.all_reduce(tensor)
            raise Enough
        assert dist.group.WORLD.transport is transport
        assert not work.is_completed()
        with pytest.raises(ValueError, match="block"):
            work.wait()
    assert tensor.item() == 4  # nothing of the block was run
    with dist._coalescing_manager():  # and there may be another
        dist.all_reduce(tensor)
        dist.all_reduce(second := torch.tensor([dist.get_rank() + 1.0]))
    assert [tensor.item(), second.item()] == [12, 6]


def coalesced_call_that_is_refused() -> None:
    tensor = torch.tensor([4.0, 5.0])
    if dist.get_rank() == 0:
        backend = dist.group.WORLD.backend
        with pytest.raises((TypeError, AttributeError)):
            # The first call of a batch is refused: later ones are not part of it.
            backend.coalesce([("all_reduce", ("none", "none")), ("all_reduce", (tensor, "none"))])
    assert tensor.tolist() == [4, 5]


def coalesced_call_that_does_not_match() -> None:
    tensors = [torch.tensor([4.0, 5.0]), torch.ones(3 + (dist.get_rank() == 0))]
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce_coalesced(tensors[::-1])
    assert tensors[0].tolist() == [4, 5]
    assert tensors[1].unique().tolist() == [1]


def works_that_fail() -> None:
    count = 3 + (dist.get_rank() == 0)
    tensor = torch.full((count,), 2.0)
    failing = dist.all_reduce(tensor, async_op=True)
    after = dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0]), async_op=True)
    assert failing is not None
    assert after is not None
    for _ in range(2):  # each time the same
        with pytest.raises(dist.CollectiveMismatch) as caught:
            failing.wait()
        with pytest.raises(dist.CollectiveMismatch):
            failing.wait(timedelta(seconds=30))
    assert failing.is_completed()
    assert not failing.is_success()
    assert str(failing.exception()).split("\n")[0] == str(caught.value).split("\n")[0]
    with pytest.raises(RuntimeError, match="does not match"):
        failing.get_future().wait()
    assert tensor.unique().tolist() == [2]
    assert after.wait()  # the lane has gone on
    assert total.item() == 6
    assert after.is_success()


def wait_that_is_cut_short() -> None:
    received = torch.zeros(2)
    if dist.get_rank() == 0:
        work = dist.irecv(received, 2)
        with pytest.raises(dist.DistTimeout):
            work.wait(0.01)
        assert not work.is_completed()
        assert work.exception() is None
        tell("waited")
        work.wait()
        assert work.is_success()
        assert received.tolist() == [6, 7]
    elif dist.get_rank() == 2:
        listen("waited")
        dist.send(torch.tensor([6.0, 7.0]), 0)


def stores() -> None:
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 0:
        store.set_timeout(timedelta(seconds=30))
        for call in (
            lambda: store.wait(["nothing"], timedelta(milliseconds=10)),
            lambda: store.set("key", 3),
            lambda: store.add("text", 1),
        ):
            store.set("text", "no number")
            with pytest.raises((dist.DistStoreError, TypeError, ValueError)):
                call()
        assert store.get("text") == b"no number"
        assert store.timeout == timedelta(seconds=30)
        store.set("answer", "42")
    assert store.get("answer") == b"42"
    assert not store.check(["nothing"])


def injected_faults() -> None:
    transport = dist.group.WORLD.transport
    with suppress(Enough), faults(straggler=1, delay=0.001):
        assert (dist.group.WORLD.transport is not transport) == (dist.get_rank() == 1)
        goes_on()
        raise Enough
    assert dist.group.WORLD.transport is transport


def recorded_trace(tmp: str) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(Enough), trace.record(f"{tmp}/first"):
            raise Enough
        with pytest.raises(ValueError, match="start was not called"):
            trace.stop()  # it has been stopped
        with trace.record(f"{tmp}/second"):  # in another place
            pass


def _at_detail() -> None:
    group = dist.new_group()
    tensor = torch.ones(2 + (dist.get_rank() == 0))
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(tensor, group=group)
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert not flights_of(world.here())  # nobody believes that the tensor is still in use
    tensor.add_(1)
    goes_on(group)
    with pytest.raises(TypeError, match="loud"):
        dist.set_debug_level("loud")
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL


def bound_world() -> None:
    mine = world.current()
    with suppress(Enough), world.bind(world.Slot()):
        assert not dist.is_initialized()
        raise Enough
    assert world.current() is mine


def deferred_futures() -> None:
    deferral = Deferral()
    with pytest.raises(Enough), deferral.calling():
        raise Enough
    assert deferral.called_at is None
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert not isinstance(future, type(deferral.future(None)))  # not one of the deferral's
    assert future.wait()[0].item() == SIZE


CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (
        arguments_of_every_operation,
        making_groups,
        coalescing_block,
        coalesced_call_that_is_refused,
        coalesced_call_that_does_not_match,
        works_that_fail,
        wait_that_is_cut_short,
        stores,
        injected_faults,
        bound_world,
        deferred_futures,
    )
}


def _disturb(name: str) -> None:
    CASES[name]()
    dist.barrier()
    goes_on()


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_after(name: str) -> None:
    run_ranks(_disturb, SIZE, name)


def test_detail_goes_on_after_a_mismatch() -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # of all ranks in this process
    try:
        run_ranks(_at_detail, SIZE)
    finally:
        dist.set_debug_level(before)


def test_a_trace_ends_with_its_block(tmp_path: Any) -> None:
    def body() -> None:
        recorded_trace(str(tmp_path))
        goes_on()

    run_ranks(body, SIZE)


def _end_a_world(how: str) -> None:
    if dist.get_rank() == 1:
        raise Killed if how == "killed" else Enough
    dist.barrier()


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_next_world_knows_nothing_of_one_that_failed(how: str) -> None:
    results = run_ranks(_end_a_world, SIZE, how, return_exceptions=True)
    assert isinstance(results[0], dist.PeerFailed)
    run_ranks(goes_on, SIZE)


def _fails_on(rank: int) -> float:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    if dist.get_rank() == rank:
        raise Enough
    dist.all_reduce(total)
    return total.item()


def test_a_pool_goes_on_after_a_job_that_failed() -> None:
    with Pool() as pool:
        with pytest.raises(Enough):
            pool.run(_fails_on, 2, 1)
        assert pool.run(_fails_on, 2, 7) == [6, 6]


# Which of two failures came first


def _two_fail(first: int) -> str:
    """Rank `first` fails, then the other one, and only then rank 0 looks."""
    rank = dist.get_rank()
    if rank == 0:
        listen("failed", 2)
        with pytest.raises(dist.PeerFailed) as caught:
            dist.all_reduce(torch.ones(2))
        return str(caught.value)
    if rank != first:
        listen("failed", 1)
    store = dist.group.WORLD.get_group_store()
    world.current_slot().fail(f"was number {store.add('failed', 0) + 1} to fail")
    store.add("failed", 1)
    return ""


@pytest.mark.parametrize("first", [1, 2])
def test_the_first_of_two_failures_is_told(first: int) -> None:
    told = run_ranks(_two_fail, 3, first)[0]
    assert f"rank {first} was number 1 to fail" in told
    assert "was number 2 to fail" not in told


def _two_raise(first: int) -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # fails with the first of them, which is no news
    store = dist.group.WORLD.get_group_store()
    if rank == first:
        store.add("failing", 1)
        raise KeyError("the first")
    listen("failing", 1)
    with pytest.raises(dist.PeerFailed):
        dist.all_reduce(torch.ones(2))
    raise ValueError("the second")


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_launcher_raises_the_first_of_two_failures(first: int, ranks: str) -> None:
    with pytest.raises(KeyError, match="the first") as caught:
        run_ranks(_two_raise, 3, first, ranks=ranks)
    assert f"rank {first}" in "".join(getattr(caught.value, "__notes__", []))
