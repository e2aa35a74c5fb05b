"""Messages between any two ranks of a group that spans hosts.

Between ranks of one host they are the local engine's. To another host goes a slip of fixed size
that tells of the message, and the message itself, each in its own stream: the receiver's postman
takes in the slips of all senders and keeps them until somebody asks for what they tell of. So a
receive from any source finds out who was first.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from phalanx import bystanders
from phalanx.backends.base import GroupBackend
from phalanx.backends.hierarchy.topology import Topology
from phalanx.backends.hierarchy.vigil import SLICE, Vigil
from phalanx.backends.hierarchy.wire import flat
from phalanx.errors import CollectiveMismatch, DistBackendError, DistTimeout, expected
from phalanx.types import Deadline, Timeout
from phalanx.work import ThreadWork, Work

_SLIPS, _MESSAGES = -5, -6  # tags of the two streams

_SLIP = struct.Struct("<qqqq16s")  # sender, tag, number, bytes, dtype
_SLIP_BYTES = 64
_FOREVER = 10.0 * 365 * 24 * 3600
_LOOK = 0.002  # seconds between looks for a message from any source


class Slip(NamedTuple):
    """What is told of a message ahead of it."""

    source: int
    tag: int
    number: int
    length: int
    dtype: str


class Letters:
    """One rank's messages."""

    def __init__(
        self, local: GroupBackend, engine: GroupBackend, topology: Topology, vigil: Vigil
    ) -> None:
        self._vigil = vigil
        self._local = local
        self._engine = engine
        self._topology = topology
        self._sent: Counter[int] = Counter()
        self._sending = threading.Lock()
        self._slips: list[Slip] = []
        self._arrival = threading.Condition()
        self._postman: threading.Thread | None = None
        self._error: BaseException | None = None
        self._streams: defaultdict[int, _Stream] = defaultdict(_Stream)
        self._closed = False

    def send(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, async_op: bool
    ) -> Work | None:
        place = self._topology.places[dst]
        if self._topology.is_local(dst):
            return self._local.send(tensor, place.seat, tag, timeout=timeout, async_op=async_op)
        data = flat(tensor).view(torch.uint8)
        with self._sending:  # both streams in one order
            self._sent[dst] += 1
            text = _SLIP.pack(
                self._topology.rank, tag, self._sent[dst], data.numel(), _name(tensor).encode()
            )
            slip = torch.zeros(_SLIP_BYTES, dtype=torch.uint8)
            slip[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            works = [self._engine.send(slip, dst, _SLIPS, async_op=True)]
            if data.numel():
                works.append(self._engine.send(data, dst, _MESSAGES, async_op=True))

        def finish() -> None:
            deadline = Deadline(timeout)
            for work in works:
                if work is not None:
                    self._vigil.wait(work, deadline, [dst])

        if async_op:
            return ThreadWork(finish, [tensor]).start()
        finish()
        return None

    def recv(
        self, tensor: Tensor, src: int | None, tag: int, timeout: float, async_op: bool
    ) -> Work | int:
        if src is not None and self._topology.is_local(src):
            seat = self._topology.places[src].seat
            got = self._local.recv(tensor, seat, tag, timeout=timeout, async_op=async_op)
            return _Receipt(cast(Work, got), src) if async_op else src
        self._ensure_postman()
        deadline = Deadline(timeout)
        if async_op:
            return ThreadWork(lambda: self._receive(tensor, src, tag, deadline), [tensor]).start()
        return self._receive(tensor, src, tag, deadline)

    def _receive(self, tensor: Tensor, src: int | None, tag: int, deadline: Deadline) -> int:
        whom = "any rank" if src is None else f"rank {src}"
        needs = [each for each in range(len(self._topology.places)) if each != self._topology.rank]
        needs = needs if src is None else [src]
        doing = f"recv({_name(tensor)}{list(tensor.shape)}, tag={tag}) from {whom}"
        slip = None
        with self._vigil.shown(doing, deadline, needs, src is None) as check:
            looked = time.monotonic()
            while slip is None:
                if src is None and (seat := self._try_local(tensor, tag)) is not None:
                    return self._topology.mine[seat]
                with self._arrival:
                    slip = self._take_slip(src, tag)
                    if slip is None:
                        self._check()
                        self._arrival.wait(min(deadline.left(), _LOOK if src is None else SLICE))
                        slip = self._take_slip(src, tag)
                if slip is None and time.monotonic() - looked > SLICE:
                    looked = time.monotonic()
                    self._vigil.look([] if src is None else [src], check)
                if slip is None and deadline.left() <= 0:
                    raise DistTimeout(f"{doing}: nothing came before its timeout")
        self._take_message(tensor, slip, deadline)
        return slip.source

    def _try_local(self, tensor: Tensor, tag: int) -> int | None:
        try:
            with expected():
                return cast(int, self._local.recv(tensor, None, tag, timeout=0))
        except DistTimeout:
            return None

    def _take_slip(self, src: int | None, tag: int) -> Slip | None:
        for index, slip in enumerate(self._slips):
            if slip.tag == tag and src in (None, slip.source):
                return self._slips.pop(index)
        return None

    def _take_message(self, tensor: Tensor, slip: Slip, deadline: Deadline) -> None:
        length = tensor.numel() * tensor.itemsize
        if (length, _name(tensor)) != (slip.length, slip.dtype):
            raise CollectiveMismatch(
                f"recv(tag={slip.tag}) from rank {slip.source}: it sent {slip.length} bytes of "
                f"{slip.dtype}, and {length} bytes of {_name(tensor)} are asked for"
            )
        if not length:
            return
        data = self._streams[slip.source].take(
            slip.number, lambda into: self._fetch(into, slip.source, deadline)
        )
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))

    def _fetch(self, data: Tensor, source: int, deadline: Deadline) -> None:
        work = self._engine.recv(data, source, _MESSAGES, async_op=True)
        self._vigil.wait(cast(Work, work), deadline, [source])

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _ensure_postman(self) -> None:
        with self._arrival:
            if self._postman is None and not self._closed:
                thread = threading.Thread(target=self._collect, name="phalanx-post", daemon=True)
                self._postman = bystanders.mark(thread)
                self._postman.start()

    def _collect(self) -> None:
        frame = torch.empty(_SLIP_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._engine.recv(frame, None, _SLIPS, timeout=_FOREVER)
            except DistBackendError as error:
                with self._arrival:
                    self._error = error
                    self._arrival.notify_all()
                return
            source, tag, number, length, name = _SLIP.unpack_from(frame.numpy().tobytes())
            slip = Slip(source, tag, number, length, name.rstrip(b"\0").decode())
            with self._arrival:
                if length:
                    self._streams[source].coming.append((number, length))
                self._slips.append(slip)
                self._arrival.notify_all()

    def close(self) -> None:
        """Take in no more: the engine's end wakes the postman."""
        with self._arrival:
            self._closed = True


class _Receipt(Work):
    """A receive from this host, whose source is named as the whole group does."""

    def __init__(self, work: Work, source: int) -> None:
        self._work = work
        self._source = source

    def wait(self, timeout: Timeout | None = None) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        self._work.source_rank()  # raises if it is too early to ask
        return self._source


class _Stream:
    """The messages of one sender, which come in the order in which they were sent.

    Whoever asks for a later one first takes in those before it, for those who will ask for them.
    """

    def __init__(self) -> None:
        self.coming: deque[tuple[int, int]] = deque()  # numbers and lengths of what is to come
        self._kept: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, number: int, fetch: Callable[[Tensor], None]) -> Tensor:
        """Return the bytes of a message."""
        with self._lock:
            while number not in self._kept:
                earliest, length = self.coming[0]
                data = torch.empty(length, dtype=torch.uint8)
                fetch(data)
                self.coming.popleft()
                self._kept[earliest] = data
            return self._kept.pop(number)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
