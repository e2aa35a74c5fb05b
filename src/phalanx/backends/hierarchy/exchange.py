"""Algorithms among hosts: one rank of each takes part, over a `Crossing`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.backends import reduction
from phalanx.backends.engines.calls import Call
from phalanx.backends.hierarchy.choices import is_doubling_worth_it
from phalanx.backends.hierarchy.crossing import Coming, Crossing, Sending
from phalanx.types import Deadline, ReduceOp


class Scratch:
    """Memory for parts of tensors, used again: that of fresh pages costs as much as a copy."""

    def __init__(self, most: int) -> None:
        self._most = most  # bytes of what is kept
        self._kept: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}  # by address

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of a flat tensor's size and dtype, with anything in it."""
        if not like.nbytes:
            return like
        fitting = [i for i, room in enumerate(self._kept) if room.nbytes >= like.nbytes]
        if fitting:
            room = self._kept.pop(fitting[0])
        else:
            room = torch.empty(like.nbytes, dtype=torch.uint8)
        self._lent[room.data_ptr()] = room
        return room[: like.nbytes].view(like.dtype)

    def give(self, tensor: Tensor) -> None:
        """Take back what nobody uses any more."""
        if not tensor.nbytes:
            return
        room = self._lent.pop(tensor.data_ptr())
        if room.nbytes + sum(each.nbytes for each in self._kept) <= self._most:
            self._kept.append(room)


class Exchange:
    """Has one flat tensor reduced over hosts, in place. ``peers`` are its ranks by host.

    `start` begins what needs no other part, `finish` does the rest: work may be done in between,
    and other exchanges begun. All hosts end with the same bits.
    """

    def __init__(
        self,
        crossing: Crossing,
        peers: Sequence[int],
        host: int,
        buffer: Tensor,
        op: ReduceOp,
        call: Call,
        scratch: Scratch,
    ) -> None:
        self._scratch = scratch
        self._crossing = crossing
        self._peers = peers
        self._host = host
        self._buffer = buffer
        self._op = op
        self._call = call
        self._sending: list[Sending] = []
        self._swap: tuple[Coming, Tensor] | None = None  # between two hosts

    def start(self) -> None:
        if len(self._peers) == 2:
            peer = self._peers[1 - self._host]
            theirs = self._scratch.take(self._buffer)
            self._swap = self._crossing.receive(peer, self._call, theirs, True), theirs
            self._give(peer, True)

    def finish(self, deadline: Deadline) -> None:
        if self._swap is not None:
            coming, theirs = self._swap
            coming.wait(deadline)
            self._flush(deadline)
            self._combine(theirs, self._host > 0)
            self._scratch.give(theirs)
        elif is_doubling_worth_it(len(self._peers), self._buffer.numel() * self._buffer.itemsize):
            self._double(deadline)
        else:
            self._ring(deadline)

    def _give(self, peer: int, foreseen: bool = False) -> None:
        self._sending.append(self._crossing.send(peer, self._call, self._buffer, foreseen))

    def _flush(self, deadline: Deadline) -> None:
        while self._sending:
            self._sending.pop().wait(deadline)

    def _take(self, peer: int, tensor: Tensor, deadline: Deadline) -> None:
        self._crossing.receive(peer, self._call, tensor).wait(deadline)

    def _combine(self, theirs: Tensor, they_come_first: bool) -> None:
        """Combine with another part, in the order of the hosts, into the buffer."""
        pair = (theirs, self._buffer) if they_come_first else (self._buffer, theirs)
        reduction.combine(*pair, self._op, out=self._buffer)

    def _double(self, deadline: Deadline) -> None:
        """Combine with hosts at distances 1, 2, 4, ...; those beyond a power of two stand aside."""
        host, size = self._host, len(self._peers)
        power = 1 << (size.bit_length() - 1)
        theirs = torch.empty_like(self._buffer)
        if host >= power:
            partner = self._peers[host - power]
            self._give(partner)
            self._take(partner, self._buffer, deadline)
            self._flush(deadline)
            return
        if host + power < size:
            self._take(self._peers[host + power], theirs, deadline)
            self._combine(theirs, False)
        distance = 1
        while distance < power:
            partner = self._peers[host ^ distance]
            self._give(partner)
            self._take(partner, theirs, deadline)
            self._flush(deadline)
            self._combine(theirs, bool(host & distance))
            distance *= 2
        if host + power < size:
            self._give(self._peers[host + power])
            self._flush(deadline)

    def _ring(self, deadline: Deadline) -> None:
        """Send parts around: each host sums one, then all get all sums."""
        host, size = self._host, len(self._peers)
        after, before = self._peers[(host + 1) % size], self._peers[host - 1]
        parts = self._buffer.tensor_split(size)
        for step in range(size - 1):
            outgoing, coming = parts[(host - step) % size], parts[(host - step - 1) % size]
            theirs = torch.empty_like(coming)
            self._pass_on(after, outgoing, before, theirs, deadline)
            reduction.combine(coming, theirs, self._op)
        for step in range(size - 1):
            outgoing, coming = parts[(host + 1 - step) % size], parts[(host - step) % size]
            self._pass_on(after, outgoing, before, coming, deadline)

    def _pass_on(
        self, after: int, outgoing: Tensor, before: int, coming: Tensor, deadline: Deadline
    ) -> None:
        receiving = self._crossing.receive(before, self._call, coming)
        sending = self._crossing.send(after, self._call, outgoing)
        receiving.wait(deadline)
        sending.wait(deadline)


def spread(
    crossing: Crossing,
    peers: Sequence[int],
    host: int,
    root: int,
    tensor: Tensor,
    call: Call,
    deadline: Deadline,
) -> None:
    """Copy a flat tensor from host ``root`` to all, from each that has it to another at a time."""
    size = len(peers)
    turned = (host - root) % size  # as if the root were host 0
    distance, sendings = 1, []
    while distance < size:
        if turned < distance and turned + distance < size:
            peer = peers[(host + distance) % size]
            sendings.append(crossing.send(peer, call, tensor))
        elif distance <= turned < 2 * distance:
            crossing.receive(peers[host - distance], call, tensor).wait(deadline)
        distance *= 2
    for sending in sendings:
        sending.wait(deadline)
