"""Tensors of a collective on their way to another host and back.

Each travels with the collective that it belongs to: a rank that brings something else is found out
without a round trip, and before anything is taken in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from phalanx.backends import shapes
from phalanx.backends.engines.calls import Call
from phalanx.backends.engines.frames import Frame
from phalanx.backends.engines.mailbox import Failure, Pending, Receipt
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.hierarchy.vigil import Vigil
from phalanx.errors import CollectiveMismatch
from phalanx.types import Deadline
from phalanx.work import Work

_TAG = -3

Differ = Callable[[Call, Call, int, bool], str]


class Crossing:
    """One rank's way to the ranks of other hosts, for collectives.

    ``differ(mine, theirs, peer, agreed)`` says what is wrong if a peer is in another one;
    ``agreed`` if this rank has got so far in its own that it may speak for its host.
    ``tell(mine, theirs, peer)`` is called if a peer brings another shape and may.
    """

    def __init__(
        self,
        engine: MessageEngine,
        vigil: Vigil,
        differ: Differ,
        tell: Callable[[Call, Call, int], None],
    ) -> None:
        self._engine = engine
        self._vigil = vigil
        self._differ = differ
        self._tell = tell

    def send(self, peer: int, call: Call, tensor: Tensor, foreseen: bool = False) -> Sending:
        """Begin to send a flat tensor; ``foreseen`` if the peer asks for it unseen, as below."""
        with self._vigil.explained([peer], call.number):
            work = self._engine.send(
                tensor, peer, _TAG, async_op=True, label=call.label(), foreseen=foreseen
            )
        return Sending(work, tensor, self._vigil, peer, call)

    def receive(self, peer: int, call: Call, tensor: Tensor, foreseen: bool = False) -> Coming:
        """Begin to receive a flat tensor.

        ``foreseen``: its bytes may be written before it is known what they belong to.
        """
        accept = partial(self._accept, call, tensor.nbytes)
        work = self._engine.recv(
            tensor, peer, _TAG, async_op=True, accept=accept, foreseen=foreseen
        )
        return Coming(cast(Receipt, work), self._vigil, peer, call)

    def stray(self, call: Call) -> str:
        """Say what is wrong if somebody sends for another collective with a call's number.

        Who is in another one may wait for another peer: then nobody asks for what was sent.
        """
        for source, label in self._engine.unclaimed(_TAG):
            theirs = Call.read(label)
            if theirs.number == call.number and not theirs.matches(call):
                return self._differ(call, theirs, source, False)
        return ""

    def _accept(self, call: Call, room: int, source: int, frame: Frame) -> Failure | None:
        theirs = Call.read(frame.label)
        if theirs.matches(call):
            if call.is_to_tell(theirs):
                self._tell(call, theirs, source)
            if frame.num_bytes == room:
                return None
            call, theirs = _sized(call, room), _sized(theirs, frame.num_bytes)
        return Failure(CollectiveMismatch, self._differ(call, theirs, source, True))


class Sending:
    """What is being sent: it must not change before it has left."""

    def __init__(
        self, work: Work | None, tensor: Tensor, vigil: Vigil, peer: int, call: Call
    ) -> None:
        self._work = work
        self._tensor = tensor  # alive as long
        self._vigil = vigil
        self._peer = peer
        self._call = call

    def wait(self, deadline: Deadline) -> None:
        """Wait until it has left."""
        if isinstance(self._work, Pending):
            self._vigil.wait(self._work, deadline, [self._peer], number=self._call.number)


class Coming:
    """What is being received."""

    def __init__(self, work: Receipt, vigil: Vigil, peer: int, call: Call) -> None:
        self._work = work
        self._vigil = vigil
        self._peer = peer
        self._call = call

    def wait(self, deadline: Deadline) -> None:
        """Wait until it is there."""
        call = self._call
        self._vigil.wait(self._work, deadline, [self._peer], call.what, call.number)


def _sized(call: Call, num_bytes: int) -> Call:
    return Call(call.number, f"{call.what} of {num_bytes} bytes", call.site, call.agreed)


def speaks_for_host(call: Call) -> bool:
    """Say whether what is sent in a call is known to hold for all ranks of its host.

    They have met before, but not in a broadcast; and each may send something of its own size.
    """
    return not call.what.startswith("broadcast(") and not _is_sized(call)


def _is_sized(call: Call) -> bool:
    return call.what.endswith(" bytes")


def likely_reason(mine: Call, theirs: Call) -> str:
    """Guess why two calls that must be one differ."""
    sites = sorted({mine.site, theirs.site})
    if (mine.number, mine.agreed) == (theirs.number, theirs.agreed) and not _is_sized(mine):
        return shapes.REFUSED
    if mine.what != theirs.what and len(sites) == 1:
        return f"the same line, {sites[0]}, gets other tensors or arguments on some ranks"
    if mine.what == theirs.what and mine.number == theirs.number and len(sites) == 1:
        return f"the same line, {sites[0]}, differs in the sizes of its parts or in its root"
    return (
        f"compare {' with '.join(sites)}; all ranks of a group must make the same calls in the "
        "same order (look for a condition on the rank, or a loop that runs more often)"
    )


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension: the tensor's own memory if it is contiguous."""
    # Strides of what has one element or none mean nothing, and may be anything.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def put(tensor: Tensor, buffer: Tensor) -> None:
    """Write the elements of a flat buffer into a tensor, unless they are its own memory."""
    if buffer.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(buffer.view(tensor.shape))
