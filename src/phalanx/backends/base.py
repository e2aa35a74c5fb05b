"""The transport contract: what a group asks of the thing that moves its bytes."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from phalanx import bystanders
from phalanx.backends import monitored, overlaps, reduction
from phalanx.backends.overlaps import Call as Call
from phalanx.types import Deadline, ReduceOp
from phalanx.work import JoinedWork, ThreadWork, Work

# Users' tags are not negative: collectives and monitored barriers have streams of their own.
COLLECTIVE = -1
_MONITOR = -2

# The operations of the contract.
MESSAGES = frozenset({"send", "recv"})
COLLECTIVES = frozenset(
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


class GroupBackend(ABC):
    """One group's transport, as one of its ranks sees it.

    All ranks here are *group* ranks, timeouts are seconds (None: the group's default). Without
    ``async_op`` an operation returns when it is done (a receive returns its source); with it,
    a ``Work``. A transport supplies ``send``, ``recv`` and ``close``; this class derives the rest,
    simply, and what a transport does faster it overrides.

    Ordering: collectives run in the order in which they were issued, which must be the same on
    all ranks. Messages between two ranks arrive in the order they were sent, per tag.
    Threads: any thread may call. Buffers: tensors are CPU tensors with strides, possibly
    non-contiguous, empty or requiring grad; they are the operation's until it has completed.
    """

    name: str
    # Whether reductions combine the contributions in the order of the ranks, so that results have
    # the bits of `reduction.reduce`. All ranks get the same bits in any case.
    in_rank_order = True

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.global_ranks = list(range(size))  # the group that it is made for says which they are
        self._issued = 0
        self._note = ""
        self._monitored = 0
        self._lane = _Lane()

    # What a transport must supply

    @abstractmethod
    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send to ``dst``, which may be this rank itself. Negative tags must work too."""

    @abstractmethod
    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | int:
        """Receive a message of the tensor's byte count from ``src`` (None: whoever is first).

        Return the source's group rank. A timeout of zero takes only what has already arrived.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice is fine; pending works fail."""
        self._lane.close()

    # What a transport may do better

    def abort(self, reason: str) -> None:
        """Make all who wait on this group, here and on other ranks, raise ``reason``.

        Closing is what can be done without knowing the transport.
        """
        self.close()

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one has failed, also on groups yet to be made."""
        self.abort(reason)

    def describe(self, rank: int) -> str:
        """Say how a rank of the group has ended, or what it does, as far as that is known.

        A sentence that begins with "rank" and its number, or nothing.
        """
        return ""

    def sequence_number(self) -> int:
        """Return how many collectives this rank has issued."""
        return self._issued

    def note(self, text: str) -> None:
        """Leave a text where the others can read it, also while this rank hangs."""
        self._note = text

    def notes(self) -> list[str]:
        """Return what each rank has noted last, "" where there is nothing or no way to it."""
        return [self._note if rank == self.rank else "" for rank in range(self.size)]

    def history(self) -> list[dict[str, Any]]:
        """Return the last operations of this rank, the oldest first, if the transport keeps them.

        Each has ``kind`` ("collective" or "message"), ``sequence``, ``op``, ``state``, ``site`` and
        the monotonic ``posted_ns`` and ``finished_ns`` (0: not yet), and what else is known of it.
        """
        return []

    def coalesce(
        self, calls: Sequence[Call], *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Run ``(method name, arguments)`` calls in order, as one operation.

        All of them read before any of them writes, also where they share memory. The timeout is
        that of each call.
        """
        suspects = overlaps.found(calls)
        if not suspects:
            return self._run_batch(calls, timeout, async_op)
        outputs = [
            tensor
            for name, args in calls
            for tensor in overlaps.used(name, args, self.rank).written
        ]
        work = self._run_batch(overlaps.resolved(calls, suspects, self.rank), timeout, async_op)
        return None if work is None else JoinedWork([work], outputs)

    def _run_batch(
        self, calls: Sequence[Call], timeout: float | None, async_op: bool
    ) -> Work | None:
        """Run calls in order, which depend on each other in that order."""
        works = [
            getattr(self, name)(*args, timeout=timeout, async_op=async_op) for name, args in calls
        ]
        return JoinedWork(works) if async_op else None

    def copy_in_turn(
        self, output: Tensor, input: Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Copy on this rank alone, after the collectives that were issued before."""
        return self._in_turn(functools.partial(_without_grad, _copy, output, input), [], async_op)

    def broadcast(
        self, tensor: Tensor, root: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Copy root's tensor to all."""
        return self._issue([tensor], timeout, async_op, self._broadcast, tensor, root)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        squares: Tensor | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replace each tensor by the reduction of all.

        With the operation's end ``squares``, a float64 tensor of one element, holds the sum of
        squares of the result, the same bits on all ranks, which must all ask for it or none.
        """
        if squares is not None:
            reduction.check_squares(squares, tensor)
        return self._issue([tensor], timeout, async_op, self._all_reduce, tensor, op, squares)

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replace root's tensor by the reduction of all; others keep theirs."""
        return self._issue([tensor], timeout, async_op, self._reduce, tensor, tensor, root, op)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's input to everybody's outputs[i]; ranks may differ in shape."""
        (input,) = overlaps.spared([input], outputs, self.rank)
        return self._issue(outputs, timeout, async_op, self._all_gather, outputs, input)

    def all_gather_single(
        self, output: Tensor, input: Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Copy all inputs, one behind the other, to everybody's output."""
        if output.is_contiguous():  # else its parts are not written before all are there
            (input,) = overlaps.spared([input], _parts(output.detach(), self.size), self.rank)
        return self._issue([output], timeout, async_op, self._all_gather_single, output, input)

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's input to root's outputs[i]; other ranks pass None."""
        (input,) = overlaps.spared([input], outputs or [], self.rank)
        return self._issue(outputs or [], timeout, async_op, self._gather, outputs, input, root)

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Copy root's inputs[i] to rank i's output; other ranks pass None."""
        return self._issue([output], timeout, async_op, self._scatter, output, inputs, root)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Put the reduction of everybody's inputs[i] into rank i's output; shapes may differ."""
        inputs = overlaps.spared(inputs, [output])
        return self._issue([output], timeout, async_op, self._reduce_scatter, output, inputs, op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce the inputs and leave the i-th part, of equal parts, in rank i's output."""
        (input,) = overlaps.spared([input], [output])
        return self._issue(
            [output], timeout, async_op, self._reduce_scatter_single, output, input, op
        )

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Copy rank i's inputs[j] to rank j's outputs[i]; shapes may differ."""
        inputs = overlaps.spared(inputs, outputs)
        return self._issue(outputs, timeout, async_op, self._all_to_all, outputs, inputs)

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
        """Do an all_to_all of slices along the first dimension (None: equal slices)."""
        outputs = slices(output, output_splits, self.size)
        (input,) = overlaps.spared([input], [output])
        inputs = slices(input, input_splits, self.size)
        return self._issue([output], timeout, async_op, self._all_to_all, outputs, inputs)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Work | None:
        """Return when all ranks have come here."""
        return self._issue([], timeout, async_op, self._barrier)

    def monitored_barrier(
        self, *, timeout: float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Do a barrier in which rank 0 names who is missing: the first, or all of them."""
        limit = self.timeout if timeout is None else timeout
        self._monitored += 1
        if self.rank == 0:
            monitored.lead(self, self._monitored, _MONITOR, limit, wait_all_ranks)
        else:
            monitored.attend(self, self._monitored, _MONITOR, limit)

    # The derived algorithms. They run one at a time and talk in the collectives' own stream.

    def _broadcast(self, deadline: Deadline, tensor: Tensor, root: int) -> None:
        if self.rank != root:
            self._take(tensor, root, deadline)
        else:
            self._give([(tensor, peer) for peer in self._others()], deadline)

    def _reduce(
        self, deadline: Deadline, output: Tensor, input: Tensor, root: int, op: ReduceOp
    ) -> None:
        """Pass a growing total from rank to rank: the order of summation is the ranks' order."""
        total = reduction.contribution(input, op)
        if self.rank > 0:
            own, total = total, torch.empty_like(total)
            self._take(total, self.rank - 1, deadline)
            reduction.combine(total, own, op)
        if self.rank < self.size - 1:
            self._give([(total, self.rank + 1)], deadline)
        elif root != self.rank:
            self._give([(total, root)], deadline)
        if self.rank == root:
            if root != self.size - 1:
                self._take(total, self.size - 1, deadline)
            reduction.finish(total, op, self.size)
            output.copy_(total.view(output.shape))

    def _all_reduce(
        self, deadline: Deadline, tensor: Tensor, op: ReduceOp, squares: Tensor | None
    ) -> None:
        self._reduce(deadline, tensor, tensor, 0, op)
        self._broadcast(deadline, tensor, 0)
        if squares is not None:
            squares.fill_(reduction.sum_of_squares(tensor))

    def _all_gather(self, deadline: Deadline, outputs: Sequence[Tensor], input: Tensor) -> None:
        self._all_to_all(deadline, outputs, [input] * self.size)

    def _all_gather_single(self, deadline: Deadline, output: Tensor, input: Tensor) -> None:
        whole = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        self._all_gather(deadline, _parts(whole, self.size), input)
        if whole is not output:
            output.copy_(whole)

    def _gather(
        self, deadline: Deadline, outputs: Sequence[Tensor] | None, input: Tensor, root: int
    ) -> None:
        if self.rank != root:
            self._give([(input, root)], deadline)
            return
        assert outputs is not None
        for peer in self._others():
            self._take(outputs[peer], peer, deadline)
        _copy(outputs[root], input)

    def _scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        if self.rank != root:
            self._take(output, root, deadline)
            return
        assert inputs is not None
        self._give([(inputs[peer], peer) for peer in self._others()], deadline)
        _copy(output, inputs[root])

    def _reduce_scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp
    ) -> None:
        for root, input in enumerate(inputs):
            self._reduce(deadline, output, input, root, op)

    def _reduce_scatter_single(
        self, deadline: Deadline, output: Tensor, input: Tensor, op: ReduceOp
    ) -> None:
        self._reduce_scatter(deadline, output, _parts(input, self.size), op)

    def _all_to_all(
        self, deadline: Deadline, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        # Everybody sends before anybody waits, so no order of the receives can block.
        finish = self._begin([(inputs[peer], peer) for peer in self._others()], deadline)
        for peer in self._others():
            self._take(outputs[peer], peer, deadline)
        _copy(outputs[self.rank], inputs[self.rank])
        finish()

    def _barrier(self, deadline: Deadline) -> None:
        token = torch.zeros((), dtype=torch.uint8)
        self._gather(deadline, [token] * self.size, token, 0)
        self._broadcast(deadline, token, 0)

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _begin(
        self, messages: Sequence[tuple[Tensor, int]], deadline: Deadline
    ) -> Callable[[], None]:
        """Begin to send; return what waits until all has left."""
        sends = [
            self.send(tensor.detach(), peer, COLLECTIVE, async_op=True) for tensor, peer in messages
        ]

        def finish() -> None:
            for send in sends:
                assert send is not None
                send.wait(deadline.left())

        return finish

    def _give(self, messages: Sequence[tuple[Tensor, int]], deadline: Deadline) -> None:
        for tensor, peer in messages:
            self.send(tensor.detach(), peer, COLLECTIVE, timeout=deadline.left())

    def _take(self, tensor: Tensor, peer: int, deadline: Deadline) -> None:
        self.recv(tensor.detach(), peer, COLLECTIVE, timeout=deadline.left())

    def _issue(
        self,
        outputs: Sequence[Tensor],
        timeout: float | None,
        async_op: bool,
        step: Callable[..., None],
        *args: Any,
    ) -> Work | None:
        """Run ``step(deadline, *args)`` after all that was issued before it."""
        self._issued += 1
        deadline = Deadline(self.timeout if timeout is None else timeout)
        call = functools.partial(_without_grad, step, deadline, *args)
        return self._in_turn(call, outputs, async_op)

    def _in_turn(
        self, call: Callable[[], None], outputs: Sequence[Tensor], async_op: bool
    ) -> Work | None:
        """Make a call after all that was issued before it."""
        if not async_op and self._lane.idle():
            call()
            return None
        work = self._lane.put(ThreadWork(call, outputs))
        if async_op:
            return work
        work.wait()
        return None


class _Lane:
    """An in-order queue of works and the thread that runs them, made when first needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[ThreadWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ThreadWork | None = None
        self._lock = threading.Lock()

    def idle(self) -> bool:
        """Say whether all that was put here has run."""
        return self._last is None or self._last.is_completed()

    def put(self, work: ThreadWork) -> ThreadWork:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="phalanx-lane", daemon=True)
                self._thread = bystanders.mark(thread)
                self._thread.start()
            self._last = work
            self._queue.put(work)
        return work

    def close(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()


def _without_grad(step: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():
        step(*args)


def _copy(output: Tensor, input: Tensor) -> None:
    """Copy elements in order, whatever the two shapes."""
    output.copy_(input.reshape(output.shape))


def _parts(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Cut into ``size`` flat parts; views if the tensor is contiguous."""
    return tensor.reshape(size, tensor.numel() // size).unbind(0)


def slices(tensor: Tensor, splits: Sequence[int] | None, size: int) -> Sequence[Tensor]:
    """Cut along the first dimension, at ``splits`` or evenly."""
    if tensor.dim() == 0:
        return [tensor]
    return torch.split(tensor, list(splits or [tensor.shape[0] // size] * size))
