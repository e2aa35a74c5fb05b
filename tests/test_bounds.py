"""Numbers from outside of the native core: what is out of bounds is an exception, and no more."""

import pytest
import torch

import phalanx as dist
from phalanx import _native
from phalanx.testing import run_ranks

NONSENSE = [-1, 2, 2_000_000_000, -2_000_000_000]


@pytest.fixture
def roster():
    return _native.Roster.create(2, True)


@pytest.mark.parametrize("rank", NONSENSE)
@pytest.mark.parametrize(
    "call",
    [
        lambda roster, rank: roster.fail(rank, "is gone"),
        lambda roster, rank: roster.leave(rank),
        lambda roster, rank: roster.place(rank, "elsewhere", 1),
        lambda roster, rank: roster.obituary(rank, True),
        lambda roster, rank: roster.note(rank, "a text"),
        lambda roster, rank: roster.join(rank, 1.0),
        lambda roster, rank: roster.count_threads(rank, 1),
        lambda roster, rank: _native.Waiting(roster, rank, "world", "a wait", [0], 1.0),
        lambda roster, rank: _native.Waiting(roster, 0, "world", "a wait", [rank], 1.0),
        lambda roster, rank: _native.trace_range(roster, rank, "a stretch"),
        lambda roster, rank: _native.deadlock_among(2, [], [rank]),
        lambda roster, rank: _native.Group(roster, [0, rank], 0, "a group", 1.0, ""),
    ],
)
def test_a_rank_that_is_not_in_the_world_is_refused(roster, call, rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 2"):
        call(roster, rank)


@pytest.mark.parametrize("members", [[], [1, 1], [0, 1, 0]])
def test_a_group_has_each_of_its_ranks_once(roster, members):
    with pytest.raises(ValueError, match="a group has"):
        _native.Group(roster, members, 0, "a group", 1.0, "")


@pytest.mark.parametrize("size", [0, -1, -(2**31)])
def test_a_world_has_a_rank(size):
    with pytest.raises(ValueError, match="a world has at least 1 rank"):
        _native.Roster.create(size, True)


def call_out_of_bounds(rank):
    core = dist.group.WORLD.backend.engine
    tensor = torch.arange(3.0)
    parts = [torch.empty(3), torch.empty(3)]
    calls = [
        lambda: core.broadcast(tensor, rank, 1.0, False),
        lambda: core.reduce(tensor, rank, 0, 1.0, 1.0, False),
        lambda: core.gather(parts, tensor, rank, 1.0, False),
        lambda: core.scatter(tensor, parts, rank, 1.0, False),
        lambda: core.send(tensor, rank, 0, 1.0, False),
        lambda: core.describe(rank),
    ]
    if rank != -1:  # which stands for any rank
        calls.append(lambda: core.recv(tensor, rank, 0, 1.0, False))
    for call in calls:
        with pytest.raises(ValueError, match=f"rank {rank} is not in group"):
            call()
    for reduction in (-1, 9, 1000):
        with pytest.raises(ValueError, match=f"unknown reduction {reduction}"):
            core.all_reduce(tensor, reduction, 1.0, 1.0, False)
    dist.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("rank", NONSENSE)
def test_a_rank_that_is_not_in_the_group_is_refused(rank):
    assert run_ranks(call_out_of_bounds, 2, rank) == [[0.0, 2.0, 4.0]] * 2


def send_too_much():
    huge = torch.zeros(1, dtype=torch.float64).expand(2**61)
    with pytest.raises(ValueError, match="more bytes than there can be memory"):
        dist.send(huge, 1 - dist.get_rank())
    dist.barrier()


def test_a_tensor_with_more_bytes_than_addresses_is_refused():
    run_ranks(send_too_much, 2)


@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 4096, 2**63, 2**52])
def test_more_memory_than_there_can_be_is_not_allocated(size):
    with pytest.raises(MemoryError):
        _native.allocate(size)


def test_memory_that_wraps_around_is_not_in_the_heap():
    held = _native.allocate(4096)
    assert _native.in_heap(held.ctypes.data, 4096)
    assert not _native.in_heap(held.ctypes.data, 2**64 - 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: ["threads", "7"],
        lambda fields: fields[:-1],
        lambda fields: [*fields, "0"],
        lambda fields: ["thread", *fields[1:]],
        lambda fields: [*fields[:-1], "-1"],
        lambda fields: [*fields[:-1], str(2**64 - 64)],
        lambda fields: [*fields[:-1], str(2**62)],
        lambda fields: [*fields[:-1], fields[-2]],
        lambda fields: [*fields[:-1], str(int(fields[-1]) + 8)],
        lambda fields: [*fields[:-1], str(int(fields[-1]) + 4096)],
        lambda fields: [*fields[:2], "-1", *fields[3:]],
        lambda fields: [*fields[:3], "-1", *fields[4:]],
        lambda fields: [*fields[:3], "0", *fields[4:]],
        lambda fields: [*fields[:4], "1", *fields[5:]],
        lambda fields: [*fields[:5], "4096", *fields[6:]],
        lambda fields: ["", *fields],
        lambda fields: [],
        lambda fields: [f"{fields[0]}\n", *fields[1:]],
    ],
)
def test_a_damaged_ticket_is_refused(change):
    roster = _native.Roster.create(2, False)
    ticket = roster.ticket
    with pytest.raises(dist.DistBackendError):
        _native.Roster.open(" ".join(change(ticket.split())))
    assert _native.Roster.open(ticket).ticket == ticket


@pytest.mark.parametrize("threads", [True, False])
def test_a_ticket_of_something_else_is_refused(threads):
    roster = _native.Roster.create(1, threads)
    roster.join(0, 10.0)
    with pytest.raises(dist.DistBackendError, match="stands for something else"):
        _native.Group(roster, [0], 0, "a group", 1.0, roster.ticket)
    group = _native.Group(roster, [0], 0, "a group", 1.0, "")
    with pytest.raises(dist.DistBackendError, match="stands for something else"):
        _native.Roster.open(group.ticket)
    group.close()
