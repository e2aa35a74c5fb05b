"""How each library is asked for an operation.

A *call* is a function of no arguments with everything bound in advance, so that the timed loop
holds nothing but the library's own work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.operations import USUAL, Conditions
from phalanx.bench.values import ROOT

Call = Callable[[], object]

WINDOW_BYTES = 64 << 20  # send_stream keeps at most this much in flight


def nothing() -> None:
    """Be a rank with no part in an operation."""


def window(num_bytes: int) -> int:
    """Return how many messages of a size send_stream sends in a row."""
    return max(2, min(64, WINDOW_BYTES // max(1, num_bytes)))


class Library:
    """Binds operations of one library to buffers; a method per operation returns its call."""

    checked = True

    def __init__(self, rank: int, size: int, conditions: Conditions) -> None:
        self.rank, self.size, self.conditions = rank, size, conditions
        self.dtype: torch.dtype = getattr(torch, conditions.dtype)

    def allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.dtype)

    def bind(self, name: str, source: Tensor, target: Tensor) -> Call:
        """Return the call of the operation `name` on these buffers."""
        if not hasattr(self, name):
            raise NotImplementedError(f"{type(self).__name__} has no {name}")
        call: Call = getattr(self, name)(source, target)
        return call

    def messages(self, name: str, num_bytes: int) -> int:
        """Return how many messages one call sends in a row, which its time is divided by."""
        return {"send_recv": 2, "send_stream": window(num_bytes)}.get(name, 1)

    def send_to(self, tensor: Tensor, rank: int) -> Call:
        raise NotImplementedError

    def receive_from(self, tensor: Tensor, rank: int) -> Call:
        raise NotImplementedError

    def send_recv(self, source: Tensor, target: Tensor) -> Call:
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

    def send_stream(self, source: Tensor, target: Tensor) -> Call:
        """Send a window of messages from rank 0 to rank 1, then wait for one small answer."""
        if self.rank > 1:
            return nothing
        answer = torch.zeros(1, dtype=self.dtype)
        if self.rank == 0:
            message, last = self.send_to(source, 1), self.receive_from(answer, 1)
        else:
            message, last = self.receive_from(source, 0), self.send_to(answer, 0)
        repeats = range(window(source.nbytes))

        def call() -> None:
            for _ in repeats:
                message()
            last()

        return call


class TorchLike(Library):
    """torch.distributed's vocabulary: Gloo, ThreadedPG, and Phalanx itself."""

    def __init__(
        self,
        dist: Any,
        rank: int,
        size: int,
        conditions: Conditions = USUAL,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__(rank, size, conditions)
        self.dist, self.shared = dist, shared
        name = conditions.reduce_op
        self._op = {} if name == "sum" else {"op": getattr(dist.ReduceOp, name.upper())}

    def allocate(self, count: int) -> Tensor:
        if self.shared:
            tensor: Tensor = self.dist.empty_shared((count,), dtype=self.dtype)
            return tensor
        return super().allocate(count)

    def all_reduce(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.all_reduce, source, **self._op)

    def broadcast(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.broadcast, source, src=ROOT)

    def reduce(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.reduce, source, dst=ROOT, **self._op)

    def all_gather(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.all_gather, self._chunks(target), source)

    def all_gather_single(self, source: Tensor, target: Tensor) -> Call:
        # The older name came first; newer versions of torch warn on every use of it.
        function = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        return self._call(function, target, source)

    def gather(self, source: Tensor, target: Tensor) -> Call:
        chunks = self._chunks(target) if self.rank == ROOT else None
        return self._call(self.dist.gather, source, chunks, dst=ROOT)

    def scatter(self, source: Tensor, target: Tensor) -> Call:
        chunks = self._chunks(source) if self.rank == ROOT else None
        return self._call(self.dist.scatter, target, chunks, src=ROOT)

    def reduce_scatter(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.reduce_scatter, target, self._chunks(source), **self._op)

    def reduce_scatter_single(self, source: Tensor, target: Tensor) -> Call:
        function = getattr(self.dist, "reduce_scatter_single", None)
        return self._call(function or self.dist.reduce_scatter_tensor, target, source, **self._op)

    def all_to_all(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.all_to_all, self._chunks(target), self._chunks(source))

    def all_to_all_single(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.all_to_all_single, target, source)

    def barrier(self, source: Tensor, target: Tensor) -> Call:
        return self._call(self.dist.barrier)

    def send_to(self, tensor: Tensor, rank: int) -> Call:
        return self._transfer("send", tensor, rank)

    def receive_from(self, tensor: Tensor, rank: int) -> Call:
        return self._transfer("recv", tensor, rank)

    def exchange(self, source: Tensor, target: Tensor) -> Call:
        peer = 1 - self.rank
        receive = partial(self.dist.irecv, target, peer)
        send = partial(self.dist.isend, source, peer)

        def call() -> None:
            receiving, sending = receive(), send()
            sending.wait()
            receiving.wait()

        return call

    def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Call:
        if self.conditions.asynchronous:
            start = partial(function, *args, async_op=True, **kwargs)
            return lambda: start().wait()
        return partial(function, *args, **kwargs) if args else function

    def _transfer(self, name: str, tensor: Tensor, rank: int) -> Call:
        if self.conditions.asynchronous:
            start = partial(getattr(self.dist, f"i{name}"), tensor, rank)
            return lambda: start().wait()
        return partial(getattr(self.dist, name), tensor, rank)

    def _chunks(self, whole: Tensor) -> list[Tensor]:
        return list(whole.chunk(self.size))


class Mpi(Library):
    """mpi4py's buffer interface on NumPy arrays; the list forms are the same calls there."""

    # What MPI can compute with; mpi4py does not even move the others.
    DTYPES = ("int8", "uint8", "int16", "int32", "int64", "float32", "float64")
    REDUCE_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}  # noqa: RUF012

    def __init__(self, mpi: Any, conditions: Conditions) -> None:
        self.communicator, self.in_place = mpi.COMM_WORLD, mpi.IN_PLACE
        super().__init__(self.communicator.Get_rank(), self.communicator.Get_size(), conditions)
        if conditions.dtype not in self.DTYPES:
            raise NotImplementedError(f"MPI has no {conditions.dtype}")
        if conditions.reduce_op not in self.REDUCE_OPS:
            raise NotImplementedError(f"MPI has no reduction {conditions.reduce_op}")
        self._op = getattr(mpi, self.REDUCE_OPS[conditions.reduce_op])

    def all_reduce(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Allreduce", self.in_place, source.numpy(), self._op)

    def broadcast(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Bcast", source.numpy(), ROOT)

    def reduce(self, source: Tensor, target: Tensor) -> Call:
        if self.rank == ROOT:
            return self._call("Reduce", self.in_place, source.numpy(), self._op, ROOT)
        return self._call("Reduce", source.numpy(), None, self._op, ROOT)

    def all_gather(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Allgather", source.numpy(), target.numpy())

    all_gather_single = all_gather

    def gather(self, source: Tensor, target: Tensor) -> Call:
        result = target.numpy() if self.rank == ROOT else None
        return self._call("Gather", source.numpy(), result, ROOT)

    def scatter(self, source: Tensor, target: Tensor) -> Call:
        given = source.numpy() if self.rank == ROOT else None
        return self._call("Scatter", given, target.numpy(), ROOT)

    def reduce_scatter(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Reduce_scatter_block", source.numpy(), target.numpy(), self._op)

    reduce_scatter_single = reduce_scatter

    def all_to_all(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Alltoall", source.numpy(), target.numpy())

    all_to_all_single = all_to_all

    def barrier(self, source: Tensor, target: Tensor) -> Call:
        return self._call("Barrier")

    def send_to(self, tensor: Tensor, rank: int) -> Call:
        return self._call("Send", tensor.numpy(), rank)

    def receive_from(self, tensor: Tensor, rank: int) -> Call:
        return self._call("Recv", tensor.numpy(), rank)

    def exchange(self, source: Tensor, target: Tensor) -> Call:
        peer = 1 - self.rank
        there, back = source.numpy(), target.numpy()
        return partial(self.communicator.Sendrecv, there, peer, 0, back, peer)

    def _call(self, name: str, *args: object) -> Call:
        """Bind a function, or the one that only starts it: Allreduce, or Iallreduce."""
        if self.conditions.asynchronous:
            start = partial(getattr(self.communicator, f"I{name.lower()}"), *args)
            return lambda: start().Wait()
        function: Call = getattr(self.communicator, name)
        return partial(function, *args) if args else function


class Bare(Library):
    """No communication: what the memory of this machine allows with one thread per rank.

    all_reduce is an in-place add of as many bytes, each thread doing its part; broadcast and the
    sends are one plain copy by rank 0.
    """

    checked = False

    def messages(self, name: str, num_bytes: int) -> int:
        return 1

    def all_reduce(self, source: Tensor, target: Tensor) -> Call:
        mine = source.chunk(self.size)[self.rank]
        return partial(mine.add_, torch.zeros_like(mine))

    def broadcast(self, source: Tensor, target: Tensor) -> Call:
        if self.rank != ROOT:
            return nothing
        return partial(torch.zeros_like(source).copy_, source)

    send_recv = broadcast
    send_stream = broadcast
