"""The rules for messages."""

from __future__ import annotations

import torch

from phalanx.backends.base import GroupBackend
from phalanx.errors import DistTimeout
from phalanx.testing.backend_kit.inputs import (
    LAYOUTS,
    SHAPES,
    Rule,
    laid_out,
    like,
    same,
    started,
    values,
)
from phalanx.types import DTYPES, ReduceOp


def messages(backend: GroupBackend) -> None:
    """Messages of every dtype, shape and layout arrive whole."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    for i, dtype in enumerate(DTYPES):
        shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[i % len(LAYOUTS)]
        expected = values(left, shape, dtype)
        own, output = laid_out(values(backend.rank, shape, dtype), layout), like(expected, layout)
        send = started(backend.send(own, right, async_op=True))  # to itself in a group of one
        assert backend.recv(output, left) == left
        send.wait()
        same(output, expected, dtype, shape, layout)


def large_messages(backend: GroupBackend) -> None:
    """Large messages cross without blocking each other."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    count = 1 << 20
    output = torch.zeros(count)
    send = started(
        backend.send(values(backend.rank, (count,), torch.float32), right, async_op=True)
    )
    recv = started(backend.recv(output, left, async_op=True))
    recv.wait()
    send.wait()
    assert recv.source_rank() == left
    assert torch.equal(output, values(left, (count,), torch.float32))


def blocking_messages(backend: GroupBackend) -> None:
    """A send without async_op can be received by one without."""
    tensor = torch.zeros(2)
    if backend.rank == 0:
        for peer in range(1, backend.size):
            backend.send(torch.full((2,), float(peer)), peer)
    else:
        assert backend.recv(tensor, 0) == 0
        same(tensor, torch.full((2,), float(backend.rank)))


def tags(backend: GroupBackend) -> None:
    """A receive takes its tag's messages, in the order of sending."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sends = [
        started(backend.send(torch.tensor([10 * tag + i]), right, tag, async_op=True))
        for i in range(3)
        for tag in (0, 1, 7)
    ]
    for tag in (7, 0, 1):  # not the order of sending; within a tag it is kept
        for i in range(3):
            output = torch.zeros(1, dtype=torch.int64)
            backend.recv(output, left, tag)
            assert output.item() == 10 * tag + i, (tag, i, output)
    for send in sends:
        send.wait()


def any_source(backend: GroupBackend) -> None:
    """A receive from anybody takes what is there and tells from whom."""
    if backend.rank == 0:
        seen = set()
        for _ in range(1, backend.size):
            output = torch.zeros(1, dtype=torch.int64)
            source = backend.recv(output, None)
            assert source == output.item()
            seen.add(source)
        assert seen == set(range(1, backend.size))
        if backend.size > 1:
            late = started(backend.recv(torch.zeros(1, dtype=torch.int64), None, 3, async_op=True))
            backend.broadcast(torch.zeros(1), 0)
            late.wait()
            assert late.source_rank() == 1
    else:
        backend.send(torch.tensor([backend.rank]), 0)
        backend.broadcast(torch.zeros(1), 0)
        if backend.rank == 1:
            backend.send(torch.tensor([1]), 0, 3)


def timeouts(backend: GroupBackend) -> None:
    """A receive of nothing raises DistTimeout in time, and the group does not suffer."""
    for limit in (0.0, 0.02):
        try:
            backend.recv(torch.zeros(1), (backend.rank + 1) % backend.size, 77, timeout=limit)
        except DistTimeout:
            pass
        else:
            raise AssertionError("a receive of nothing returned")
    tensor = torch.ones(1)
    backend.all_reduce(tensor, ReduceOp.SUM)  # the group has not suffered
    same(tensor, torch.tensor([float(backend.size)]))


def messages_to_oneself(backend: GroupBackend) -> None:
    """A rank may send to itself, and receive that also as from anybody."""
    for source in (backend.rank, None):
        sent = started(backend.send(torch.tensor([7.0]), backend.rank, 41, async_op=True))
        output = torch.zeros(1)
        assert backend.recv(output, source, 41) == backend.rank
        sent.wait()
        same(output, torch.tensor([7.0]))


def order_of_sizes(backend: GroupBackend) -> None:
    """Messages of one tag arrive in the order of sending, however large each is."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sizes = (1, 100_000, 3, 30, 40_000, 2)
    sends = [
        started(backend.send(torch.full((size,), i), right, 42, async_op=True))
        for i, size in enumerate(sizes)
    ]
    for i, size in enumerate(sizes):
        output = torch.full((size,), -1)
        backend.recv(output, left, 42)
        same(output, torch.full((size,), i), "size", size)
    for send in sends:
        send.wait()


def many_messages(backend: GroupBackend) -> None:
    """Any number of messages may be on their way before one is received."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sends = [started(backend.send(torch.tensor([i]), right, 43, async_op=True)) for i in range(100)]
    outputs = torch.zeros(100, 1, dtype=torch.int64)
    for output in outputs[:50]:
        assert backend.recv(output, left, 43) == left
    same(outputs[:50, 0], torch.arange(50))
    # Which of several pending receives gets which message is not part of the contract.
    receives = [started(backend.recv(output, left, 43, async_op=True)) for output in outputs[50:]]
    for work in receives + sends:
        work.wait()
    same(outputs[50:, 0].sort().values, torch.arange(50, 100))
    assert {work.source_rank() for work in receives} == {left}


def negative_tags(backend: GroupBackend) -> None:
    """Negative tags are streams of their own."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sends = [
        started(backend.send(torch.tensor([tag]), right, tag, async_op=True)) for tag in (7, -7)
    ]
    for tag in (-7, 7):
        output = torch.zeros(1, dtype=torch.int64)
        assert backend.recv(output, left, tag) == left
        assert output.item() == tag, f"a receive of tag {tag} got a message of tag {output.item()}"
    for send in sends:
        send.wait()


def messages_are_kept(backend: GroupBackend) -> None:
    """A send does not change its tensor, and a message is what it was when it was sent."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    tensor, output = torch.arange(4.0), torch.zeros(4)
    work = started(backend.recv(output, left, 44, async_op=True))
    started(backend.send(tensor, right, 44, async_op=True)).wait()
    same(tensor, torch.arange(4.0))
    tensor.zero_()  # it is free again
    work.wait()
    same(output, torch.arange(4.0))


RULES: list[Rule] = [
    messages,
    large_messages,
    blocking_messages,
    messages_to_oneself,
    order_of_sizes,
    many_messages,
    messages_are_kept,
    tags,
    negative_tags,
    any_source,
    timeouts,
]
