"""The rules for collectives; all ranks check them in this order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.backends import reduction
from phalanx.backends.base import GroupBackend
from phalanx.testing.backend_kit.inputs import (
    LAYOUTS,
    SHAPES,
    Rule,
    cells,
    inputs_of,
    is_reduction,
    laid_out,
    like,
    same,
    started,
    values,
)
from phalanx.types import DTYPES, ReduceOp


def all_reduce(backend: GroupBackend) -> None:
    """All_reduce gives the reduction of all tensors in rank order, for each op and dtype."""
    for op, dtype in cells():
        for shape in [(5,), (3, 4)]:
            tensor = values(backend.rank, shape, dtype)
            backend.all_reduce(tensor, op)
            is_reduction(backend, tensor, inputs_of(backend, shape, dtype), op, dtype, shape)


def all_reduce_of_every_shape(backend: GroupBackend) -> None:
    """All_reduce takes empty, scalar and strided tensors, laid out differently on each rank."""
    for shape in SHAPES:
        for i in range(len(LAYOUTS)):
            layout = LAYOUTS[(i + backend.rank) % len(LAYOUTS)]  # not the same on all ranks
            tensor = laid_out(values(backend.rank, shape, torch.float32), layout)
            backend.all_reduce(tensor, ReduceOp.SUM)
            inputs = inputs_of(backend, shape, torch.float32)
            is_reduction(backend, tensor, inputs, ReduceOp.SUM, shape, layout)


def all_reduce_of_many_elements(backend: GroupBackend) -> None:
    """All_reduce of many elements has the bits of one of few."""
    for count in (1000, 70_001, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            tensor = values(backend.rank, (count,), dtype)
            backend.all_reduce(tensor, ReduceOp.SUM)
            is_reduction(backend, tensor, inputs_of(backend, (count,), dtype), ReduceOp.SUM)


def all_reduce_of_the_same_bits(backend: GroupBackend) -> None:
    """All_reduce gives all ranks the same bits, whatever the order of summation."""
    for count in (5, 1000, 70_001):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = values(backend.rank, (count,), dtype)
            backend.all_reduce(tensor, ReduceOp.SUM)
            everybody = [torch.empty_like(tensor) for _ in range(backend.size)]
            backend.all_gather(everybody, tensor)
            for other in everybody:
                same(other, tensor, count, dtype)


def all_reduce_of_special_values(backend: GroupBackend) -> None:
    """Reductions treat NaN, infinities and zeros as torch does."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            inputs = [special.roll(rank).to(dtype) for rank in range(backend.size)]
            tensor = inputs[backend.rank].clone()
            backend.all_reduce(tensor, op)
            is_reduction(backend, tensor, inputs, op, dtype)


def all_reduce_with_squares(backend: GroupBackend) -> None:
    """Squares get the sum of squares of the result, the same bits on all ranks."""
    for count in (0, 1, 1000, 70_001):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            tensor = values(backend.rank, (count,), dtype)
            squares = torch.full((1,), -1.0, dtype=torch.float64)
            backend.all_reduce(tensor, ReduceOp.AVG, squares=squares)
            is_reduction(backend, tensor, inputs_of(backend, (count,), dtype), ReduceOp.AVG)
            torch.testing.assert_close(
                squares[0], reduction.sum_of_squares(tensor), rtol=1e-12, atol=0
            )
            everybody = [torch.zeros(1, dtype=torch.float64) for _ in range(backend.size)]
            backend.all_gather(everybody, squares)
            assert all(torch.equal(other, squares) for other in everybody), (count, dtype)


def all_reduce_of_a_leaf(backend: GroupBackend) -> None:
    """A leaf that requires grad is reduced in place and stays one."""
    tensor = torch.ones(3, requires_grad=True)
    backend.all_reduce(tensor, ReduceOp.SUM)
    same(tensor.detach(), torch.full((3,), float(backend.size)))
    assert tensor.requires_grad
    assert tensor.is_leaf


def broadcast(backend: GroupBackend) -> None:
    """Broadcast gives root's tensor to all, whatever root, dtype, shape and layout."""
    for root in range(backend.size):
        for i, dtype in enumerate(DTYPES):
            shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[(i + backend.rank) % len(LAYOUTS)]
            expected = values(root, shape, dtype)
            tensor = laid_out(values(backend.rank, shape, dtype), layout)
            backend.broadcast(tensor, root)
            same(tensor, expected, root, dtype, shape, layout)


def reduce(backend: GroupBackend) -> None:
    """Reduce gives root the reduction, for each op and dtype; the others keep theirs."""
    for i, (op, dtype) in enumerate(cells()):
        root, shape = i % backend.size, SHAPES[i % len(SHAPES)]
        before = values(backend.rank, shape, dtype)
        tensor = laid_out(before, LAYOUTS[i % len(LAYOUTS)])
        backend.reduce(tensor, root, op)
        if backend.rank == root:
            is_reduction(backend, tensor, inputs_of(backend, shape, dtype), op, dtype, shape)
        else:
            same(tensor, before, op, dtype, shape, f"root {root}")


def all_gather(backend: GroupBackend) -> None:
    """All_gather gives everybody all inputs, which may differ in shape."""
    for i, dtype in enumerate(DTYPES):
        layout = LAYOUTS[i % len(LAYOUTS)]
        for shapes in (
            [SHAPES[i % len(SHAPES)]] * backend.size,
            [(rank + i % 3, 2) for rank in range(backend.size)],  # unequal, some empty
        ):
            inputs = [values(rank, shape, dtype) for rank, shape in enumerate(shapes)]
            outputs = [like(each, layout) for each in inputs]
            backend.all_gather(outputs, laid_out(inputs[backend.rank], layout))
            for got, expected in zip(outputs, inputs, strict=True):
                same(got, expected, dtype, shapes, layout)


def all_gather_single(backend: GroupBackend) -> None:
    """All_gather_single gives everybody all inputs, stacked or joined."""
    size = backend.size
    for i, dtype in enumerate(DTYPES):
        shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[i % len(LAYOUTS)]
        inputs = [values(rank, shape, dtype) for rank in range(size)]
        stack = torch.stack(inputs)
        flat = stack.reshape(size * shape[0], *shape[1:]) if shape else stack
        for expected in (stack, flat, stack.reshape(-1)):
            output = like(expected, layout)
            backend.all_gather_single(output, laid_out(inputs[backend.rank], layout))
            same(output, expected, dtype, shape, layout)


def gather_and_scatter(backend: GroupBackend) -> None:
    """Gather brings all inputs to root, scatter each rank's own from root."""
    for i, dtype in enumerate(DTYPES):
        root, shape = i % backend.size, SHAPES[i % len(SHAPES)]
        layout = LAYOUTS[i % len(LAYOUTS)]
        inputs = [values(rank, shape, dtype) for rank in range(backend.size)]
        own = laid_out(inputs[backend.rank], layout)
        outputs = [like(own, layout) for _ in inputs] if backend.rank == root else None
        backend.gather(outputs, own, root)
        same(own, inputs[backend.rank], "gather changed its input")
        for got, expected in zip(outputs or [], inputs, strict=outputs is not None):
            same(got, expected, "gather", dtype, shape, layout)
        output = like(own, layout)
        backend.scatter(output, inputs if backend.rank == root else None, root)
        same(output, inputs[backend.rank], "scatter", dtype, shape, layout)


def reduce_scatter(backend: GroupBackend) -> None:
    """Reduce_scatter gives each rank its own reduction, for each op and dtype."""
    size = backend.size
    for i, (op, dtype) in enumerate(cells()):
        layout = LAYOUTS[i % len(LAYOUTS)]
        for shapes in (
            [SHAPES[i % len(SHAPES)]] * size,
            [(rank + i % 3, 2) for rank in range(size)],
        ):
            inputs = [
                [values(rank, shape, dtype, salt) for salt, shape in enumerate(shapes)]
                for rank in range(size)
            ]
            mine = [each[backend.rank] for each in inputs]
            output = like(mine[0], layout)
            backend.reduce_scatter(output, inputs[backend.rank], op)
            is_reduction(backend, output, mine, op, dtype, shapes, layout)


def reduce_scatter_single(backend: GroupBackend) -> None:
    """Reduce_scatter_single does so with equal parts of one tensor."""
    size = backend.size
    for i, (op, dtype) in enumerate(cells()):
        shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[i % len(LAYOUTS)]
        inputs = [values(rank, (size, *shape), dtype) for rank in range(size)]
        mine = [each[backend.rank] for each in inputs]
        for own in (inputs[backend.rank], inputs[backend.rank].reshape(-1)):  # stacked, joined
            output = like(mine[0], layout)
            backend.reduce_scatter_single(output, laid_out(own, layout), op)
            is_reduction(backend, output, mine, op, dtype, shape, layout)


def reduce_scatter_into_inputs(backend: GroupBackend) -> None:
    """The output of a reduce_scatter may lie anywhere in its inputs."""
    size = backend.size
    for count in (3, 20_000):  # what is large may be read by others while results are written
        inputs = [values(rank, (size, count), torch.float32) for rank in range(size)]
        mine = [each[backend.rank] for each in inputs]
        parts = [part * count for part in range(size)]
        for start in parts + [part + 1 for part in parts[:-1]]:  # one input, or parts of two
            for single in (True, False):
                buffer = inputs[backend.rank].clone().flatten()
                output = buffer[start : start + count]
                if single:
                    backend.reduce_scatter_single(output, buffer, ReduceOp.SUM)
                else:
                    backend.reduce_scatter(output, list(buffer.view(size, count)), ReduceOp.SUM)
                is_reduction(backend, output, mine, ReduceOp.SUM, count, start, single)


def all_to_all(backend: GroupBackend) -> None:
    """All_to_all gives rank j what rank i has for it, also in slices of any length."""
    ranks = range(backend.size)
    for i, dtype in enumerate(DTYPES):
        layout = LAYOUTS[i % len(LAYOUTS)]

        def message(src: int, dst: int, dtype: torch.dtype = dtype, i: int = i) -> Tensor:
            return values(src, ((src + dst) % 3 * (i % 2), 2), dtype, salt=dst)

        inputs = [laid_out(message(backend.rank, dst), layout) for dst in ranks]
        expected = [message(src, backend.rank) for src in ranks]
        outputs = [like(each, layout) for each in expected]
        backend.all_to_all(outputs, inputs)
        for got, wanted in zip(outputs, expected, strict=True):
            same(got, wanted, dtype, layout)

        output = like(torch.cat(expected), layout)
        splits = [len(each) for each in expected], [len(each) for each in inputs]
        backend.all_to_all_single(output, laid_out(torch.cat(inputs), layout), *splits)
        same(output, torch.cat(expected), "splits", dtype, layout)


def all_to_all_single_in_equal_parts(backend: GroupBackend) -> None:
    """All_to_all_single without splits cuts equal slices."""
    size = backend.size
    for shape in [(2 * size,), (size, 3), (0,), (size, 0)]:
        for layout in LAYOUTS:
            inputs = [values(rank, shape, torch.int32) for rank in range(size)]
            rows = shape[0] // size
            part = slice(backend.rank * rows, (backend.rank + 1) * rows)
            expected = torch.cat([each[part] for each in inputs])
            output = like(expected, layout)
            backend.all_to_all_single(output, laid_out(inputs[backend.rank], layout), None, None)
            same(output, expected, shape, layout)


def barrier(backend: GroupBackend) -> None:
    """A barrier, monitored or not, lets all pass once all have come."""
    for _ in range(3):
        backend.barrier()
    work = started(backend.barrier(async_op=True))
    work.wait()
    backend.barrier(timeout=60)
    backend.monitored_barrier(timeout=60)
    backend.monitored_barrier(timeout=60, wait_all_ranks=True)


def inputs_are_kept(backend: GroupBackend) -> None:
    """A collective does not change what it only reads."""
    size = backend.size
    own, parts = values(backend.rank, (size, 3), torch.float32), torch.ones(size, 3)
    before = own.clone()
    backend.all_gather([torch.zeros(size, 3) for _ in range(size)], own)
    same(own, before, "all_gather")
    backend.all_gather_single(torch.zeros(size, size, 3), own)
    same(own, before, "all_gather_single")
    backend.reduce_scatter(torch.zeros(3), list(own), ReduceOp.SUM)
    same(own, before, "reduce_scatter")
    backend.reduce_scatter_single(torch.zeros(3), own, ReduceOp.AVG)
    same(own, before, "reduce_scatter_single")
    backend.all_to_all(list(parts), list(own))
    same(own, before, "all_to_all")
    backend.all_to_all_single(parts, own, None, None)
    same(own, before, "all_to_all_single")
    backend.scatter(torch.zeros(3), list(own) if backend.rank == 0 else None, 0)
    same(own, before, "scatter")


def gathering_in_place(backend: GroupBackend) -> None:
    """The input of an all_gather may be this rank's part of the output."""
    inputs = [values(rank, (5,), torch.float32) for rank in range(backend.size)]
    output = torch.zeros(backend.size, 5)
    output[backend.rank] = inputs[backend.rank]
    backend.all_gather_single(output, output[backend.rank])
    same(output, torch.stack(inputs))
    outputs = list(torch.zeros(backend.size, 5))
    outputs[backend.rank].copy_(inputs[backend.rank])
    backend.all_gather(outputs, outputs[backend.rank])
    same(torch.stack(outputs), torch.stack(inputs))


def outputs_across_inputs(backend: GroupBackend) -> None:
    """A collective reads its inputs before it writes to outputs that lie across them."""
    size, rank = backend.size, backend.rank
    for count in (2, 3000):
        inputs = inputs_of(backend, (size, count), torch.float32, count)
        mine = [each[rank] for each in inputs]
        other = (rank + 1) % size

        def own() -> Tensor:
            return inputs[rank].clone()  # noqa: B023

        room = own()
        backend.all_gather(list(room), room[other])
        gathered = [each[(i + 1) % size] for i, each in enumerate(inputs)]
        same(room, torch.stack(gathered), "all_gather")
        room = own()
        backend.all_gather_single(room, room[other])
        same(room, torch.stack(gathered), "all_gather_single")
        room = own()
        backend.gather(list(room) if rank == 0 else None, room[other], 0)
        same(room, torch.stack(gathered) if rank == 0 else own(), "gather")
        room = own()
        backend.scatter(room[other], list(room) if rank == 0 else None, 0)
        same(room[other], inputs[0][rank], "scatter")
        room = own()
        backend.reduce_scatter(room[other], list(room), ReduceOp.SUM)
        is_reduction(backend, room[other], mine, ReduceOp.SUM, "reduce_scatter")
        room = own()
        backend.reduce_scatter_single(room[other], room, ReduceOp.SUM)
        is_reduction(backend, room[other], mine, ReduceOp.SUM, "reduce_scatter_single")
        room = own()
        backend.all_to_all(list(room), list(room))
        same(room, torch.stack(mine), "all_to_all")
        room = own()
        backend.all_to_all_single(room, room, None, None)
        same(room, torch.stack(mine), "all_to_all_single")


RULES: list[Rule] = [
    all_reduce,
    all_reduce_of_every_shape,
    all_reduce_of_many_elements,
    all_reduce_of_the_same_bits,
    all_reduce_of_special_values,
    all_reduce_with_squares,
    all_reduce_of_a_leaf,
    broadcast,
    reduce,
    all_gather,
    all_gather_single,
    gather_and_scatter,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_into_inputs,
    all_to_all,
    all_to_all_single_in_equal_parts,
    inputs_are_kept,
    gathering_in_place,
    outputs_across_inputs,
    barrier,
]
