"""What is measured: each operation, how each library is asked for it, and what must come out.

A *call* is a function of no arguments with everything bound in advance, so that the timed loop
holds nothing but the library's own work. Sizes count the larger buffer of a rank: the whole tensor
of an all_reduce, the gathered result of an all_gather, the input of a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Call = Callable[[], object]

ITEM_BYTES = 4  # everything is float32
ROOT = 0
WINDOW_BYTES = 64 << 20  # send_stream keeps at most this much in flight


def nothing() -> None:
    """Be a rank with no part in an operation."""


def ramp(count: int) -> torch.Tensor:
    """Return small whole numbers, so that sums over ranks are exact and misplaced data shows."""
    return torch.arange(count, dtype=torch.float32).remainder_(251)


def contribution(rank: int, count: int) -> torch.Tensor:
    """Return what `rank` puts into a checked operation."""
    return ramp(count).add_(rank)


def total(size: int, count: int) -> torch.Tensor:
    """Return the sum of all ranks' contributions."""
    return ramp(count).mul_(size).add_(size * (size - 1) // 2)


def own_chunk(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return whole.chunk(size)[rank]


Expected = Callable[[int, int, int], "torch.Tensor | None"]


def _from_root(rank: int, size: int, count: int) -> torch.Tensor:
    return contribution(ROOT, count)


def _summed(rank: int, size: int, count: int) -> torch.Tensor:
    return total(size, count)


def _summed_on_root(rank: int, size: int, count: int) -> torch.Tensor | None:
    return total(size, count) if rank == ROOT else None


def _gathered(rank: int, size: int, count: int) -> torch.Tensor:
    return torch.cat([contribution(peer, count // size) for peer in range(size)])


def _gathered_on_root(rank: int, size: int, count: int) -> torch.Tensor | None:
    return _gathered(rank, size, count) if rank == ROOT else None


def _scattered(rank: int, size: int, count: int) -> torch.Tensor:
    return own_chunk(contribution(ROOT, count), rank, size)


def _summed_chunk(rank: int, size: int, count: int) -> torch.Tensor:
    return own_chunk(total(size, count), rank, size)


def _transposed(rank: int, size: int, count: int) -> torch.Tensor:
    return torch.cat([own_chunk(contribution(peer, count), rank, size) for peer in range(size)])


@dataclass(frozen=True)
class Operation:
    """One row of the benchmark.

    `source` and `target` say how much of the counted size each buffer holds ("whole" or one rank's
    "chunk"); without a target the operation works in place. `expected(rank, size, count)` is what
    the result must be, None where it is left open.
    """

    name: str
    source: str = "whole"
    target: str | None = None
    expected: Expected | None = None
    sized: bool = True
    pairwise: bool = False

    def count(self, num_bytes: int, size: int) -> int:
        """Return the elements of a whole buffer: at least one, and the same number, per rank."""
        return size * max(1, num_bytes // ITEM_BYTES // size)


def window(num_bytes: int) -> int:
    return max(2, min(64, WINDOW_BYTES // max(1, num_bytes)))


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", expected=_summed),
        Operation("broadcast", expected=_from_root),
        Operation("reduce", expected=_summed_on_root),
        Operation("all_gather", "chunk", "whole", _gathered),
        Operation("all_gather_single", "chunk", "whole", _gathered),
        Operation("gather", "chunk", "whole", _gathered_on_root),
        Operation("scatter", "whole", "chunk", _scattered),
        Operation("reduce_scatter", "whole", "chunk", _summed_chunk),
        Operation("reduce_scatter_single", "whole", "chunk", _summed_chunk),
        Operation("all_to_all", "whole", "whole", _transposed),
        Operation("all_to_all_single", "whole", "whole", _transposed),
        Operation("barrier", sized=False),
        Operation("send_recv", expected=_from_root, pairwise=True),
        Operation("send_stream", expected=_from_root, pairwise=True),
    )
}


class Library:
    """Binds operations of one library to buffers; a method per operation returns its call."""

    checked = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count)

    def bind(self, name: str, source: torch.Tensor, target: torch.Tensor) -> Call:
        if not hasattr(self, name):
            raise NotImplementedError(f"{type(self).__name__} has no {name}")
        return getattr(self, name)(source, target)

    def messages(self, name: str, num_bytes: int) -> int:
        """Return how many messages one call sends in a row, which its time is divided by."""
        return {"send_recv": 2, "send_stream": window(num_bytes)}.get(name, 1)

    def send_to(self, tensor: torch.Tensor, rank: int) -> Call:
        raise NotImplementedError

    def receive_from(self, tensor: torch.Tensor, rank: int) -> Call:
        raise NotImplementedError

    def send_recv(self, source: torch.Tensor, target: torch.Tensor) -> Call:
        """Send there and back between ranks 0 and 1."""
        if self.rank > 1:
            return nothing
        peer = 1 - self.rank
        send, receive = self.send_to(source, peer), self.receive_from(source, peer)
        first, second = (send, receive) if self.rank == 0 else (receive, send)

        def call() -> None:
            first()
            second()

        return call

    def send_stream(self, source: torch.Tensor, target: torch.Tensor) -> Call:
        """Send a window of messages from rank 0 to rank 1, then wait for one small answer."""
        if self.rank > 1:
            return nothing
        answer = torch.zeros(1)
        if self.rank == 0:
            message, last = self.send_to(source, 1), self.receive_from(answer, 1)
        else:
            message, last = self.receive_from(source, 0), self.send_to(answer, 0)
        repeats = range(window(source.numel() * ITEM_BYTES))

        def call() -> None:
            for _ in repeats:
                message()
            last()

        return call


class TorchLike(Library):
    """torch.distributed's vocabulary: Gloo, ThreadedPG, and Phalanx itself."""

    def __init__(self, dist: Any, rank: int, size: int, *, shared: bool = False) -> None:
        super().__init__(rank, size)
        self.dist, self.shared = dist, shared

    def allocate(self, count: int) -> torch.Tensor:
        if self.shared:
            return self.dist.empty_shared((count,), dtype=torch.float32)
        return super().allocate(count)

    def all_reduce(self, source, target):
        return partial(self.dist.all_reduce, source)

    def broadcast(self, source, target):
        return partial(self.dist.broadcast, source, src=ROOT)

    def reduce(self, source, target):
        return partial(self.dist.reduce, source, dst=ROOT)

    def all_gather(self, source, target):
        return partial(self.dist.all_gather, self._chunks(target), source)

    def all_gather_single(self, source, target):
        # The older name came first; newer versions of torch warn on every use of it.
        function = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        return partial(function, target, source)

    def gather(self, source, target):
        chunks = self._chunks(target) if self.rank == ROOT else None
        return partial(self.dist.gather, source, chunks, dst=ROOT)

    def scatter(self, source, target):
        chunks = self._chunks(source) if self.rank == ROOT else None
        return partial(self.dist.scatter, target, chunks, src=ROOT)

    def reduce_scatter(self, source, target):
        return partial(self.dist.reduce_scatter, target, self._chunks(source))

    def reduce_scatter_single(self, source, target):
        function = getattr(self.dist, "reduce_scatter_single", None)
        return partial(function or self.dist.reduce_scatter_tensor, target, source)

    def all_to_all(self, source, target):
        return partial(self.dist.all_to_all, self._chunks(target), self._chunks(source))

    def all_to_all_single(self, source, target):
        return partial(self.dist.all_to_all_single, target, source)

    def barrier(self, source, target):
        return self.dist.barrier

    def send_to(self, tensor, rank):
        return partial(self.dist.send, tensor, rank)

    def receive_from(self, tensor, rank):
        return partial(self.dist.recv, tensor, rank)

    def _chunks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.chunk(self.size))


class Mpi(Library):
    """mpi4py's buffer interface on NumPy arrays; the list forms are the same calls there."""

    def __init__(self, communicator: Any, in_place: Any) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self.communicator, self.in_place = communicator, in_place

    def all_reduce(self, source, target):
        return partial(self.communicator.Allreduce, self.in_place, source.numpy())

    def broadcast(self, source, target):
        return partial(self.communicator.Bcast, source.numpy(), ROOT)

    def reduce(self, source, target):
        if self.rank == ROOT:
            return partial(self.communicator.Reduce, self.in_place, source.numpy(), root=ROOT)
        return partial(self.communicator.Reduce, source.numpy(), None, root=ROOT)

    def all_gather(self, source, target):
        return partial(self.communicator.Allgather, source.numpy(), target.numpy())

    all_gather_single = all_gather

    def gather(self, source, target):
        result = target.numpy() if self.rank == ROOT else None
        return partial(self.communicator.Gather, source.numpy(), result, ROOT)

    def scatter(self, source, target):
        given = source.numpy() if self.rank == ROOT else None
        return partial(self.communicator.Scatter, given, target.numpy(), ROOT)

    def reduce_scatter(self, source, target):
        return partial(self.communicator.Reduce_scatter_block, source.numpy(), target.numpy())

    reduce_scatter_single = reduce_scatter

    def all_to_all(self, source, target):
        return partial(self.communicator.Alltoall, source.numpy(), target.numpy())

    all_to_all_single = all_to_all

    def barrier(self, source, target):
        return self.communicator.Barrier

    def send_to(self, tensor, rank):
        return partial(self.communicator.Send, tensor.numpy(), rank)

    def receive_from(self, tensor, rank):
        return partial(self.communicator.Recv, tensor.numpy(), rank)


class Bare(Library):
    """No communication: what the memory of this machine allows with one thread per rank.

    all_reduce is an in-place add of as many bytes, each thread doing its part; broadcast and the
    sends are one plain copy by rank 0.
    """

    checked = False

    def messages(self, name, num_bytes):
        return 1

    def all_reduce(self, source, target):
        mine = own_chunk(source, self.rank, self.size)
        return partial(mine.add_, torch.zeros_like(mine))

    def broadcast(self, source, target):
        if self.rank != ROOT:
            return nothing
        return partial(torch.zeros_like(source).copy_, source)

    send_recv = broadcast
    send_stream = broadcast
