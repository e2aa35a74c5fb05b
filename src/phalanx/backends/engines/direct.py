"""Whole operations on a process group of torch's: for NCCL, and any other class that torch has.

The group's own collectives are used, with its own order of summation. What it lacks is made of
its broadcasts and reductions.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from phalanx.backends import overlaps, reduction
from phalanx.backends.base import Call, GroupBackend, slices
from phalanx.backends.engines import sites
from phalanx.backends.engines.helpers import Helpers
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistBackendError, DistTimeout, PeerFailed
from phalanx.types import ReduceOp, Timeout, seconds
from phalanx.work import CompletedWork, Work

# What engines say when the other end is gone or late: they have no error classes of their own.
_GONE = ("closed by peer", "reset by peer", "remote process exited", "broken pipe", "refused")
_LATE = ("timed out", "timeout")
_CLOSE_SECONDS = 5.0


class DirectEngine(GroupBackend):
    """One of torch's process groups, for tensors of one device type.

    Whether tags tell messages apart, and whether a receive may come from any rank, is up to the
    group's class: NCCL has neither.
    """

    def __init__(
        self, name: str, device: str, group: Any, options: BackendOptions, classes: Any
    ) -> None:
        super().__init__(options.group_rank, options.group_size, options.timeout)
        self.name = name
        self.device = device
        self.global_ranks = list(options.global_ranks)
        self._group: Any = group
        self._group_id = options.group_id
        self._classes = classes  # torch's, of operations' options
        self._helpers = Helpers(f"phalanx-{name}")
        self._reason = ""

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
        what = f"send to rank {self._named(dst)}"
        started = self._start(what, "send", [tensor.detach().contiguous()], dst, tag)
        return self._end(what, [started], [tensor], timeout, async_op)

    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | int:
        whole = _Whole([tensor])
        if src is None:
            what = "recv from any rank"
            started = self._start(what, "recv_anysource", whole.parts, tag)
        else:
            what = f"recv from rank {self._named(src)}"
            started = self._start(what, "recv", whole.parts, src, tag)
        work = self._work(what, [started], [tensor], timeout, whole, src)
        if async_op:
            return work
        work.wait()
        return work.source_rank()

    # Collectives

    def broadcast(
        self, tensor: Tensor, root: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        whole = _Whole([tensor])
        started = self._broadcast_of("broadcast", whole.parts[0], root)
        self._issued += 1
        return self._end("broadcast", [started], [tensor], timeout, async_op, whole)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        squares: Tensor | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole([tensor])
        told = self._classes.AllreduceOptions()
        told.reduceOp = self._op(op)
        started = self._start("all_reduce", "allreduce", whole.parts, told)
        self._issued += 1
        if squares is not None:
            reduction.check_squares(squares, tensor)
            work = self._work("all_reduce", [started], [tensor], timeout, whole)
            work.wait()
            squares.fill_(reduction.sum_of_squares(tensor))
            return work if async_op else None
        return self._end("all_reduce", [started], [tensor], timeout, async_op, whole)

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        # Engines may use the tensor of a rank that is not the root as scratch.
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        outputs = _Whole([tensor], [copy]) if self.rank == root else None
        started = self._reduce_of("reduce", copy, root, op)
        self._issued += 1
        return self._end("reduce", [started], [tensor], timeout, async_op, outputs)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole(outputs)
        given = input.detach().reshape(-1)
        # By sizes, on which all ranks agree: shapes are each rank's own.
        if all(output.numel() == given.numel() for output in outputs):
            told = self._classes.AllgatherOptions()
            started = [self._start("all_gather", "allgather", [whole.flat()], [given], told)]
        else:
            whole.parts[self.rank].copy_(given.reshape(whole.parts[self.rank].shape))
            started = [
                self._broadcast_of("all_gather", part, root)
                for root, part in enumerate(whole.parts)
            ]
        self._issued += 1
        return self._end("all_gather", started, outputs, timeout, async_op, whole)

    def all_gather_single(
        self, output: Tensor, input: Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        whole = _Whole([output])
        parts = list(whole.parts[0].view(self.size, input.numel()).unbind(0))
        self._issued += 1
        given = input.detach().reshape(-1)
        told = self._classes.AllgatherOptions()
        started = self._start("all_gather_single", "allgather", [parts], [given], told)
        return self._end("all_gather_single", [started], [output], timeout, async_op, whole)

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole(outputs or [])
        told = self._classes.GatherOptions()
        told.rootRank = root
        given = input.detach().reshape(-1)
        received = [whole.flat()] if self.rank == root else []
        started = self._start("gather", "gather", received, [given], told)
        self._issued += 1
        return self._end("gather", [started], outputs or (), timeout, async_op, whole)

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole([output])
        told = self._classes.ScatterOptions()
        told.rootRank = root
        given = [[each.detach().reshape(-1) for each in inputs]] if inputs else []
        started = self._start("scatter", "scatter", whole.flat(), given, told)
        self._issued += 1
        return self._end("scatter", [started], [output], timeout, async_op, whole)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        copies = [each.detach().clone(memory_format=torch.contiguous_format) for each in inputs]
        self._issued += 1
        started = [
            self._reduce_of("reduce_scatter", copy, root, op) for root, copy in enumerate(copies)
        ]
        whole = _Whole([output], [copies[self.rank]])
        return self._end("reduce_scatter", started, [output], timeout, async_op, whole)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole([output])
        told = self._classes.ReduceScatterOptions()
        told.reduceOp = self._op(op)
        given = input.detach().contiguous().reshape(-1)
        taken = whole.parts[0].reshape(-1)
        self._issued += 1
        started = self._start("reduce_scatter_single", "_reduce_scatter_base", taken, given, told)
        return self._end("reduce_scatter_single", [started], [output], timeout, async_op, whole)

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        whole = _Whole(outputs)
        given = [each.detach().reshape(-1) for each in inputs]
        counts = [part.numel() for part in whole.parts]
        received = torch.cat([part.reshape(-1) for part in whole.parts])
        sent = torch.cat(given)
        told = self._classes.AllToAllOptions()
        sizes = [each.numel() for each in given]
        started = self._start("all_to_all", "alltoall_base", received, sent, counts, sizes, told)
        self._issued += 1
        whole.parts = list(torch.split(received, counts))
        return self._end("all_to_all", [started], outputs, timeout, async_op, whole)

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
        parts = slices(output, output_splits, self.size)
        given = slices(input, input_splits, self.size)
        return self.all_to_all(parts, given, timeout=timeout, async_op=async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Work | None:
        self._issued += 1
        started = self._start("barrier", "barrier", self._classes.BarrierOptions())
        return self._end("barrier", [started], (), timeout, async_op)

    def coalesce(
        self, calls: Sequence[Call], *, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        if not (async_op and overlaps.found(calls)):
            return super().coalesce(calls, timeout=timeout, async_op=async_op)
        # Copies between calls have to wait for them, and these have no queue to wait in.
        super().coalesce(calls, timeout=timeout)
        return CompletedWork(
            [each for call in calls for each in overlaps.used(*call, self.rank).written]
        )

    # What they are made of

    def _broadcast_of(self, what: str, tensor: Tensor, root: int) -> Any:
        told = self._classes.BroadcastOptions()
        told.rootRank = root
        return self._start(what, "broadcast", [tensor], told)

    def _reduce_of(self, what: str, tensor: Tensor, root: int, op: ReduceOp) -> Any:
        told = self._classes.ReduceOptions()
        told.rootRank, told.reduceOp = root, self._op(op)
        return self._start(what, "reduce", [tensor], told)

    def _op(self, op: ReduceOp) -> Any:
        if op.factor is not None:
            return self._classes._make_nccl_premul_sum(op.factor)
        return getattr(self._classes.ReduceOp, op.name)

    def _named(self, peer: int) -> int:
        return self.global_ranks[peer]

    def _start(self, what: str, method: str, *args: Any) -> Any:
        """Call a method of torch's group; errors say what it was for."""
        if self._group is None or self._reason:
            why = self._reason or "the group was closed"
            raise DistBackendError(f"{self._title(what)}: {why}")
        try:
            return getattr(self._group, method)(*args)
        except RuntimeError as error:
            raise self._translated(self._title(what), error) from error

    def _work(
        self,
        what: str,
        started: Sequence[Any],
        outputs: Sequence[Tensor],
        timeout: float | None,
        whole: _Whole | None = None,
        source: int | None = None,
    ) -> TorchWork:
        limit = self.timeout if timeout is None else timeout
        return TorchWork(self, self._title(what), started, outputs, limit, whole, source)

    def _end(
        self,
        what: str,
        started: Sequence[Any],
        outputs: Sequence[Tensor],
        timeout: float | None,
        async_op: bool,
        whole: _Whole | None = None,
    ) -> Work | None:
        work = self._work(what, started, outputs, timeout, whole)
        if async_op:
            return work
        work.wait()
        return None

    def _title(self, what: str) -> str:
        """Return an operation as messages name it: with the rank, the group and the line."""
        site = sites.here()
        me = f"rank {self.global_ranks[self.rank]} of group {self._group_id!r} ({self.name})"
        return f"{what} on {me}{f', {site}' if site else ''}"

    def _translated(self, title: str, error: BaseException) -> DistBackendError:
        """Return an engine's error as one of ours."""
        text = str(error).partition("\n")[0]
        if self._reason:
            return DistBackendError(f"{title}: {self._reason}")
        if has_gone(error):
            return PeerFailed(f"{title}: another rank has died or cannot be reached ({text})")
        if any(word in text.lower() for word in _LATE):
            return DistTimeout(f"{title}: {text}; the group cannot be used any more")
        return DistBackendError(f"{title}: {text}")

    def watch(self, started: Any, done: threading.Event, errors: list[BaseException]) -> None:
        """Have an event come when an operation of the engine has ended."""

        def wait() -> None:
            try:
                started.wait()
            except BaseException as error:
                errors.append(error)
            done.set()

        self._helpers.run(wait)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or f"the group was ended: {reason}"
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()

    def close(self) -> None:
        super().close()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.shutdown()
            self._helpers.close(_CLOSE_SECONDS)


def has_gone(error: BaseException) -> bool:
    """Say whether an engine's error is about a connection whose other end is gone."""
    return any(word in str(error).partition("\n")[0].lower() for word in _GONE)


class TorchWork(Work):
    """Operations of a process group of torch's, seen as one.

    On the CPU a wait is a thread's, so that whoever waits can be interrupted; on other devices the
    engine's own wait puts the operation before what the current stream does next.
    """

    def __init__(
        self,
        engine: DirectEngine,
        title: str,
        started: Sequence[Any],
        outputs: Sequence[Tensor],
        limit: float,
        whole: _Whole | None,
        source: int | None,
    ) -> None:
        self._engine = engine
        self._title = title
        self._started = list(started)
        self._outputs = list(outputs)
        self._limit = limit
        self._whole = whole
        self._source = source
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._finished = False
        self._events: list[tuple[threading.Event, list[BaseException]]] = []
        if engine.device == "cpu":
            for work in self._started:
                done: tuple[threading.Event, list[BaseException]] = (threading.Event(), [])
                self._events.append(done)
                engine.watch(work, *done)

    def wait(self, timeout: Timeout | None = None) -> bool:
        limit = self._limit if timeout is None else seconds(timeout)
        if not self._events:
            try:
                for work in self._started:
                    work.wait(timedelta(seconds=limit)) if timeout is not None else work.wait()
            except RuntimeError as error:
                self._error = self._engine._translated(self._title, error)
        for done, _ in self._events:
            if not done.wait(limit):
                raise DistTimeout(f"{self._title}: still running after a wait of {limit:g} s")
        self._finish()
        if self._error is not None:
            raise self._error
        return True

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._finished = True
            error = next((errors[0] for _, errors in self._events if errors), None)
            if error is not None:
                self._error = self._engine._translated(self._title, error)
            elif self._error is None:
                if self._whole is not None:
                    self._whole.fill()
                if self._source is None and len(self._started) == 1:
                    with suppress(RuntimeError):
                        self._source = self._started[0]._source_rank()

    def is_completed(self) -> bool:
        if self._events:
            complete = all(done.is_set() for done, _ in self._events)
        else:
            complete = all(work.is_completed() for work in self._started)
        if complete:
            self._finish()
        return complete

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source


class _Whole:
    """Contiguous stand-ins for outputs, copied back when the operation has ended."""

    def __init__(self, outputs: Sequence[Tensor], parts: Sequence[Tensor] | None = None) -> None:
        self._outputs = [output.detach() for output in outputs]
        if parts is None:
            parts = [output.contiguous() for output in self._outputs]
        self.parts = list(parts)

    def flat(self) -> list[Tensor]:
        """Return the stand-ins in one dimension, which engines want all alike."""
        return [part.view(-1) for part in self.parts]

    def fill(self) -> None:
        for output, part in zip(self._outputs, self.parts, strict=True):
            if part is not output:
                output.copy_(part.reshape(output.shape))
