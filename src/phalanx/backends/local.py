"""The backend "phalanx": ranks on one machine, as processes or threads, on the native engine."""

from __future__ import annotations

import atexit
import sys
import traceback
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, cast

import torch
from torch import Tensor

from phalanx import _native, bystanders, errors, forks
from phalanx.backends import overlaps
from phalanx.backends.base import Call, GroupBackend
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistBackendError, DistTimeout, PeerFailed, StoreTimeout
from phalanx.types import Deadline, ReduceOp, Timeout, seconds
from phalanx.work import JoinedWork, Work

_native.set_bystanders(bystanders.count)

_GIVEN_UP = "!"  # in place of a board's ticket: why there is none

_LOOK = 0.2  # seconds between looks at a rank that others wait for

_open_backends: weakref.WeakSet[LocalBackend] = weakref.WeakSet()


def create(options: BackendOptions, pg_options: object = None) -> LocalBackend:
    """Make one rank's end of a group; all its members must do so."""
    roster, index = _roster(options)
    members = options.global_ranks if index else list(range(options.group_size))
    creator = options.group_rank == 0
    ticket = "" if creator else _announced(options, roster, members)
    name = f"{options.group_id}: {options.group_desc}" if options.group_desc else options.group_id
    group = _native.Group(roster, members, options.group_rank, name, options.timeout, ticket)
    if creator:
        options.store.set("board", group.ticket)
    try:
        group.attend(creator)
    except DistBackendError as error:
        if creator:
            options.store.set("board", f"{_GIVEN_UP}{type(error).__name__} {error}")
        raise
    return LocalBackend(group, roster, members, options)


def _roster(options: BackendOptions) -> tuple[_native.Roster, bool]:
    """Return the world's roster, or one of the group's own where the world has none.

    The second value says that the roster counts ranks as the world does.
    """
    if "roster" in options.shared:
        return options.shared["roster"], True
    rank, size = options.group_rank, options.group_size
    if rank == 0:
        roster = _native.Roster.create(size, threads=options.threads or size == 1)
        options.store.set("roster", roster.ticket)
    else:
        options.await_key("roster")
        roster = _native.Roster.open(options.store.get("roster").decode())
    roster.join(rank, options.timeout, options.shared.get("pids", []))
    whole_world = size == options.world_size
    if whole_world:
        options.shared["roster"] = roster
    return roster, whole_world


def _announced(options: BackendOptions, roster: _native.Roster, members: Sequence[int]) -> str:
    """Return the ticket of the board that the first member makes, unless it fails before that."""
    deadline = Deadline(options.timeout)
    creator, me = members[0], members[options.group_rank]
    what = f"the making of group {options.group_id!r}"
    waiting = _native.Waiting(roster, me, options.group_id, what, [creator], options.timeout)
    with closing(waiting):
        while True:
            with suppress(StoreTimeout):
                options.store.wait(["board"], min(deadline.left(), _LOOK))
            if options.store.check(["board"]):
                return _ticket(str(options.store.get("board").decode()), what, creator)
            end = roster.obituary(creator, ask_system=True)
            waiting.check()  # after that: who fails over a deadlock does so when all know of it
            if end:
                raise PeerFailed(f"{what}: {end}")
            if deadline.left() <= 0:
                raise DistTimeout(
                    f"{what}: rank {creator} has not called for it within {options.timeout:g} s"
                )


def _ticket(word: str, what: str, creator: int) -> str:
    """Return the ticket of a board, or raise as its creator did if it has given up."""
    if not word.startswith(_GIVEN_UP):
        return word
    kind, _, why = word.removeprefix(_GIVEN_UP).partition(" ")
    raise getattr(errors, kind)(f"{what} was given up by rank {creator}: {why}")


class NativeWork(Work):
    """An operation that the engine runs on a thread of its own."""

    def __init__(self, pending: _native.Pending, outputs: Sequence[Tensor]) -> None:
        self._pending = pending
        self._outputs = list(outputs)

    def wait(self, timeout: Timeout | None = None) -> bool:
        self._pending.wait(-1.0 if timeout is None else seconds(timeout))
        return True

    def is_completed(self) -> bool:
        return self._pending.done()

    def exception(self) -> BaseException | None:
        try:
            self._pending.check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        source = self._pending.source()
        return super().source_rank() if source < 0 else source


class LocalBackend(GroupBackend):
    """A group on the native engine."""

    name = "phalanx"

    def __init__(
        self,
        group: _native.Group,
        roster: _native.Roster,
        members: Sequence[int],
        options: BackendOptions,
    ) -> None:
        self.engine = group
        super().__init__(options.group_rank, options.group_size, options.timeout)
        self._roster = roster
        self._members = members
        self._member = members[options.group_rank]
        _open_backends.add(self)

    @property
    def timeout(self) -> float:
        return self.engine.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self.engine.timeout = timeout

    def close(self) -> None:
        super().close()
        _open_backends.discard(self)
        self.engine.close()

    def abort(self, reason: str) -> None:
        self.engine.abort(reason)

    def fail(self, reason: str) -> None:
        self._roster.fail(self._member, reason)
        self.engine.alarm()

    def leave(self) -> None:
        """Tell the other ranks that this one has ended."""
        self._roster.leave(self._member)
        self.engine.alarm()

    def describe(self, rank: int) -> str:
        return self.engine.describe(rank)

    def sequence_number(self) -> int:
        return self.engine.sequence

    def note(self, text: str) -> None:
        self._roster.note(self._member, text)

    def notes(self) -> list[str]:
        notes = self._roster.notes()
        return [notes[member] for member in self._members]

    def history(self) -> list[dict[str, Any]]:
        return self.engine.history()

    def _run_batch(
        self, calls: Sequence[Call], timeout: float | None, async_op: bool
    ) -> Work | None:
        # Each call says which of how many it is, so that ranks whose batches differ in length learn
        # that at the first one.
        batch = sum(name != overlaps.COPY for name, _ in calls) if len(calls) > 1 else 0
        batch *= batch > 1
        works, part = [], 0
        try:
            for name, args in calls:
                part += name != overlaps.COPY
                _native.batch(part, batch)
                works.append(getattr(self, name)(*args, timeout=timeout, async_op=async_op))
        finally:
            _native.batch(0, 0)
        return JoinedWork(works) if async_op else None

    def copy_in_turn(
        self, output: Tensor, input: Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        return _work(self.engine.copy_in_turn(output, input, async_op), ())

    # Collectives

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Work | None:
        return _work(self.engine.barrier(_limit(timeout), async_op), ())

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        squares: Tensor | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        limit = -1.0 if timeout is None else timeout
        if squares is None:
            pending = self.engine.all_reduce(tensor, op.code, _factor(op), limit, async_op)
        else:
            pending = self.engine.all_reduce_measured(
                tensor, op.code, _factor(op), limit, async_op, squares
            )
        return None if pending is None else NativeWork(pending, (tensor,))

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        limit = _limit(timeout)
        pending = self.engine.reduce(tensor, root, op.code, _factor(op), limit, async_op)
        return _work(pending, (tensor,))

    def broadcast(
        self, tensor: Tensor, root: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        return _work(self.engine.broadcast(tensor, root, _limit(timeout), async_op), (tensor,))

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        return _work(self.engine.all_gather(outputs, input, _limit(timeout), async_op), outputs)

    def all_gather_single(
        self, output: Tensor, input: Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        pending = self.engine.all_gather(self._parts(output), input, _limit(timeout), async_op)
        return _work(pending, (output,))

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        pending = self.engine.gather(outputs, input, root, _limit(timeout), async_op)
        return _work(pending, outputs or ())

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        pending = self.engine.scatter(output, inputs, root, _limit(timeout), async_op)
        return _work(pending, (output,))

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        limit = _limit(timeout)
        pending = self.engine.reduce_scatter(output, inputs, op.code, _factor(op), limit, async_op)
        return _work(pending, (output,))

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        parts, limit = self._parts(input), _limit(timeout)
        pending = self.engine.reduce_scatter(output, parts, op.code, _factor(op), limit, async_op)
        return _work(pending, (output,))

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        limit = _limit(timeout)
        pending = self.engine.all_to_all(outputs, inputs, inputs[self.rank], limit, async_op)
        return _work(pending, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        outputs = self._parts(output, output_splits)
        inputs = self._parts(input, input_splits)
        pending = self.engine.all_to_all(outputs, inputs, input, _limit(timeout), async_op)
        return _work(pending, (output,))

    # Messages

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        return _work(self.engine.send(tensor, dst, tag, _limit(timeout), async_op), (tensor,))

    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | int:
        source = -1 if src is None else src
        got = self.engine.recv(tensor, source, tag, _limit(timeout), async_op)
        return NativeWork(got, (tensor,)) if async_op else cast(int, got)

    def _parts(self, tensor: Tensor, splits: Sequence[int] | None = None) -> Any:
        """Return a tensor as one part per rank along dim 0; equal parts are cut by the engine."""
        if splits:
            return torch.split(tensor, list(splits))
        if tensor.is_contiguous():
            return tensor
        return tensor.chunk(self.size)


def _limit(timeout: float | None) -> float:
    return -1.0 if timeout is None else timeout


def _factor(op: ReduceOp) -> float:
    return 1.0 if op.factor is None else op.factor


def _work(pending: _native.Pending | None, outputs: Sequence[Tensor]) -> NativeWork | None:
    return None if pending is None else NativeWork(pending, outputs)


# A forked child is not this rank, and does not speak for it.
forks.after_fork_in_child(_open_backends.clear)


@atexit.register
def _leave_at_exit() -> None:
    # A rank that ends without destroying its groups must not keep the others waiting, and one that
    # ends by an exception (which Python keeps in sys.last_value) says so.
    error = getattr(sys, "last_value", None)
    for backend in list(_open_backends):
        if error is None:
            backend.leave()
        else:
            story = "".join(traceback.format_exception(error)).rstrip()
            backend.fail(f"ended by an uncaught exception\n{story}")
