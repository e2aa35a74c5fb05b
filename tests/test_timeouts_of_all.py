"""Every operation of the package has an end: with the group's timeout, and with its own.

Rank 0 calls alone; rank 1 comes to the same collectives when all of them have been given up, is
told so, and then both go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from calls import everybody_goes_on
from torch.distributed import distributed_c10d as c10d
from torch_ranks import run_torch
from words import listen, tell

import phalanx as dist
from phalanx import functional
from phalanx.testing import run_ranks

SHORT, LONG = 0.02, 60.0
LARGE = 1_000_000  # elements; nobody sends so much into the blue


def full(count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(dist.get_rank() + 1))


def several() -> list[torch.Tensor]:
    return [full(), full()]


def collected(asynchronous: bool) -> Any:
    with dist._coalescing_manager(async_ops=asynchronous) as work:
        dist.all_reduce(full())
        dist.reduce_scatter_tensor(full(), full(6))
        dist.all_gather_into_tensor(full(6), full())
    return work if asynchronous else None


# In a form that rank 0 cannot end alone. Each is called with `async_op`, and returns a work or a
# future if that is true. What a message calls them, where that is not their name:
CALLED = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_coalesced": "all_gather",
    "a coalescing block": "all_reduce",
    "all_reduce of sparse tensors": "all_gather",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",
    "isend": "send",
    "irecv": "recv",
    "recv_object_list": "recv",
    "batch_isend_irecv": "recv",
}
COLLECTIVES: dict[str, Callable[[bool], Any]] = {
    "broadcast": lambda a: dist.broadcast(full(), 1, async_op=a),
    "all_reduce": lambda a: dist.all_reduce(full(), async_op=a),
    "all_reduce of sparse tensors": lambda a: dist.all_reduce(full().to_sparse(), async_op=a),
    "reduce": lambda a: dist.reduce(full(), 0, async_op=a),
    "all_gather": lambda a: dist.all_gather(several(), full(), async_op=a),
    "all_gather_single": lambda a: dist.all_gather_single(full(6), full(), async_op=a),
    "gather": lambda a: dist.gather(full(), several() if on_0() else None, async_op=a),
    "scatter": lambda a: dist.scatter(full(), None if on_0() else several(), 1, async_op=a),
    "reduce_scatter": lambda a: dist.reduce_scatter(full(), several(), async_op=a),
    "reduce_scatter_single": lambda a: dist.reduce_scatter_single(full(), full(6), async_op=a),
    "all_to_all": lambda a: dist.all_to_all(several(), several(), async_op=a),
    "all_to_all_single": lambda a: dist.all_to_all_single(full(4), full(4), async_op=a),
    "barrier": lambda a: dist.barrier(async_op=a),
    "all_reduce_coalesced": lambda a: dist.all_reduce_coalesced(several(), async_op=a),
    "all_gather_coalesced": lambda a: dist.all_gather_coalesced(
        [several(), several()], several(), async_op=a
    ),
    "a coalescing block": collected,
}
BLOCKING: dict[str, Callable[[], Any]] = {
    "all_gather_object": lambda: dist.all_gather_object([None, None], {"rank": dist.get_rank()}),
    "gather_object": lambda: dist.gather_object(dist.get_rank(), [None] * 2 if on_0() else None),
    "broadcast_object_list": lambda: dist.broadcast_object_list([dist.get_rank()], 1),
    "scatter_object_list": lambda: dist.scatter_object_list([None], None if on_0() else [1, 2], 1),
    "functional.all_reduce": lambda: functional.all_reduce(full()),
    "functional.all_gather": lambda: functional.all_gather(full()),
}
MESSAGES: dict[str, Callable[[], Any]] = {
    "send": lambda: dist.send(full(LARGE), 1),
    "recv": lambda: dist.recv(full(), 1),
    "recv from anybody": lambda: dist.recv(full()),
    "isend": lambda: dist.isend(full(LARGE), 1).wait(),
    "irecv": lambda: dist.irecv(full(), 1).wait(),
    "recv_object_list": lambda: dist.recv_object_list([None], 1),
    "batch_isend_irecv": lambda: [
        work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, full(), 1)])
    ],
}


def on_0() -> bool:
    return dist.get_rank() == 0


def expires(call: Callable[[], Any]) -> str:
    """Call, run out of time long before the group's usual time, return what was said."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:  # futures hand on what is no DistTimeout
        call()
    assert time.monotonic() - begin < LONG / 2
    text = str(caught.value)
    assert isinstance(caught.value, dist.DistTimeout) or "DistTimeout" in text, text
    return text


def _all_alone(kinds: list[str]) -> dict[str, str]:
    """Try every operation with the group's timeout: first on rank 0, then on the other one."""
    told = {}
    calls: list[tuple[str, Callable[[], Any]]] = []
    for name, collective in COLLECTIVES.items():
        if "waiting" in kinds:
            calls.append((name, lambda c=collective: c(False)))
        if "works" in kinds:
            calls.append((f"{name}, async", lambda c=collective: c(True).wait()))
    calls += BLOCKING.items() if "waiting" in kinds else []
    if dist.get_rank() == 0:
        dist.group.WORLD.set_timeout(SHORT)
        calls += MESSAGES.items() if "waiting" in kinds else []
        for name, call in calls:
            told[name] = expires(call)
        dist.group.WORLD.set_timeout(LONG)
        tell("given up")
    else:
        listen("given up")
        for name, call in calls:
            assert "rank 0" in expires(call), name
    everybody_goes_on()
    return told


@pytest.mark.parametrize("kinds", ["waiting", "works"])
def test_every_operation_has_the_groups_timeout(kinds: str) -> None:
    told = run_ranks(_all_alone, 2, [kinds], group_timeout=LONG)[0]
    assert len(told) >= len(COLLECTIVES)
    for name, text in told.items():
        assert f"{SHORT:g} s" in text, (name, text)
        operation = CALLED.get(name.removesuffix(", async"), name.split(",")[0].split(" ")[0])
        assert operation.removeprefix("functional.") in text, (name, text)
        assert "rank 1" in text or name == "recv from anybody", (name, text)


def _stores(kind: str, folder: str) -> None:
    store = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(f"{folder}/store", 1),
        "tcp": lambda: dist.TCPStore("localhost", 0, 1, is_master=True),
    }[kind]()
    stores = [store, dist.PrefixStore("part", store)]
    for each in stores:
        each.set_timeout(timedelta(seconds=SHORT))
        calls = {
            "get": lambda s=each: s.get("nothing"),
            "wait": lambda s=each: s.wait(["nothing"]),
            "wait for several": lambda s=each: s.wait(["here", "nothing"]),
            "wait with its own": lambda s=each: s.wait(["nothing"], timedelta(seconds=SHORT)),
        }
        each.set("here", "1")
        for name, call in calls.items():
            if "own" in name:
                each.set_timeout(timedelta(seconds=LONG))
            begin = time.monotonic()
            with pytest.raises(dist.DistStoreError, match="nothing") as caught:
                call()
            assert time.monotonic() - begin < LONG / 2
            assert isinstance(caught.value, TimeoutError), name
        assert each.get("here") == b"1"  # it is as it was
        each.set("nothing", "2")
        each.wait(["nothing"])


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_stores_have_timeouts_and_go_on(kind: str, tmp_path: Any) -> None:
    _stores(kind, str(tmp_path))


def _makes_groups_alone() -> None:
    if dist.get_rank() == 0:
        for make in (
            lambda: dist.new_group([0, 1], timeout=SHORT),
            lambda: dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=SHORT)),
            lambda: dist.monitored_barrier(timeout=SHORT),
            lambda: dist.monitored_barrier(timeout=timedelta(seconds=SHORT), wait_all_ranks=True),
            lambda: dist.barrier(timeout=SHORT),
            lambda: dist.barrier(timeout=SHORT, async_op=True).wait(),
        ):
            assert "rank 1" in expires(make).lower()
        tell("given up")
    else:
        listen("given up")


def test_groups_and_barriers_have_timeouts_of_their_own() -> None:
    run_ranks(_makes_groups_alone, 2, group_timeout=LONG)


# The same through torch, whose calls carry their timeouts in options.


def _options(kind: Any, asynchronous: bool, **values: Any) -> Any:
    options = kind()
    options.timeout = timedelta(seconds=SHORT)
    options.asyncOp = asynchronous
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _with_options(backend: Any, classes: Any, rank: int) -> dict[str, Callable[[bool], Any]]:
    """Return the methods of a group that take options, each as a call that rank 0 cannot end."""

    def three() -> torch.Tensor:
        return torch.full((3,), float(rank + 1))

    def two() -> list[torch.Tensor]:
        return [three(), three()]

    def make(kind: Any, a: bool, **values: Any) -> Any:
        return _options(kind, a, **values)

    six = lambda: torch.cat(two())  # noqa: E731
    return {
        "allreduce": lambda a: backend.allreduce([three()], make(classes.AllreduceOptions, a)),
        "broadcast": lambda a: backend.broadcast(
            [three()], make(classes.BroadcastOptions, a, rootRank=1)
        ),
        "reduce": lambda a: backend.reduce([three()], make(classes.ReduceOptions, a, rootRank=0)),
        "allgather": lambda a: backend.allgather(
            [two()], [three()], make(classes.AllgatherOptions, a)
        ),
        "allgather base": lambda a: backend._allgather_base(
            six(), three(), make(classes.AllgatherOptions, a)
        ),
        "gather": lambda a: backend.gather(
            [two()] if rank == 0 else [], [three()], make(classes.GatherOptions, a, rootRank=0)
        ),
        "scatter": lambda a: backend.scatter(
            [three()], [] if rank == 0 else [two()], make(classes.ScatterOptions, a, rootRank=1)
        ),
        "reduce_scatter": lambda a: backend.reduce_scatter(
            [three()], [two()], make(classes.ReduceScatterOptions, a)
        ),
        "reduce_scatter base": lambda a: backend._reduce_scatter_base(
            three(), six(), make(classes.ReduceScatterOptions, a)
        ),
        "alltoall": lambda a: backend.alltoall(two(), two(), make(classes.AllToAllOptions, a)),
        "alltoall base": lambda a: backend.alltoall_base(
            six(), six(), [], [], make(classes.AllToAllOptions, a)
        ),
        "barrier": lambda a: backend.barrier(make(classes.BarrierOptions, a)),
        "allreduce_coalesced": lambda a: backend.allreduce_coalesced(
            two(), make(classes.AllreduceCoalescedOptions, a)
        ),
        "allgather_coalesced": lambda a: backend.allgather_coalesced(
            [two(), two()], two(), make(classes.AllgatherOptions, a)
        ),
        "allgather_into_tensor_coalesced": lambda a: backend.allgather_into_tensor_coalesced(
            [six(), six()], two(), make(classes.AllgatherOptions, a)
        ),
        "reduce_scatter_tensor_coalesced": lambda a: backend.reduce_scatter_tensor_coalesced(
            two(), [six(), six()], make(classes.ReduceScatterOptions, a)
        ),
    }


def _torch_alone() -> None:
    rank, group = theirs.get_rank(), theirs.group.WORLD
    calls = _with_options(group._get_backend(torch.device("cpu")), c10d, rank)
    store = theirs.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"], timedelta(seconds=50))
    for name, call in calls.items():
        for asynchronous in (False, True):
            begin = time.monotonic()
            with pytest.raises(TimeoutError, match="rank") as caught:
                call(asynchronous).wait()
            assert time.monotonic() - begin < 25, name  # the group has 50 s
            assert rank == 1 or f"{SHORT:g} s" in str(caught.value), (name, caught.value)
    if rank == 0:
        store.set("given up", "1")
    total = torch.arange(3.0) + rank
    theirs.all_reduce(total)
    assert total.tolist() == [1, 3, 5]


def test_every_operation_of_torchs_has_the_timeout_of_its_options() -> None:
    run_torch(_torch_alone, 2)


def _groups_alone() -> None:
    rank = dist.get_rank()
    if rank == 1:
        listen("given up")
    for name, call in _with_options(dist.group.WORLD, dist, rank).items():
        for asynchronous in (False, True):
            text = expires(lambda c=call, a=asynchronous: c(a).wait())
            assert rank == 1 or f"{SHORT:g} s" in text, (name, text)
    if rank == 0:
        tell("given up")
    everybody_goes_on()


def test_every_method_of_a_group_has_the_timeout_of_its_options() -> None:
    run_ranks(_groups_alone, 2, group_timeout=LONG)
