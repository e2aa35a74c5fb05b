"""A transport between threads in a few lines of Python: the smallest complete backend.

It serves as an example, and as a second opinion in tests: all its collectives are the derived
ones. Importing this module registers it as the backend ``"memory"``.
"""

from __future__ import annotations

import threading
from uuid import uuid4

import torch
from torch import Tensor

from phalanx.backends.base import GroupBackend
from phalanx.backends.registry import Backend, BackendOptions
from phalanx.errors import DistBackendError, DistTimeout, PeerFailed
from phalanx.types import Deadline
from phalanx.work import CompletedWork, ThreadWork, Work


class Exchange:
    """Where the ranks of one group leave messages for each other."""

    def __init__(self, size: int) -> None:
        self.to_join = size
        self.changed = threading.Condition()
        self.messages: list[tuple[int, int, int, Tensor]] = []  # source, destination, tag, data
        self.failure: str | None = None


class MemoryBackend(GroupBackend):
    """One rank of an exchange. Sending copies and never waits."""

    name = "memory"

    def __init__(self, exchange: Exchange, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size, timeout)
        self._exchange = exchange
        self._closed = False

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._exchange.changed:
            self._check()
            self._exchange.messages.append((self.rank, dst, tag, copy))
            self._exchange.changed.notify_all()
        return CompletedWork([tensor]) if async_op else None

    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | int:
        def receive() -> int:
            source, data = self._pick(src, tag, self.timeout if timeout is None else timeout)
            if data.numel() * data.itemsize != tensor.numel() * tensor.itemsize:
                raise DistBackendError(
                    f"recv of {tuple(tensor.shape)} from rank {source} got {tuple(data.shape)}"
                )
            tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))
            return source

        return ThreadWork(receive, [tensor]).start() if async_op else receive()

    def _pick(self, src: int | None, tag: int, timeout: float) -> tuple[int, Tensor]:
        """Wait for the first message that fits, and take it."""
        exchange, deadline = self._exchange, Deadline(timeout)
        with exchange.changed:
            while True:
                self._check()
                for i, (source, dst, their_tag, data) in enumerate(exchange.messages):
                    if dst == self.rank and their_tag == tag and src in (None, source):
                        del exchange.messages[i]
                        return source, data
                if not exchange.changed.wait(deadline.left()) and not deadline.left():
                    raise DistTimeout(
                        f"recv on rank {self.rank} from "
                        f"{'any rank' if src is None else f'rank {src}'} (tag {tag}) "
                        f"waited for {timeout:g} s"
                    )

    def _check(self) -> None:
        if self._closed:
            raise DistBackendError(f"the group was closed on rank {self.rank}")
        if self._exchange.failure is not None:
            raise PeerFailed(self._exchange.failure)

    def abort(self, reason: str) -> None:
        with self._exchange.changed:
            self._exchange.failure = self._exchange.failure or reason
            self._exchange.changed.notify_all()

    def close(self) -> None:
        super().close()
        with self._exchange.changed:
            self._closed = True
            self._exchange.changed.notify_all()


_exchanges: dict[str, Exchange] = {}  # those that some of their ranks have yet to join


def create(options: BackendOptions, pg_options: object = None) -> MemoryBackend:
    """Make one rank's transport; rank 0 makes the exchange and tells its name in the store."""
    if options.group_rank == 0:
        name = uuid4().hex
        _exchanges[name] = Exchange(options.group_size)
        options.store.set("exchange", name)
    else:
        name = options.store.get("exchange").decode()
    exchange = _exchanges[name]
    with exchange.changed:
        exchange.to_join -= 1
        if exchange.to_join == 0:
            del _exchanges[name]
    return MemoryBackend(exchange, options.group_rank, options.group_size, options.timeout)


Backend.register_backend("memory", create, extended_api=True, devices="cpu")
