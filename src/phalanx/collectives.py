"""The collectives: look at the arguments, find the group, call its transport.

Every rank of a group must call the same collectives on it, in the same order. ``src`` and ``dst``
are global ranks, ``group_src`` and ``group_dst`` ranks in the group. Without ``async_op`` a call
returns None once the result is there; with it, a ``Work``. A rank outside the group gets a warning
and None. Where tensors are taken, NumPy arrays are too, and results are written into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from phalanx import checks, sparse
from phalanx._native import dtype_code
from phalanx.backends.base import Call
from phalanx.checks import plain
from phalanx.groups import ProcessGroup
from phalanx.types import ReduceOp, Timeout, seconds
from phalanx.work import Work
from phalanx.world import active, membership, transport


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the tensor of rank ``src`` to all ranks, in place."""
    member = membership(group, "broadcast")
    if member is None:
        return None
    root = checks.peer(member, src, group_src, "src", "broadcast")
    if not plain(tensor):
        tensor = checks.movable(tensor, "tensor", "broadcast")
    return active(member).broadcast(tensor, root, async_op=async_op)


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the tensors of all ranks, in place, on all of them.

    Sparse COO tensors can be summed and averaged; their patterns may differ.
    """
    found = transport(group, "all_reduce")
    if found is None:
        return None
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    if dtype_code(tensor) not in op.codes:
        if isinstance(tensor, Tensor) and tensor.layout in sparse.LAYOUTS:
            return sparse.all_reduce(found, tensor, op, async_op)
        tensor = checks.reducible(tensor, "tensor", "all_reduce", op)
    return found.all_reduce(tensor, op, async_op=async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor] | Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Reduce several tensors as one operation; a future if ``async_op``.

    All are read before any is written: a tensor that is given twice ends up as the reduction.
    """
    found = transport(group, "all_reduce_coalesced")
    if found is None:
        return None
    op = ReduceOp(op)
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    if not isinstance(given, list | tuple):
        raise TypeError(f"all_reduce_coalesced needs a list of tensors, got {type(given).__name__}")
    each = [checks.reducible(t, f"tensors[{i}]", "all_reduce", op) for i, t in enumerate(given)]
    work = found.coalesce([("all_reduce", (tensor, op)) for tensor in each], async_op=async_op)
    return None if work is None else work.get_future()


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce the tensors of all ranks, in place, on ``dst``; the others keep theirs."""
    member = membership(group, "reduce")
    if member is None:
        return None
    root = checks.peer(member, dst, group_dst, "dst", "reduce")
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    tensor = checks.reducible(tensor, "tensor", "reduce", op, written=root == member.rank())
    return active(member).reduce(tensor, root, op, async_op=async_op)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy rank i's ``tensor`` to everybody's ``tensor_list[i]``; ranks may differ in shape."""
    found = transport(group, "all_gather")
    if found is None:
        return None
    outputs = checks.tensors(tensor_list, "tensor_list", "all_gather", found.size)
    tensor = checks.movable(tensor, "tensor", "all_gather", written=False)
    own = outputs[found.rank]
    checks.same_dtype(own, tensor, "tensor_list and tensor", "all_gather")
    checks.same_count(own, tensor, "this rank's slot and tensor", "all_gather")
    return found.all_gather(outputs, tensor, async_op=async_op)


def all_gather_single(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy the inputs of all ranks, one behind the other, to everybody's ``output_tensor``.

    The output is their concatenation or their stack: its shape is its own, as long as it has room
    for exactly all of them.
    """
    found = transport(group, "all_gather_single")
    if found is None:
        return None
    if not plain(output_tensor):
        output_tensor = checks.movable(output_tensor, "output_tensor", "all_gather_single")
    if not plain(input_tensor):
        input_tensor = checks.movable(input_tensor, "input_tensor", "all_gather_single", False)
    if (
        output_tensor.dtype is not input_tensor.dtype
        or output_tensor.numel() != found.size * input_tensor.numel()
    ):
        names = "output_tensor and input_tensor"
        checks.same_dtype(output_tensor, input_tensor, names, "all_gather_single")
        checks.same_count(output_tensor, input_tensor, names, "all_gather_single", found.size)
    return found.all_gather_single(output_tensor, input_tensor, async_op=async_op)


all_gather_into_tensor = _all_gather_base = all_gather_single


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Gather several tensors as one operation; a future if ``async_op``.

    Rank i's ``input_tensor_list[k]`` goes to everybody's ``output_tensor_lists[i][k]``. All inputs
    are read before any output is written.
    """
    found = transport(group, "all_gather_coalesced")
    if found is None:
        return None
    calls = all_gather_calls(output_tensor_lists, input_tensor_list, found.size)
    work = found.coalesce(calls, async_op=async_op)
    return None if work is None else work.get_future()


def all_gather_calls(
    output_tensor_lists: Sequence[Sequence[Tensor]], input_tensor_list: Sequence[Tensor], size: int
) -> list[Call]:
    """Return the calls that ``all_gather_coalesced`` consists of."""
    name = "all_gather_coalesced"
    inputs = checks.tensors(input_tensor_list, "input_tensor_list", name, written=False)
    if not isinstance(output_tensor_lists, list | tuple) or len(output_tensor_lists) != size:
        raise TypeError(f"{name} needs output_tensor_lists, a list of one list per rank")
    outputs = [
        checks.tensors(each, f"output_tensor_lists[{i}]", name, len(inputs))
        for i, each in enumerate(output_tensor_lists)
    ]
    return [
        ("all_gather", ([each[k] for each in outputs], tensor)) for k, tensor in enumerate(inputs)
    ]


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank i's ``tensor`` to ``gather_list[i]``, which ``dst`` (default: 0) alone has."""
    member = membership(group, "gather")
    if member is None:
        return None
    if dst is None and group_dst is None:
        dst = 0
    root = checks.peer(member, dst, group_dst, "dst", "gather")
    tensor = checks.movable(tensor, "tensor", "gather", written=False)
    outputs = None
    checks.only_on_root(gather_list, "gather_list", root == member.rank(), "dst", "gather")
    if gather_list:
        outputs = checks.tensors(gather_list, "gather_list", "gather", member.size())
        checks.same_dtype(outputs[0], tensor, "gather_list and tensor", "gather")
        for output in outputs:
            checks.same_count(output, tensor, "gather_list and tensor", "gather")
    return active(member).gather(outputs, tensor, root, async_op=async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``scatter_list[i]``, which ``src`` (default: 0) alone has, to rank i's ``tensor``."""
    member = membership(group, "scatter")
    if member is None:
        return None
    if src is None and group_src is None:
        src = 0
    root = checks.peer(member, src, group_src, "src", "scatter")
    tensor = checks.movable(tensor, "tensor", "scatter")
    inputs = None
    checks.only_on_root(scatter_list, "scatter_list", root == member.rank(), "src", "scatter")
    if scatter_list:
        inputs = checks.tensors(scatter_list, "scatter_list", "scatter", member.size(), False)
        checks.same_dtype(inputs[0], tensor, "scatter_list and tensor", "scatter")
        for input in inputs:
            checks.same_count(input, tensor, "scatter_list and tensor", "scatter")
    return active(member).scatter(tensor, inputs, root, async_op=async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the reduction of everybody's ``input_list[i]`` into rank i's ``output``.

    The shapes of different i may differ.
    """
    found = transport(group, "reduce_scatter")
    if found is None:
        return None
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    inputs = checks.tensors(input_list, "input_list", "reduce_scatter", found.size, False)
    output = checks.reducible(output, "output", "reduce_scatter", op)
    own = inputs[found.rank]
    checks.same_dtype(own, output, "input_list and output", "reduce_scatter")
    checks.same_count(own, output, "this rank's input and output", "reduce_scatter")
    return found.reduce_scatter(output, inputs, op, async_op=async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the inputs of all ranks and put the i-th equal part into rank i's ``output``."""
    found = transport(group, "reduce_scatter_single")
    if found is None:
        return None
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    if dtype_code(output) not in op.codes:
        output = checks.reducible(output, "output", "reduce_scatter_single", op)
    if dtype_code(input) not in op.codes:
        input = checks.reducible(input, "input", "reduce_scatter_single", op, False)
    if output.dtype is not input.dtype or input.numel() != found.size * output.numel():
        checks.same_dtype(input, output, "input and output", "reduce_scatter_single")
        checks.same_count(input, output, "input and output", "reduce_scatter_single", found.size)
    return found.reduce_scatter_single(output, input, op, async_op=async_op)


reduce_scatter_tensor = _reduce_scatter_base = reduce_scatter_single


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy rank i's ``input_tensor_list[j]`` to rank j's ``output_tensor_list[i]``."""
    found = transport(group, "all_to_all")
    if found is None:
        return None
    size, own = found.size, found.rank
    outputs = checks.tensors(output_tensor_list, "output_tensor_list", "all_to_all", size)
    inputs = checks.tensors(input_tensor_list, "input_tensor_list", "all_to_all", size, False)
    names = "output_tensor_list and input_tensor_list"
    checks.same_dtype(outputs[0], inputs[0], names, "all_to_all")
    checks.same_count(outputs[own], inputs[own], "this rank's own slots", "all_to_all")
    return found.all_to_all(outputs, inputs, async_op=async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th slice of ``input`` to rank i and collect the slices meant for this rank.

    Slices are rows of the first dimension: as many as the split sizes say, else equally many.
    """
    found = transport(group, "all_to_all_single")
    if found is None:
        return None
    name, size = "all_to_all_single", found.size
    output = checks.movable(output, "output", name)
    input = checks.movable(input, "input", name, written=False)
    checks.same_dtype(output, input, "output and input", name)
    ours = checks.splits(output, output_split_sizes, "output", name, size)
    theirs = checks.splits(input, input_split_sizes, "input", name, size)
    if output_split_sizes or input_split_sizes:
        return found.all_to_all_single(output, input, ours, theirs, async_op=async_op)
    checks.same_count(output, input, "output and input", name)
    return found.all_to_all_single(output, input, None, None, async_op=async_op)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Return when all ranks of the group have come here.

    ``timeout`` (None: the group's) bounds this call. ``device_ids`` has no effect.
    """
    found = transport(group, "barrier")
    if found is None:
        return None
    limit = None if timeout is None else seconds(timeout)
    return found.barrier(timeout=limit, async_op=async_op)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Do a barrier in which rank 0 of the group names who is missing after ``timeout``.

    It names the first missing rank or, with ``wait_all_ranks``, all of them.
    """
    found = transport(group, "monitored_barrier")
    if found is not None:
        limit = None if timeout is None else seconds(timeout)
        found.monitored_barrier(timeout=limit, wait_all_ranks=wait_all_ranks)
