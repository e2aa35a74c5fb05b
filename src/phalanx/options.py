"""What a single call on a group may be told, in the classes and names that torch has for it.

Made without arguments, then filled in. ``timeout`` is the group's unless it is set, ``asyncOp``
says whether the call may return before it is done, ``rootRank`` is a group rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from phalanx.types import ReduceOp, Timeout, seconds

_UNSET = timedelta(milliseconds=-1)


@dataclass(slots=True, eq=False)
class _Options:
    timeout: Timeout = field(default=_UNSET, init=False)
    asyncOp: bool = field(default=True, init=False)


@dataclass(slots=True, eq=False)
class AllreduceOptions(_Options):
    """Options of ``group.allreduce``."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM, init=False)


@dataclass(slots=True, eq=False)
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of ``group.allreduce_coalesced``."""


@dataclass(slots=True, eq=False)
class AllgatherOptions(_Options):
    """Options of ``group.allgather`` and its relatives."""


@dataclass(slots=True, eq=False)
class BroadcastOptions(_Options):
    """Options of ``group.broadcast``; ``rootTensor`` says which of the root's tensors it is."""

    rootRank: int = field(default=0, init=False)
    rootTensor: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class ReduceOptions(_Options):
    """Options of ``group.reduce``; ``rootTensor`` can only be 0."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM, init=False)
    rootRank: int = field(default=0, init=False)
    rootTensor: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class ReduceScatterOptions(_Options):
    """Options of ``group.reduce_scatter`` and its relatives."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM, init=False)


@dataclass(slots=True, eq=False)
class GatherOptions(_Options):
    """Options of ``group.gather``."""

    rootRank: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class ScatterOptions(_Options):
    """Options of ``group.scatter``."""

    rootRank: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class AllToAllOptions(_Options):
    """Options of ``group.alltoall`` and ``group.alltoall_base``."""


@dataclass(slots=True, eq=False)
class BarrierOptions(_Options):
    """Options of ``group.barrier``; the devices have no effect."""

    device_ids: list[int] = field(default_factory=list, init=False)
    device: torch.device | None = field(default=None, init=False)


def limit(timeout: Timeout | None) -> float | None:
    """Return a timeout of options in seconds; None if it is not set."""
    if timeout is None or (isinstance(timeout, timedelta) and timeout < timedelta(0)):
        return None
    return seconds(timeout)
