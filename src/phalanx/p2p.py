"""Messages from one rank to another.

Messages between two ranks arrive in the order they were sent, per tag. ``src`` and ``dst`` are
global ranks, ``group_src`` and ``group_dst`` ranks in the group. A rank outside the group gets a
warning and None (-1 from ``recv``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from phalanx import checks
from phalanx.checks import plain
from phalanx.groups import ProcessGroup
from phalanx.work import Work
from phalanx.world import active, membership, resolve


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to another rank; it may be changed again when this returns."""
    member = membership(group, "send")
    if member is None:
        return
    peer = checks.peer(member, dst, group_dst, "dst", "send")
    if peer == member.rank():
        raise ValueError(f"send from rank {peer} to itself would block: use isend")
    if not plain(tensor):
        tensor = checks.message(tensor, "tensor", "send", False)
    active(member).send(tensor, peer, checks.tag(tag, "send"))


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send ``tensor``, which must not be changed until the work is done.

    The message makes its way without ``wait()``. A rank may send to itself.
    """
    member = membership(group, "isend")
    if member is None:
        return None
    peer = checks.peer(member, dst, group_dst, "dst", "isend")
    if not plain(tensor):
        tensor = checks.message(tensor, "tensor", "isend", False)
    return active(member).send(tensor, peer, checks.tag(tag, "isend"), async_op=True)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a message into ``tensor`` and return the global rank that sent it.

    With neither ``src`` nor ``group_src``, take the first message from any rank.
    """
    member = membership(group, "recv")
    if member is None:
        return -1
    peer = _source(member, src, group_src, "recv")
    if not plain(tensor):
        tensor = checks.message(tensor, "tensor", "recv")
    source = active(member).recv(tensor, peer, checks.tag(tag, "recv"))
    return member.ranks[cast(int, source)]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive a message into ``tensor``, which must not be used until the work is done.

    With neither ``src`` nor ``group_src``, take the first message from any rank;
    ``source_rank()`` of the work then tells its group rank.
    """
    member = membership(group, "irecv")
    if member is None:
        return None
    peer = _source(member, src, group_src, "irecv")
    if not plain(tensor):
        tensor = checks.message(tensor, "tensor", "irecv")
    work = active(member).recv(tensor, peer, checks.tag(tag, "irecv"), async_op=True)
    return cast(Work, work)


def _source(
    member: ProcessGroup, src: int | None, group_src: int | None, operation: str
) -> int | None:
    if src is None and group_src is None:
        return None
    return checks.peer(member, src, group_src, "src", operation)


class P2POp:
    """One message of a batch, for ``batch_isend_irecv``.

    ``op`` is the function ``isend`` or ``irecv``, ``peer`` the other rank in the world and
    ``group_peer`` its number in ``group``: one of the two is given.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"Invalid ``op`` of a P2POp: {op!r} (isend or irecv)")
        self.op = op
        self.tensor = checks.message(tensor, "tensor", "P2POp", written=op is irecv)
        self.group = resolve(group)
        self.group_peer = checks.peer(self.group, peer, group_peer, "peer", "P2POp")
        self.peer = self.group.to_global_rank(self.group_peer)
        self.tag = tag

    def __repr__(self) -> str:
        way = "to" if self.op is isend else "from"
        return (
            f"P2POp({self.op.__name__} {way} rank {self.peer}, {self.tensor.dtype}"
            f"{list(self.tensor.shape)}, tag={self.tag}, group={self.group.group_name!r})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start all sends and receives of a list, on one group, and return their works.

    They make their way together: no order of the list can make ranks block each other.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError("Invalid ``p2p_op_list``: it must be a list of P2POp")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise ValueError("All ops need to use the same group in batch_isend_irecv")
    works = []
    for each in p2p_op_list:
        if each.op is isend:
            work = isend(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer)
        else:
            work = irecv(each.tensor, group=each.group, tag=each.tag, group_src=each.group_peer)
        works.append(cast(Work, work))
    return works
