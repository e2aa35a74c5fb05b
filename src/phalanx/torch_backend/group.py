"""A group of torch.distributed that Phalanx serves.

Torch's functions call its methods, from Python or, as its DistributedDataParallel and functional
collectives do, from C++. Each looks up what the options say and calls the function of Phalanx that
does the same. An operation that torch would wait for is done when its method returns; others give
a work. Tensors on other devices are passed to the engine that torch would use for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils import _python_dispatch as modes

from phalanx import coalescing, collectives, p2p
from phalanx._native import dtype_code
from phalanx.groups import ProcessGroup
from phalanx.torch_backend import handlers, lifted, worlds
from phalanx.torch_backend.membership import Membership
from phalanx.torch_backend.shown import shown
from phalanx.torch_backend.theirs import ProcessGroup as TheirGroup
from phalanx.torch_backend.theirs import c10d
from phalanx.torch_backend.untraced import untraced
from phalanx.torch_backend.work import Done, TorchWork
from phalanx.types import ReduceOp, seconds
from phalanx.work import JoinedWork, Work
from phalanx.world import active
from phalanx_autoload import NAME

_UNSET = timedelta(milliseconds=-1)  # a timeout in torch's options that nobody has set

# By the number that torch gives them, which is the hash of its wrapper class.
_OPS = {
    int(getattr(c10d.ReduceOp, name)): getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def create(options: Any, pg_options: Any = None) -> TorchGroup:
    """Make a group for torch.distributed, as `Backend.register_backend` wants it."""
    if pg_options is not None:
        raise TypeError(
            f"the backend {NAME!r} has no options of its own, got {type(pg_options).__name__}: "
            "leave pg_options out"
        )
    lifted.lift()
    handlers.register()
    world, inner = worlds.join(options)
    return TorchGroup(world, inner, options.store, options.group_id)


def _op(op: Any) -> ReduceOp:
    """Translate a reduction of torch's."""
    found: ReduceOp | None = _OPS.get(hash(op))
    if found is not None:
        return found
    if op == c10d.ReduceOp.PREMUL_SUM:
        return ReduceOp.premul_sum(op.factor)
    raise ValueError(f"unknown reduce op {op!r}")


@untraced
class TorchGroup(Membership):
    """One rank's end of a group of torch.distributed: its operations.

    Where torch has a new name for a method beside an old one, its old one calls what has the new.
    """

    # Collectives

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = c10d.ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        tensor: Any = None,
    ) -> Any:
        if type(opts) is not c10d.AllreduceOptions:
            opts = _options(c10d.AllreduceOptions, timeout, reduceOp=opts if op is None else op)
        if type(tensors) is list and len(tensors) == 1:
            tensor = tensors[0]
        elif isinstance(tensors, Tensor):
            tensor = tensors
        elif tensor is None:
            return self._reduce_together(tensors, opts)
        op = _OPS.get(hash(opts.reduceOp))
        inner = self._inner
        if (
            op is not None
            and dtype_code(tensor) in op.codes
            and inner.transport is inner.backend
            and self._native is not None
            and opts.timeout == _UNSET
            and not opts.asyncOp
            and not self._completer.unsettled
            and not profiler._is_profiler_enabled
            and not modes._is_in_torch_dispatch_mode
        ):
            # The same as below for most calls, without a second look at anything.
            self._native.all_reduce(tensor, op.code, 1.0, -1.0, False)
            return _DONE
        if modes._is_in_torch_dispatch_mode and (seen := shown(self, "allreduce", [tensor], opts)):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).allreduce([tensor], opts)
        group = self._within(opts.timeout)
        op = op or _op(opts.reduceOp)
        return self._work(collectives.all_reduce(tensor, op, group, opts.asyncOp))

    def _reduce_together(self, tensors: Any, opts: Any) -> Any:
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "allreduce", list(tensors), opts)
        ):
            return seen
        return self._work(self._within(_UNSET).allreduce(tensors, opts))

    def broadcast(
        self,
        tensors: Any = (),
        opts: Any = 0,
        timeout: timedelta | None = None,
        **names: Any,
    ) -> Any:
        if names:
            return self.broadcast(**_renamed(names, tensors=tensors, opts=opts, timeout=timeout))
        if type(opts) is not c10d.BroadcastOptions:
            opts = _options(c10d.BroadcastOptions, timeout, rootRank=opts)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "broadcast", _listed(tensors), opts)
        ):
            return seen
        if not isinstance(tensors, Tensor) and (len(tensors) != 1 or opts.rootTensor):
            return self._work(self._within(_UNSET).broadcast(tensors, opts))
        tensor = _only(tensors)
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).broadcast([tensor], opts)
        group = self._within(opts.timeout)
        return self._work(collectives.broadcast(tensor, None, group, opts.asyncOp, opts.rootRank))

    def reduce(
        self,
        tensors: Any = (),
        opts: Any = 0,
        op: Any = c10d.ReduceOp.SUM,
        timeout: timedelta | None = None,
        **names: Any,
    ) -> Any:
        if names:
            return self.reduce(
                **_renamed(names, tensors=tensors, opts=opts, op=op, timeout=timeout)
            )
        if type(opts) is not c10d.ReduceOptions:
            opts = _options(c10d.ReduceOptions, timeout, rootRank=opts, reduceOp=op)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "reduce", _listed(tensors), opts)
        ):
            return seen
        tensor = _only(tensors)
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).reduce([tensor], opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.reduce(tensor, None, _op(opts.reduceOp), group, opts.asyncOp, opts.rootRank)
        )

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any = (),
        opts: Any = None,
        timeout: Any = None,
        **names: Any,
    ) -> Any:
        if names:
            given = _renamed(names, opts=opts, timeout=timeout, input_tensors=input_tensors)
            return self.allgather(output_tensors, **given)
        if type(opts) is not c10d.AllgatherOptions:
            opts = _options(c10d.AllgatherOptions, opts if timeout is None else timeout)
        outputs, tensor = _list(output_tensors), _only(input_tensors)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "allgather", [outputs], [tensor], opts)
        ):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).allgather([outputs], [tensor], opts)
        group = self._within(opts.timeout)
        return self._work(collectives.all_gather(outputs, tensor, group, opts.asyncOp))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if opts is None:
            opts = c10d.AllgatherOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "all_gather_single", output, input, opts)
        ):
            return seen
        if not input.is_cpu:
            return self._engines.get(input.device)._allgather_base(output, input, opts)
        group = self._within(opts.timeout)
        return self._work(collectives.all_gather_single(output, input, group, opts.asyncOp))

    _allgather_base = all_gather_single

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any = (),
        opts: Any = 0,
        timeout: Any = None,
        **names: Any,
    ) -> Any:
        if names:
            given = _renamed(names, opts=opts, timeout=timeout, input_tensors=input_tensors)
            return self.gather(output_tensors, **given)
        if type(opts) is not c10d.GatherOptions:
            opts = _options(c10d.GatherOptions, timeout, rootRank=opts)
        outputs, tensor = _list(output_tensors), _only(input_tensors)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "gather", [outputs] if outputs else [], [tensor], opts)
        ):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).gather(output_tensors, input_tensors, opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.gather(tensor, outputs, None, group, opts.asyncOp, opts.rootRank)
        )

    def scatter(
        self,
        output_tensors: Any = (),
        input_tensors: Any = (),
        opts: Any = 0,
        timeout: Any = None,
        **names: Any,
    ) -> Any:
        if names:
            given = _renamed(
                names,
                opts=opts,
                timeout=timeout,
                output_tensors=output_tensors,
                input_tensors=input_tensors,
            )
            return self.scatter(**given)
        if type(opts) is not c10d.ScatterOptions:
            opts = _options(c10d.ScatterOptions, timeout, rootRank=opts)
        tensor, inputs = _only(output_tensors), _list(input_tensors)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "scatter", [tensor], [inputs] if inputs else [], opts)
        ):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).scatter(output_tensors, input_tensors, opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.scatter(tensor, inputs, None, group, opts.asyncOp, opts.rootRank)
        )

    def reduce_scatter(
        self,
        output_tensors: Any = (),
        input_tensors: Any = (),
        opts: Any = c10d.ReduceOp.SUM,
        timeout: timedelta | None = None,
        **names: Any,
    ) -> Any:
        if names:
            given = _renamed(
                names,
                opts=opts,
                timeout=timeout,
                output_tensors=output_tensors,
                input_tensors=input_tensors,
            )
            return self.reduce_scatter(**given)
        if type(opts) is not c10d.ReduceScatterOptions:
            opts = _options(c10d.ReduceScatterOptions, timeout, reduceOp=opts)
        tensor, inputs = _only(output_tensors), _list(input_tensors)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "reduce_scatter", [tensor], [inputs], opts)
        ):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).reduce_scatter([tensor], [inputs], opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.reduce_scatter(tensor, inputs, _op(opts.reduceOp), group, opts.asyncOp)
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if opts is None:
            opts = c10d.ReduceScatterOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "reduce_scatter_single", output, input, opts)
        ):
            return seen
        if not input.is_cpu:
            return self._engines.get(input.device)._reduce_scatter_base(output, input, opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.reduce_scatter_single(
                output, input, _op(opts.reduceOp), group, opts.asyncOp
            )
        )

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        if type(opts) is not c10d.AllToAllOptions:
            opts = _options(c10d.AllToAllOptions, opts if timeout is None else timeout)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "alltoall", output_tensors, input_tensors, opts)
        ):
            return seen
        if not input_tensors[0].is_cpu:
            engine = self._engines.get(input_tensors[0].device)
            return engine.alltoall(output_tensors, input_tensors, opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.all_to_all(output_tensors, input_tensors, group, opts.asyncOp)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        if type(opts) is not c10d.AllToAllOptions:
            opts = _options(c10d.AllToAllOptions, opts if timeout is None else timeout)
        theirs, ours = list(output_split_sizes), list(input_split_sizes)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "all_to_all_single", output, input, theirs, ours, opts)
        ):
            return seen
        if not input.is_cpu:
            engine = self._engines.get(input.device)
            return engine.alltoall_base(output, input, theirs, ours, opts)
        group = self._within(opts.timeout)
        return self._work(
            collectives.all_to_all_single(output, input, theirs, ours, group, opts.asyncOp)
        )

    if not hasattr(TheirGroup, "all_to_all_single"):
        alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        if type(opts) is not c10d.BarrierOptions:
            opts = _options(c10d.BarrierOptions, opts if timeout is None else timeout)
        if modes._is_in_torch_dispatch_mode and (seen := shown(self, "barrier", opts)):
            return seen
        limit = None if opts.timeout == _UNSET else opts.timeout
        group = self._within(_UNSET)  # a barrier takes its timeout itself
        return self._work(collectives.barrier(group, opts.asyncOp, timeout=limit))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        if modes._is_in_torch_dispatch_mode and shown(
            self, "monitored_barrier", timeout or self._timeout, wait_all_ranks
        ):
            return
        self._inner.monitored_barrier(timeout, wait_all_ranks)

    # Several at once

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "allreduce_coalesced", list(tensors), opts)
        ):
            return seen
        if not tensors[0].is_cpu:
            return self._engines.get(tensors[0].device).allreduce_coalesced(list(tensors), opts)
        op = _op(opts.reduceOp)
        calls = ((tensor, op) for tensor in tensors)
        return self._coalesce(collectives.all_reduce, calls, opts)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "allgather_coalesced", output_lists, input_list, opts)
        ):
            return seen
        if not input_list[0].is_cpu:
            engine = self._engines.get(input_list[0].device)
            return engine.allgather_coalesced(output_lists, input_list, opts)
        group = self._within(opts.timeout)
        calls = collectives.all_gather_calls(output_lists, input_list, self.size())
        return self._work(active(group).coalesce(calls, async_op=opts.asyncOp))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "all_gather_single_coalesced", outputs, inputs, opts)
        ):
            return seen
        if not inputs[0].is_cpu:
            engine = self._engines.get(inputs[0].device)
            return engine.allgather_into_tensor_coalesced(outputs, inputs, opts)
        calls = zip(outputs, inputs, strict=True)
        return self._coalesce(collectives.all_gather_single, calls, opts)

    if not hasattr(TheirGroup, "all_gather_single_coalesced"):
        allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "reduce_scatter_single_coalesced", outputs, inputs, opts)
        ):
            return seen
        if not inputs[0].is_cpu:
            engine = self._engines.get(inputs[0].device)
            return engine.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        op = _op(opts.reduceOp)
        calls = ((*pair, op) for pair in zip(outputs, inputs, strict=True))
        return self._coalesce(collectives.reduce_scatter_single, calls, opts)

    if not hasattr(TheirGroup, "reduce_scatter_single_coalesced"):
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _coalesce(
        self, operation: Callable[..., Any], calls: Iterable[tuple[Any, ...]], opts: Any
    ) -> Any:
        is_async = opts.asyncOp
        group = self._within(opts.timeout)
        with coalescing._coalescing_manager(group, async_ops=is_async) as work:
            for arguments in calls:
                operation(*arguments, group=group)
        return self._work(work if is_async else None)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._engines.get(device)._start_coalescing()
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._engines.get(device)._end_coalescing()
        works, self._coalesced = self._coalesced or [], None
        return self._work(JoinedWork(works))

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        tensor = _only(tensors)
        if modes._is_in_torch_dispatch_mode and (seen := shown(self, "send", [tensor], dst, tag)):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).send([tensor], dst, tag)
        return self._work(p2p.isend(tensor, None, self._inner, tag, dst), in_order=False)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        tensor = _only(tensors)
        if modes._is_in_torch_dispatch_mode and (seen := shown(self, "recv", [tensor], src, tag)):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).recv([tensor], src, tag)
        return self._work(p2p.irecv(tensor, None, self._inner, tag, src), in_order=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        tensor = _only(tensors)
        if modes._is_in_torch_dispatch_mode and (
            seen := shown(self, "recv_anysource", [tensor], tag)
        ):
            return seen
        if not tensor.is_cpu:
            return self._engines.get(tensor.device).recv_anysource([tensor], tag)
        return self._work(p2p.irecv(tensor, None, self._inner, tag), in_order=False)

    def _within(self, timeout: timedelta) -> ProcessGroup:
        """Return the group whose operations have this timeout, once it is its turn to be used."""
        if self._completer.unsettled:
            self._completer.settle(self._inner.backend.timeout)
        return self._inner if timeout == _UNSET else self._inner.within(seconds(timeout))

    def _work(self, work: Work | None, in_order: bool = True) -> Any:
        if work is None:
            return _DONE
        if self._coalesced is not None:
            self._coalesced.append(work)
        return TorchWork(work, self._completer, in_order)


_DONE = Done()


def _only(tensors: Any) -> Tensor:
    """Return the one tensor of a list, which is how torch passes tensors."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"expected a list of one tensor, got {len(tensors)}")
    return cast(Tensor, tensors[0])


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _list(tensors: Any) -> list[Tensor]:
    """Return the one list of a list of lists, or a list of tensors as it is."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return cast(list[Tensor], tensors[0])
    return cast(list[Tensor], tensors)


# Names that arguments have in some of torch's forms of a method only.
_RENAMED = {
    "input": "input_tensors",
    "input_tensor": "input_tensors",
    "op": "opts",
    "output": "output_tensors",
    "output_tensor": "output_tensors",
    "root": "opts",
    "tensor": "tensors",
}


def _renamed(names: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return the arguments of a method by the names that it has here."""
    for name, value in names.items():
        if _RENAMED.get(name) not in given:
            raise TypeError(f"unexpected keyword argument {name!r}")
        given[_RENAMED[name]] = value
    return given


def _options(kind: Any, timeout: timedelta | None, **values: Any) -> Any:
    """Return options from what the short forms of the methods take."""
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in values.items():
        setattr(options, name, value)
    return options
