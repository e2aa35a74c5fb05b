"""Running several collectives as one operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from phalanx.backends.base import Call, GroupBackend
from phalanx.groups import ProcessGroup
from phalanx.profiling import Collecting
from phalanx.types import Timeout
from phalanx.work import CompletedWork, Work
from phalanx.world import active, resolve

_COLLECTED = frozenset({"all_reduce", "all_gather_single", "reduce_scatter_single"})


class CoalescedWork(Work):
    """The work of all that was called in one block, once the block has ended."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def _launched(self) -> Work:
        if not self.works:
            raise ValueError("coalesced operations start when their block ends: wait after it")
        return self.works[0]

    def wait(self, timeout: Timeout | None = None) -> bool:
        return self._launched().wait(timeout)

    def is_completed(self) -> bool:
        return bool(self.works) and self.works[0].is_completed()

    def exception(self) -> BaseException | None:
        return self._launched().exception()

    def result(self) -> list[torch.Tensor]:
        return self._launched().result()


class _Collector(Collecting):
    """Stands in for a group's transport, keeps some calls for later, and passes on the others."""

    def __init__(self, transport: GroupBackend, work: CoalescedWork) -> None:
        self._transport = transport
        self._work = work
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return (
            partial(self._collect, name) if name in _COLLECTED else getattr(self._transport, name)
        )

    def passed_on(self) -> GroupBackend:
        return self._transport

    def _collect(self, name: str, *args: Any, async_op: bool = False) -> Work | None:
        self.calls.append((name, args))
        return self._work if async_op else None


@contextmanager
def _coalescing_manager(
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[CoalescedWork]:
    """Run the all_reduce, all_gather_single and reduce_scatter_single calls of a block as one.

    They start, in order, when the block ends; all of them read before any of them writes, also
    where they share memory. Other operations run at once. With ``async_ops`` wait for them with
    ``wait()`` of what the block is given. ``device`` has no effect.
    """
    member = resolve(group)
    transport = member.transport
    if isinstance(transport, _Collector):
        raise ValueError(f"operations of group {member.group_name!r} are being coalesced already")
    work = CoalescedWork()
    collector = _Collector(transport, work)
    member.transport = cast(GroupBackend, collector)
    try:
        yield work
    finally:
        member.transport = transport
    launched = None
    if collector.calls:
        launched = active(member).coalesce(collector.calls, async_op=async_ops)
    work.works.append(launched or CompletedWork())
