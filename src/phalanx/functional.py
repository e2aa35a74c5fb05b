"""Collectives that gradients flow through.

Convention: what is differentiated is the sum of the losses of all ranks. So the gradient that a
rank gets for its input counts what this input does to the outputs of every rank, and the backward
of a collective is a collective itself, which all ranks must run. Outputs that a rank has no part
in (of ``reduce`` and ``gather`` outside ``dst``) are zeros and have no gradient. All of these can
be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx import checks, collectives
from phalanx.groups import ProcessGroup
from phalanx.types import ReduceOp
from phalanx.world import get_rank, get_world_size, resolve

_LINEAR = ("SUM", "AVG")


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensor of global rank ``src``, of the same shape on all ranks."""
    root = checks.peer(resolve(group), src, None, "src", "broadcast")
    return _one(_Broadcast, root, group, tensor)


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Return the tensors of all ranks on global rank ``dst``, zeros elsewhere."""
    root = checks.peer(resolve(group), dst, None, "dst", "gather")
    return _many(_Gather, root, group, tensor)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Return the i-th of the tensors of global rank ``src`` on rank i.

    All ranks pass a list of this shape; only that of ``src`` counts.
    """
    member = resolve(group)
    root = checks.peer(member, src, None, "src", "scatter")
    given = checks.tensors(tensors, "tensors", "scatter", member.size(), written=False)
    return _one(_Scatter, root, group, *given)


def reduce(
    tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """Return the reduction on global rank ``dst``, zeros elsewhere; SUM and AVG have a gradient."""
    root = checks.peer(resolve(group), dst, None, "dst", "reduce")
    return _one(_Reduce, root, _linear(op, "reduce", tensor), group, tensor)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the reduction of everybody's ``input_list[i]`` on rank i; SUM and AVG have a gradient.

    It is written to ``output`` and returned; what is returned carries the gradient.
    """
    op = _linear(op, "reduce_scatter", *input_list)
    return _one(_ReduceScatter, op, group, output.detach(), *input_list)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Return the tensors of all ranks, of one shape, on all of them."""
    outputs = [_like(tensor) for _ in range(get_world_size(group))]
    return _many(_AllGather, group, outputs, tensor)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Return the tensors of all ranks one behind the other, in the shape of ``output_tensor``.

    They are written there too; what is returned carries the gradient.
    """
    result = torch.stack(all_gather(input_tensor, group)).reshape(output_tensor.shape)
    output_tensor.detach().copy_(result.detach())
    return result


_all_gather_base = all_gather_into_tensor


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
) -> tuple[Tensor, ...]:
    """Return, from each rank, what it has for this one in its ``input_tensor_list``.

    It is written to ``output_tensor_list`` and returned; what is returned carries the gradient.
    """
    outputs = [output.detach() for output in output_tensor_list]
    return _many(_AllToAll, group, outputs, *input_tensor_list)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return, one behind the other, the slices of rows that the ranks have for this one.

    They are written to ``output`` and returned; what is returned carries the gradient.
    """
    name, size = "all_to_all_single", get_world_size(group)
    theirs = checks.splits(output, output_split_sizes, "output", name, size)
    ours = checks.splits(input, input_split_sizes, "input", name, size)
    outputs = torch.split(output.detach(), theirs)
    return torch.cat(_many(_AllToAll, group, outputs, *torch.split(input, ours)))


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> Tensor:
    """Return the reduction of all ranks' tensors: SUM, AVG, PREMUL_SUM, PRODUCT, MIN or MAX.

    Where several ranks hold the minimum or maximum, they share its gradient equally.
    """
    op = ReduceOp(op)
    if op.name in _LINEAR:
        return _one(_AllReduce, op, group, tensor)
    if op.factor is not None:
        return _one(_AllReduce, ReduceOp.SUM, group, tensor * op.factor)
    if op.name == "PRODUCT":
        return torch.stack(all_gather(tensor, group)).prod(dim=0)
    if op.name in ("MIN", "MAX"):
        stacked = torch.stack(all_gather(tensor, group))
        return stacked.amin(dim=0) if op.name == "MIN" else stacked.amax(dim=0)
    if _has_gradient(tensor):
        raise ValueError(f"all_reduce with {op} has no gradient")
    return _one(_AllReduce, op, group, tensor)


def _linear(op: ReduceOp, operation: str, *tensors: Tensor) -> ReduceOp:
    op = ReduceOp(op)
    if op.name not in _LINEAR and _has_gradient(*tensors):
        raise ValueError(f"differentiable {operation} supports {', '.join(_LINEAR)}, not {op}")
    return op


def _has_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _one(function: type[Function], *args: Any) -> Tensor:
    return cast(Tensor, cast(Any, function).apply(*args))


def _many(function: type[Function], *args: Any) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], cast(Any, function).apply(*args))


def _like(tensor: Tensor, shape: torch.Size | None = None) -> Tensor:
    return tensor.new_empty(tensor.shape if shape is None else shape)


# Each backward calls another Function, never a plain collective: so it can be differentiated again.
# Incoming gradients may be expanded or lazily conjugated: `_solid` makes ordinary tensors of them.


def _solid(tensor: Tensor) -> Tensor:
    return tensor.contiguous().resolve_conj().resolve_neg()


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, root: int, group: ProcessGroup | None, tensor: Tensor) -> Tensor:
        ctx.root, ctx.group = root, group
        output = _solid(tensor).clone()
        collectives.broadcast(output, group=group, group_src=root)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _one(_Reduce, ctx.root, ReduceOp.SUM, ctx.group, grad)


class _Reduce(Function):
    @staticmethod
    def forward(
        ctx: Any, root: int, op: ReduceOp, group: ProcessGroup | None, tensor: Tensor
    ) -> Tensor:
        ctx.root, ctx.op, ctx.group = root, op, group
        output = _solid(tensor).clone()
        collectives.reduce(output, None, op, group, group_dst=root)
        return output if get_rank(group) == root else output.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = _one(_Broadcast, ctx.root, ctx.group, grad)
        return None, None, None, _share(grad, ctx.op, ctx.group)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: ProcessGroup | None, tensor: Tensor) -> Tensor:
        ctx.op, ctx.group = op, group
        output = _solid(tensor).clone()
        collectives.all_reduce(output, op, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _one(_AllReduce, ctx.op, ctx.group, grad)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, root: int, group: ProcessGroup | None, tensor: Tensor) -> Any:
        ctx.root, ctx.group = root, group
        outputs = [torch.zeros_like(tensor) for _ in range(get_world_size(group))]
        mine = outputs if get_rank(group) == root else None
        collectives.gather(_solid(tensor), mine, group=group, group_dst=root)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, _one(_Scatter, ctx.root, ctx.group, *grads)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, root: int, group: ProcessGroup | None, *tensors: Tensor) -> Tensor:
        ctx.root, ctx.group = root, group
        output = _like(tensors[0])
        mine = [_solid(tensor) for tensor in tensors] if get_rank(group) == root else None
        collectives.scatter(output, mine, group=group, group_src=root)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *_many(_Gather, ctx.root, ctx.group, grad)


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup | None, outputs: Sequence[Tensor], tensor: Tensor
    ) -> Any:
        ctx.group, ctx.shape = group, tensor.shape
        collectives.all_gather(list(outputs), _solid(tensor), group)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        output = _like(grads[0], ctx.shape)
        return None, None, _one(_ReduceScatter, ReduceOp.SUM, ctx.group, output, *grads)


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, op: ReduceOp, group: ProcessGroup | None, output: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.op, ctx.group = op, group
        ctx.shapes = [tensor.shape for tensor in tensors]
        collectives.reduce_scatter(output, [_solid(tensor) for tensor in tensors], op, group)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = _share(grad, ctx.op, ctx.group)
        outputs = [_like(grad, shape) for shape in ctx.shapes]
        return None, None, None, *_many(_AllGather, ctx.group, outputs, grad)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup | None, outputs: Sequence[Tensor], *tensors: Tensor
    ) -> Any:
        ctx.group = group
        ctx.shapes = [tensor.shape for tensor in tensors]
        collectives.all_to_all(list(outputs), [_solid(tensor) for tensor in tensors], group)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        outputs = [_like(grads[0], shape) for shape in ctx.shapes]
        return None, None, *_many(_AllToAll, ctx.group, outputs, *grads)


def _share(grad: Tensor, op: ReduceOp, group: ProcessGroup | None) -> Tensor:
    """Return what one contribution gets of the gradient of a sum or average."""
    return grad / get_world_size(group) if op.name == "AVG" else grad
