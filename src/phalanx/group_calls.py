"""The operations as methods of a group, in the forms that torch's ProcessGroup has.

Each takes its options as an object of its class in `phalanx.options`, or as torch's; or, in short,
what it most often needs. Tensors are given in lists, or single where there is one. Ranks are group
ranks. A method returns a ``Work``, and at once unless ``asyncOp`` of the options is False.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from phalanx import options
from phalanx.backends import reduction
from phalanx.backends.base import GroupBackend
from phalanx.backends.limits import Limited
from phalanx.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from phalanx.profiling import Collecting
from phalanx.types import ReduceOp, Timeout
from phalanx.work import CompletedWork, Work

if TYPE_CHECKING:
    from phalanx.groups import ProcessGroup

Kind = TypeVar("Kind", bound=options._Options)
F = TypeVar("F", bound=Callable[..., Work])
Tensors = Tensor | Sequence[Tensor]


def _also_named(**names: str) -> Callable[[F], F]:
    """Let a method take arguments under the other names that torch has for them."""

    def named(method: F) -> F:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            for other, name in names.items():
                if other in kwargs:
                    kwargs[name] = kwargs.pop(other)
            return method(*args, **kwargs)

        return cast(F, called)

    return named


class GroupCalls:
    """The part of a group that issues operations on it."""

    transport: GroupBackend

    # Collectives

    @_also_named(tensor="tensors")
    def allreduce(
        self,
        tensors: Tensors,
        opts: AllreduceOptions | ReduceOp | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> Work:
        """Reduce a tensor on all members; of several, the reduction of all is written to each."""
        told = _read(AllreduceOptions, "allreduce", opts, timeout, reduceOp=op)
        group, given = self.within(options.limit(told.timeout)), _listed(tensors)
        if len(given) == 1:
            work = _functions().all_reduce(given[0], told.reduceOp, group, told.asyncOp)
            return work or CompletedWork(given)
        return _all_reduce_together(group, given, ReduceOp(told.reduceOp))

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> Work:
        """Reduce each of several tensors on all members, as one operation."""
        told = _read(AllreduceCoalescedOptions, "allreduce_coalesced", opts)
        calls = [(tensor, told.reduceOp) for tensor in tensors]
        return self._coalesced("all_reduce", calls, told)

    @_also_named(tensor="tensors")
    def broadcast(
        self,
        tensors: Tensors,
        opts: BroadcastOptions | int | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the tensor of group rank ``root`` to all tensors of all members."""
        told = _read(BroadcastOptions, "broadcast", opts, timeout, rootRank=root)
        group, given = self.within(options.limit(told.timeout)), _listed(tensors)
        _check_index(told.rootTensor, given, "broadcast")
        source = given[told.rootTensor]
        is_async = told.asyncOp and len(given) == 1
        work = _functions().broadcast(source, None, group, is_async, told.rootRank)
        with torch.no_grad():
            for tensor in given:
                if tensor is not source:
                    tensor.copy_(source)
        return work or CompletedWork(given)

    @_also_named(tensor="tensors")
    def reduce(
        self,
        tensors: Tensors,
        opts: ReduceOptions | int | None = None,
        op: ReduceOp | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Reduce a tensor on group rank ``root``."""
        told = _read(ReduceOptions, "reduce", opts, timeout, rootRank=root, reduceOp=op)
        group, tensor = self.within(options.limit(told.timeout)), _only(tensors, "reduce")
        _check_index(told.rootTensor, [tensor], "reduce")
        work = _functions().reduce(tensor, None, told.reduceOp, group, told.asyncOp, told.rootRank)
        return work or CompletedWork([tensor])

    @_also_named(input_tensor="input_tensors")
    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        input_tensors: Tensors,
        opts: AllgatherOptions | Timeout | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copy the tensor of member i to everybody's i-th output."""
        told = _read(AllgatherOptions, "allgather", opts, timeout)
        group = self.within(options.limit(told.timeout))
        outputs, tensor = _lists(output_tensors), _only(input_tensors, "allgather")
        work = _functions().all_gather(outputs, tensor, group, told.asyncOp)
        return work or CompletedWork(outputs)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """Copy the tensors of all members, one behind the other, to everybody's output."""
        told = _read(AllgatherOptions, "all_gather_single", opts)
        group = self.within(options.limit(told.timeout))
        work = _functions().all_gather_single(output, input, group, told.asyncOp)
        return work or CompletedWork([output])

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Copy the k-th tensor of member i to everybody's ``output_lists[i][k]``."""
        told = _read(AllgatherOptions, "allgather_coalesced", opts)
        group = self.within(options.limit(told.timeout))
        calls = _functions().all_gather_calls(output_lists, input_list, group.size())
        work = _functions().active(group).coalesce(calls, async_op=told.asyncOp)
        return work or CompletedWork([each for _, (outputs, _) in calls for each in outputs])

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Do several ``all_gather_single`` as one operation."""
        told = _read(AllgatherOptions, "all_gather_single_coalesced", opts)
        pairs = list(zip(outputs, inputs, strict=True))
        return self._coalesced("all_gather_single", pairs, told)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_also_named(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        input_tensors: Tensors,
        opts: GatherOptions | int | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the tensor of member i to the i-th output of ``root``; others have none."""
        told = _read(GatherOptions, "gather", opts, timeout, rootRank=root)
        group = self.within(options.limit(told.timeout))
        outputs, tensor = _lists(output_tensors), _only(input_tensors, "gather")
        work = _functions().gather(tensor, outputs, None, group, told.asyncOp, told.rootRank)
        return work or CompletedWork(outputs)

    @_also_named(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: ScatterOptions | int | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the i-th input of ``root``, which alone has any, to member i."""
        told = _read(ScatterOptions, "scatter", opts, timeout, rootRank=root)
        group = self.within(options.limit(told.timeout))
        tensor, inputs = _only(output_tensors, "scatter"), _lists(input_tensors)
        work = _functions().scatter(tensor, inputs, None, group, told.asyncOp, told.rootRank)
        return work or CompletedWork([tensor])

    @_also_named(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: ReduceScatterOptions | ReduceOp | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> Work:
        """Put the reduction of everybody's i-th input into the output of member i."""
        told = _read(ReduceScatterOptions, "reduce_scatter", opts, timeout, reduceOp=op)
        group = self.within(options.limit(told.timeout))
        tensor, inputs = _only(output_tensors, "reduce_scatter"), _lists(input_tensors)
        work = _functions().reduce_scatter(tensor, inputs, told.reduceOp, group, told.asyncOp)
        return work or CompletedWork([tensor])

    def reduce_scatter_single(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Reduce everybody's input and put the i-th equal part into the output of member i."""
        told = _read(ReduceScatterOptions, "reduce_scatter_single", opts)
        group = self.within(options.limit(told.timeout))
        work = _functions().reduce_scatter_single(
            outputTensor, inputTensor, told.reduceOp, group, told.asyncOp
        )
        return work or CompletedWork([outputTensor])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Do several ``reduce_scatter_single`` as one operation."""
        told = _read(ReduceScatterOptions, "reduce_scatter_single_coalesced", opts)
        calls = [(*pair, told.reduceOp) for pair in zip(outputs, inputs, strict=True)]
        return self._coalesced("reduce_scatter_single", calls, told)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: AllToAllOptions | Timeout | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copy the j-th input of member i to the i-th output of member j."""
        told = _read(AllToAllOptions, "alltoall", opts, timeout)
        group, outputs = self.within(options.limit(told.timeout)), list(output_tensors)
        work = _functions().all_to_all(outputs, list(input_tensors), group, told.asyncOp)
        return work or CompletedWork(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions | Timeout | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Do an ``alltoall`` of slices of rows; no split sizes mean slices of one size."""
        told = _read(AllToAllOptions, "all_to_all_single", opts, timeout)
        group = self.within(options.limit(told.timeout))
        theirs, ours = list(output_split_sizes), list(input_split_sizes)
        work = _functions().all_to_all_single(output, input, theirs, ours, group, told.asyncOp)
        return work or CompletedWork([output])

    alltoall_base = all_to_all_single

    def barrier(
        self, opts: BarrierOptions | Timeout | None = None, timeout: Timeout | None = None
    ) -> Work:
        """Wait until all members have come here."""
        told = _read(BarrierOptions, "barrier", opts, timeout)
        group = self.within(None)
        limit = options.limit(told.timeout)
        work = _functions().barrier(group, told.asyncOp, timeout=limit)
        return work or CompletedWork()

    # Messages

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Start to send a tensor to a group rank."""
        from phalanx import p2p

        work = p2p.isend(_only(tensors, "send"), None, self.within(None), tag, dstRank)
        return cast(Work, work)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Start to receive a tensor from a group rank."""
        from phalanx import p2p

        work = p2p.irecv(_only(tensors, "recv"), None, self.within(None), tag, srcRank)
        return cast(Work, work)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Start to receive a tensor from whoever sends first."""
        from phalanx import p2p

        work = p2p.irecv(_only(tensors, "recv_anysource"), None, self.within(None), tag)
        return cast(Work, work)

    # How they are issued

    def within(self, timeout: float | None) -> ProcessGroup:
        """Return this group, as one whose operations have this timeout and run at once."""
        group = cast("ProcessGroup", self)
        transport = group.transport
        if isinstance(transport, Collecting):  # which is for functions, not for methods
            transport = transport.passed_on()
        if timeout is not None:
            transport = cast(GroupBackend, Limited(transport, timeout))
        if transport is group.transport:
            return group
        alike = copy.copy(group)
        alike.transport = transport
        return alike

    def _coalesced(
        self, name: str, calls: Sequence[tuple[Any, ...]], told: options._Options
    ) -> Work:
        from phalanx import coalescing

        group = self.within(options.limit(told.timeout))
        function = getattr(_functions(), name)
        with coalescing._coalescing_manager(group, async_ops=told.asyncOp) as work:
            for arguments in calls:
                function(*arguments, group=group)
        return work if told.asyncOp else CompletedWork([first for first, *_ in calls])


def _functions() -> ModuleType:
    """Return the functions that look at arguments; they stand above groups."""
    from phalanx import collectives

    return collectives


def _read(
    kind: type[Kind], operation: str, opts: Any, timeout: Timeout | None = None, **values: Any
) -> Kind:
    """Return the options of a call; ``values`` has what its short form takes instead."""
    made = kind()
    if hasattr(opts, "asyncOp"):
        missing = [name for name in values if not hasattr(opts, name)]
        if missing or timeout is not None or any(each is not None for each in values.values()):
            raise TypeError(
                f"{operation} takes {kind.__name__} and nothing beside it, or no options at all, "
                f"got {type(opts).__name__}"
            )
        return cast(Kind, opts)
    if opts is not None:
        name = next(iter(values), "timeout")
        if name == "timeout":
            timeout = opts
        else:
            values[name] = opts
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def _all_reduce_together(group: ProcessGroup, tensors: Sequence[Tensor], op: ReduceOp) -> Work:
    """Reduce all tensors of all members to one, and write it to each."""
    if not tensors or op.name in ("AVG", "PREMUL_SUM"):
        raise ValueError(f"allreduce with {op} needs a list of one tensor, got {len(tensors)}")
    with torch.no_grad():
        total = reduction.reduce([tensor.detach() for tensor in tensors], op)
        _functions().all_reduce(total, op, group)
        for tensor in tensors:
            tensor.copy_(total.view(tensor.shape))
    return CompletedWork(tensors)


def _check_index(index: int, tensors: Sequence[Tensor], operation: str) -> None:
    if not 0 <= index < len(tensors):
        raise ValueError(
            f"{operation}: rootTensor is {index}, but there are {len(tensors)} tensors in the list"
        )


def _listed(tensors: Tensors) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _only(tensors: Tensors, operation: str) -> Tensor:
    given = _listed(tensors)
    if len(given) != 1:
        raise ValueError(f"{operation} needs a list of one tensor, got {len(given)}")
    return given[0]


def _lists(tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor]) -> list[Tensor]:
    """Return the one list of a list of lists, or a list of tensors."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(cast(Sequence[Tensor], tensors))
