"""What the level DETAIL adds: statistics of inputs, and the stacks of all ranks in errors.

While it is on, a `Detailed` stands in each group where its backend stood, so that no other level
pays for it. What a rank is about to do it first notes where the others can read it, also while it
hangs.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx import logs, profiling
from phalanx.backends.base import Call, GroupBackend
from phalanx.errors import DistBackendError
from phalanx.group import ProcessGroup
from phalanx.launch.outcomes import spell
from phalanx.types import Timeout
from phalanx.work import Work
from phalanx.world import World

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MESSAGES = frozenset({"send", "recv"})
_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "coalesce",
        "gather",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "scatter",
    }
)
_STACK_LIMIT = 5000  # characters; with the facts of past calls a note stays below its 8 KiB
_HEADING = "seen at debug level DETAIL:"

_log = {True: logs.area("p2p"), False: logs.area("collectives")}


def look_into(world: World, group: ProcessGroup) -> None:
    """Have all operations of a group looked into."""
    if group.transport is group.backend:
        group.transport = cast(GroupBackend, Detailed(group, _diaries.setdefault(world, Diary())))


def look_away(group: ProcessGroup) -> None:
    """Undo `look_into`."""
    if isinstance(group.transport, Detailed):
        group.transport = group.backend


class Statistics(NamedTuple):
    """What is known of the tensors that a rank puts into an operation."""

    shape: str = ""
    checksum: int = 0
    num_nan: int = 0
    num_inf: int = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Statistics:
        if not tensors:
            return cls()
        checksum = num_nan = num_inf = 0
        for tensor in tensors:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
            if flat.is_floating_point() or flat.is_complex():
                known = flat.float() if flat.itemsize == 1 else flat  # little is defined on float8
                num_nan += int(torch.isnan(known).sum())
                num_inf += int(torch.isinf(known).sum())
        first = tensors[0]
        shape = f"{str(first.dtype).removeprefix('torch.')}{list(first.shape)}"
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return cls(shape + more, checksum, num_nan, num_inf)

    def __str__(self) -> str:
        if not self.shape:
            return "no input"
        text = f"{self.shape}, checksum {self.checksum:08x}"
        if self.num_nan or self.num_inf:
            text += f", {self.num_nan} NaN, {self.num_inf} Inf"
        return text


@dataclass(frozen=True)
class Called:
    """One call, as its rank saw it; ``key`` is the same on all ranks that take part in it."""

    group: ProcessGroup
    name: str
    key: str
    title: str
    statistics: Statistics
    stack: traceback.StackSummary

    @property
    def site(self) -> str:
        """Where it was made, as the engine's reports spell it."""
        if not self.stack:
            return "?"
        frame = self.stack[-1]
        text = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return text if frame.name == "<module>" else f"{text} in {frame.name}"


class Note(NamedTuple):
    """What a rank has left for the others: its latest calls by key, and the last one's stack."""

    calls: dict[str, list[str]]  # title and statistics
    stack: str

    @classmethod
    def read(cls, text: str) -> Note:
        head, _, stack = text.partition("\n\n")
        rows = (line.split("\t") for line in head.splitlines())
        return cls({row[0]: row[1:] for row in rows if len(row) == 3}, stack)

    def about(self, call: Called) -> str:
        """Say what the rank has put into a call."""
        if not self.calls:
            return "not known: it has made no call at level DETAIL"
        if call.key not in self.calls:
            return "no such call among its latest"
        title, statistics = self.calls[call.key]
        return statistics if title == call.title else f"{title}: {statistics}"

    @property
    def latest(self) -> str:
        """The title of the latest call."""
        return next(reversed(self.calls.values()), [""])[0]


class Diary:
    """The latest calls of one rank, on all its groups."""

    def __init__(self) -> None:
        self._calls: deque[Called] = deque(maxlen=12)

    def add(self, call: Called) -> None:
        """Keep a call, note it for the other ranks, and log it."""
        self._calls.append(call)
        lines = [f"{each.key}\t{each.title}\t{each.statistics}" for each in list(self._calls)]
        call.group.backend.note("\n".join(lines) + "\n\n" + _shown(call.stack))
        log = _log[call.name in _MESSAGES]
        log.debug("%s: %s, at %s", call.title, call.statistics, call.site)
        if call.statistics.num_nan or call.statistics.num_inf:
            log.warning("%s: the input has %s, at %s", call.title, call.statistics, call.site)


_diaries: WeakKeyDictionary[World, Diary] = WeakKeyDictionary()


class Detailed:
    """A group's transport that looks at every operation before it passes it on."""

    def __init__(self, group: ProcessGroup, diary: Diary) -> None:
        self._group = group
        self._backend = group.backend
        self._diary = diary
        self._issued = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._backend, name)
        if name in _COLLECTIVES or name in _MESSAGES:
            return partial(self._run, name, operation)
        return operation

    def _run(self, name: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._called(name, args, sys._getframe(1))
        self._diary.add(call)
        try:
            result = operation(*args, **kwargs)
        except DistBackendError as error:
            explain(error, call)
            raise
        finally:
            if not kwargs.get("async_op"):
                self._issued = self._backend.sequence_number()
        return DetailedWork(result, call) if isinstance(result, Work) else result

    def _called(self, name: str, args: tuple[Any, ...], frame: FrameType) -> Called:
        group, rank = self._group, self._backend.rank
        calls: Sequence[Call] = args[0] if name == "coalesce" else [(name, args)]
        inputs = [tensor for each in calls for tensor in _inputs(*each, rank)]
        where = f"on group {group.group_name!r}"
        if name in _MESSAGES:
            peer, tag = args[1], args[2] if len(args) > 2 else 0
            ends = (rank, peer) if name == "send" else (peer, rank)
            key = f"{group.group_name} {ends[0]}>{ends[1]} {tag}"
            other = "any rank" if peer is None else f"rank {peer}"
            way = "to" if name == "send" else "from"
            title = f"{name} {way} {other} (tag {tag}) {where}"
        elif name == "monitored_barrier":
            key, title = f"{group.group_name} {name}", f"{name} {where}"
        else:
            # What has been issued may still be in the queue, and not yet counted by the backend.
            sequence = max(self._issued, self._backend.sequence_number()) + 1
            self._issued = sequence + len(calls) - 1
            key = f"{group.group_name} #{sequence}"
            names = ", ".join(sorted({each for each, _ in calls}))
            several = f" ({len(calls)} coalesced)" if name == "coalesce" else ""
            title = f"{names} #{sequence} {where}{several}"
        return Called(group, name, key, title, Statistics.of(inputs), _user_stack(frame))


class DetailedWork(Work):
    """A work whose errors say what all ranks were doing."""

    def __init__(self, work: Work, call: Called) -> None:
        self._work = work
        self._call = call

    def wait(self, timeout: Timeout | None = None) -> bool:
        try:
            return self._work.wait(timeout)
        except DistBackendError as error:
            explain(error, self._call)
            raise

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        error = self._work.exception()
        if isinstance(error, DistBackendError):
            explain(error, self._call)
        return error

    def result(self) -> list[Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()


def explain(error: DistBackendError, call: Called) -> None:
    """Add to an error what each rank of the group has put into the operation, and their stacks."""
    text = str(error)
    if _HEADING in text:
        return
    group = call.group
    notes = [Note.read(note) for note in group.backend.notes()]
    lines = [text, "", _HEADING, f"  inputs of {call.title}"]
    stacks: dict[tuple[str, str], list[int]] = {}
    for rank, note in enumerate(notes):
        lines.append(f"    {_named(group, [rank])}: {note.about(call)}")
        stacks.setdefault((note.latest, note.stack), []).append(rank)
    lines.append("  the latest call of each rank")
    for (latest, stack), ranks in stacks.items():
        if latest:
            lines.append(f"    {_named(group, ranks)}: {latest}")
            lines += [f"    {line}" for line in stack.splitlines()]
    error.args = ("\n".join(lines),)


def _named(group: ProcessGroup, ranks: Sequence[int]) -> str:
    """Name ranks of a group as its reports do, and as the world does where that differs."""
    own, world = spell(ranks), spell(group.ranks[rank] for rank in ranks)
    return own if own == world else f"{own} (global {world})"


def _inputs(name: str, args: tuple[Any, ...], rank: int) -> list[Tensor]:
    """Return the tensors that this rank gives, not those that it only gets."""
    if name == "recv" or (name == "broadcast" and args[1] != rank):
        return []
    return profiling.inputs(name, args)


def _user_stack(frame: FrameType) -> traceback.StackSummary:
    """Return the stack of the call, the latest last, up to where it entered this package."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename.startswith(_PACKAGE):
        inner = inner.f_back
    stack = traceback.StackSummary.extract(traceback.walk_stack(inner))
    stack.reverse()
    return stack


def _shown(stack: traceback.StackSummary) -> str:
    """Format a stack; of a deep one, the inner frames."""
    frames = stack.format()
    room = _STACK_LIMIT
    shown: list[str] = []
    for frame in reversed(frames):
        room -= len(frame.encode())
        if room < 0:
            shown.append(f"  ({len(frames) - len(shown)} outer frames left out)\n")
            break
        shown.append(frame)
    return "".join(reversed(shown)).rstrip()
