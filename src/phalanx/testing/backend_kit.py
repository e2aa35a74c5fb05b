"""Does a backend keep the contract of `GroupBackend`? Every operation against plain torch.

``check_backend(make)`` runs all checks on ranks that are threads. To check ranks of any other
kind, have each of them call ``check_group(backend)``, and in a group of its own
``check_abort(backend)``. Failures are AssertionErrors that name operation and case.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.backends import reduction
from phalanx.backends.base import GroupBackend
from phalanx.errors import DistBackendError, DistTimeout
from phalanx.types import DTYPES, ReduceOp
from phalanx.work import Work

Make = Callable[[int, int, dict[str, Any]], GroupBackend]
Check = Callable[[GroupBackend], None]

OPS = [
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.premul_sum(0.3),
]
SHAPES = [(5,), (), (0,), (3, 4), (2, 0, 3)]
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


def check_backend(make: Make, sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Check groups of these sizes, whose ranks are threads.

    ``make(rank, size, shared)`` returns one rank's backend; ``shared`` is a dict that the ranks of
    one group have in common. Thread-safe as dicts are: ``setdefault`` is how ranks meet.
    """
    for size in sizes:
        for check in (check_group, check_abort):
            shared: dict[str, Any] = {}

            def rank_of(
                rank: int,
                size: int = size,
                check: Check = check,
                shared: dict[str, Any] = shared,
            ) -> None:
                backend = make(rank, size, shared)
                try:
                    check(backend)
                finally:
                    backend.close()
                    backend.close()  # twice is fine

            _in_threads(rank_of, size)


def check_group(backend: GroupBackend) -> None:
    """Check all operations; every rank of the group must call this."""
    for check in CHECKS:
        try:
            check(backend)
        except Exception as error:
            where = f"{check.__name__} on rank {backend.rank} of {backend.size}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


def check_abort(backend: GroupBackend) -> None:
    """Check that an abort reaches who waits; every rank must call this, and then only close."""
    if backend.size == 1:
        return
    if backend.rank == 0:
        # By then somebody is on the way to waiting, or will find the group aborted already.
        backend.recv(torch.empty(1), backend.size - 1)
        backend.abort("rank 0 has had enough")
        return
    if backend.rank == backend.size - 1:
        backend.send(torch.ones(1), 0)
    try:
        backend.recv(torch.empty(1), 0, tag=9, timeout=60)
    except DistTimeout as error:
        raise AssertionError("an abort did not wake a receive") from error
    except DistBackendError as error:
        if "had enough" not in str(error):
            raise AssertionError(f"the reason of an abort is missing in: {error}") from error
    else:
        raise AssertionError("a receive on an aborted group returned")


def _in_threads(body: Callable[[int], None], size: int) -> None:
    """Run ``body(rank)`` on one thread per rank and raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    while not errors and any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.05)
    if errors:
        raise errors[0]


# What ranks put in: every rank can compute every other rank's input.


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Return rank's input of this shape and type, a different one per ``salt``."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    count = math.prod(shape)
    if dtype.is_complex:
        flat = torch.randn(count, dtype=dtype, generator=generator)
    elif dtype.is_floating_point:
        flat = torch.randn(count, generator=generator).to(dtype)
    else:
        flat = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator)
        flat = flat.to(torch.uint8).view(torch.uint8 if dtype == torch.bool else dtype)
        flat = flat % 2 == 1 if dtype == torch.bool else flat
    return flat.reshape(tuple(shape))


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a copy with the same elements, otherwise arranged in memory."""
    if layout == "transposed" and tensor.dim() > 1:
        copy = torch.empty(tensor.shape[::-1], dtype=tensor.dtype)
        copy = copy.permute(*range(tensor.dim())[::-1])
    elif layout == "strided" and tensor.dim() > 0:
        room = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        copy = room[..., ::2]
    elif layout == "offset":
        copy = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    else:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)


def same(got: Tensor, expected: Tensor, *case: object) -> None:
    """Assert that two tensors are equal element by element, NaN being equal to NaN."""
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype, case)
    assert got.shape == expected.shape, (got.shape, expected.shape, case)
    if got.dtype.is_complex:
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
    if got.dtype.is_floating_point and got.dtype.itemsize > 1:
        equal = (got == expected) | (got.isnan() & expected.isnan())
    else:
        view = torch.uint8 if got.dtype.is_floating_point else got.dtype
        equal = got.view(view) == expected.view(view)
    assert bool(equal.all()), f"{case}: got {got.tolist()}, expected {expected.tolist()}"


def reduced(
    backend: GroupBackend, shape: Sequence[int], dtype: torch.dtype, op: ReduceOp
) -> Tensor:
    return reduction.reduce([values(rank, shape, dtype) for rank in range(backend.size)], op)


def like(tensor: Tensor, layout: str) -> Tensor:
    """Return an output for ``tensor``: of its shape and type, with none of its values."""
    return laid_out(torch.zeros_like(tensor), layout)


def cells() -> list[tuple[ReduceOp, torch.dtype]]:
    """Return each op with each dtype that it means something on."""
    return [(op, dtype) for op in OPS for dtype in DTYPES if dtype in op.dtypes]


# The checks. All ranks run them in this order.


def all_reduce(backend: GroupBackend) -> None:
    for op, dtype in cells():
        for shape in [(5,), (3, 4)]:
            tensor = values(backend.rank, shape, dtype)
            backend.all_reduce(tensor, op)
            same(tensor, reduced(backend, shape, dtype, op), op, dtype, shape)


def all_reduce_of_every_shape(backend: GroupBackend) -> None:
    for shape in SHAPES:
        for i in range(len(LAYOUTS)):
            layout = LAYOUTS[(i + backend.rank) % len(LAYOUTS)]  # not the same on all ranks
            tensor = laid_out(values(backend.rank, shape, torch.float32), layout)
            backend.all_reduce(tensor, ReduceOp.SUM)
            same(tensor, reduced(backend, shape, torch.float32, ReduceOp.SUM), shape, layout)


def all_reduce_of_many_elements(backend: GroupBackend) -> None:
    for count in (1000, 70_001, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            tensor = values(backend.rank, (count,), dtype)
            backend.all_reduce(tensor, ReduceOp.SUM)
            expected = reduced(backend, (count,), dtype, ReduceOp.SUM)
            assert torch.equal(tensor, expected), (count, dtype)


def all_reduce_of_special_values(backend: GroupBackend) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            inputs = [special.roll(rank).to(dtype) for rank in range(backend.size)]
            tensor = inputs[backend.rank].clone()
            backend.all_reduce(tensor, op)
            same(tensor, reduction.reduce(inputs, op), op, dtype)


def all_reduce_with_squares(backend: GroupBackend) -> None:
    for count in (0, 1, 1000, 70_001):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            tensor = values(backend.rank, (count,), dtype)
            squares = torch.full((1,), -1.0, dtype=torch.float64)
            backend.all_reduce(tensor, ReduceOp.AVG, squares=squares)
            same(tensor, reduced(backend, (count,), dtype, ReduceOp.AVG), count, dtype)
            torch.testing.assert_close(
                squares[0], reduction.sum_of_squares(tensor), rtol=1e-12, atol=0
            )
            everybody = [torch.zeros(1, dtype=torch.float64) for _ in range(backend.size)]
            backend.all_gather(everybody, squares)
            assert all(torch.equal(other, squares) for other in everybody), (count, dtype)


def all_reduce_of_a_leaf(backend: GroupBackend) -> None:
    tensor = torch.ones(3, requires_grad=True)
    backend.all_reduce(tensor, ReduceOp.SUM)
    same(tensor.detach(), torch.full((3,), float(backend.size)))
    assert tensor.requires_grad
    assert tensor.is_leaf


def broadcast(backend: GroupBackend) -> None:
    for root in range(backend.size):
        for i, dtype in enumerate(DTYPES):
            shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[(i + backend.rank) % len(LAYOUTS)]
            expected = values(root, shape, dtype)
            tensor = laid_out(values(backend.rank, shape, dtype), layout)
            backend.broadcast(tensor, root)
            same(tensor, expected, root, dtype, shape, layout)


def reduce(backend: GroupBackend) -> None:
    for i, (op, dtype) in enumerate(cells()):
        root, shape = i % backend.size, SHAPES[i % len(SHAPES)]
        before = values(backend.rank, shape, dtype)
        tensor = laid_out(before, LAYOUTS[i % len(LAYOUTS)])
        backend.reduce(tensor, root, op)
        expected = reduced(backend, shape, dtype, op) if backend.rank == root else before
        same(tensor, expected, op, dtype, shape, f"root {root}")


def all_gather(backend: GroupBackend) -> None:
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
            expected = reduction.reduce([each[backend.rank] for each in inputs], op)
            output = like(expected, layout)
            backend.reduce_scatter(output, inputs[backend.rank], op)
            same(output, expected, op, dtype, shapes, layout)


def reduce_scatter_single(backend: GroupBackend) -> None:
    size = backend.size
    for i, (op, dtype) in enumerate(cells()):
        shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[i % len(LAYOUTS)]
        inputs = [values(rank, (size, *shape), dtype) for rank in range(size)]
        expected = reduction.reduce([each[backend.rank] for each in inputs], op)
        for own in (inputs[backend.rank], inputs[backend.rank].reshape(-1)):  # stacked, joined
            output = like(expected, layout)
            backend.reduce_scatter_single(output, laid_out(own, layout), op)
            same(output, expected, op, dtype, shape, layout)


def all_to_all(backend: GroupBackend) -> None:
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
    for _ in range(3):
        backend.barrier()
    work = _started(backend.barrier(async_op=True))
    work.wait()
    backend.barrier(timeout=60)
    backend.monitored_barrier(timeout=60)
    backend.monitored_barrier(timeout=60, wait_all_ranks=True)


def works(backend: GroupBackend) -> None:
    tensors = [values(backend.rank, (100,), torch.float32, salt) for salt in range(6)]
    started = [
        _started(backend.all_reduce(tensor, ReduceOp.SUM, async_op=True)) for tensor in tensors
    ]
    for i in (3, 0, 5, 1, 4, 2):
        assert started[i].wait()
        assert started[i].is_completed()
        assert started[i].is_success()
        assert started[i].exception() is None
        inputs = [values(rank, (100,), torch.float32, i) for rank in range(backend.size)]
        same(tensors[i], reduction.reduce(inputs, ReduceOp.SUM), i)
    result = started[0].result()
    assert len(result) == 1
    same(result[0], tensors[0])
    same(started[1].get_future().wait()[0], tensors[1])


def dropped_works(backend: GroupBackend) -> None:
    tensor = torch.ones(10)
    backend.all_reduce(tensor, ReduceOp.SUM, async_op=True)
    backend.barrier()  # in order: it ends after the one before it
    same(tensor, torch.full((10,), float(backend.size)))


def coalesced(backend: GroupBackend) -> None:
    for async_op in (False, True):
        a, b = torch.ones(3), torch.ones(4, dtype=torch.int64)
        output = torch.zeros(backend.size, 3)
        calls = [
            ("all_reduce", (a, ReduceOp.SUM)),
            ("all_reduce", (b, ReduceOp.SUM)),
            ("all_gather_single", (output, a)),
        ]
        work = backend.coalesce(calls, async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        same(a, torch.full((3,), float(backend.size)))
        same(b, torch.full((4,), backend.size))
        same(output, a.expand(backend.size, 3).contiguous())


def sequence_numbers(backend: GroupBackend) -> None:
    before = backend.sequence_number()
    backend.barrier()
    backend.all_reduce(torch.ones(1), ReduceOp.SUM)
    assert backend.sequence_number() == before + 2


def messages(backend: GroupBackend) -> None:
    """Send around a ring, each rank to its right neighbour."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    for i, dtype in enumerate(DTYPES):
        shape, layout = SHAPES[i % len(SHAPES)], LAYOUTS[i % len(LAYOUTS)]
        expected = values(left, shape, dtype)
        own, output = laid_out(values(backend.rank, shape, dtype), layout), like(expected, layout)
        send = _started(backend.send(own, right, async_op=True))  # to itself in a group of one
        assert backend.recv(output, left) == left
        send.wait()
        same(output, expected, dtype, shape, layout)


def large_messages(backend: GroupBackend) -> None:
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    count = 1 << 20
    output = torch.zeros(count)
    send = _started(
        backend.send(values(backend.rank, (count,), torch.float32), right, async_op=True)
    )
    recv = _started(backend.recv(output, left, async_op=True))
    recv.wait()
    send.wait()
    assert recv.source_rank() == left
    assert torch.equal(output, values(left, (count,), torch.float32))


def blocking_messages(backend: GroupBackend) -> None:
    tensor = torch.zeros(2)
    if backend.rank == 0:
        for peer in range(1, backend.size):
            backend.send(torch.full((2,), float(peer)), peer)
    else:
        assert backend.recv(tensor, 0) == 0
        same(tensor, torch.full((2,), float(backend.rank)))


def tags(backend: GroupBackend) -> None:
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sends = [
        _started(backend.send(torch.tensor([10 * tag + i]), right, tag, async_op=True))
        for i in range(3)
        for tag in (0, 1, 7)
    ]
    for tag in (7, 0, 1):  # not the order of sending; within a tag it is kept
        for i in range(3):
            output = torch.zeros(1, dtype=torch.int64)
            backend.recv(output, left, tag)
            assert output.item() == 10 * tag + i, (tag, i, output)
    for send in sends:
        send.wait()


def any_source(backend: GroupBackend) -> None:
    if backend.rank == 0:
        seen = set()
        for _ in range(1, backend.size):
            output = torch.zeros(1, dtype=torch.int64)
            source = backend.recv(output, None)
            assert source == output.item()
            seen.add(source)
        assert seen == set(range(1, backend.size))
        if backend.size > 1:
            late = _started(backend.recv(torch.zeros(1, dtype=torch.int64), None, 3, async_op=True))
            backend.broadcast(torch.zeros(1), 0)
            late.wait()
            assert late.source_rank() == 1
    else:
        backend.send(torch.tensor([backend.rank]), 0)
        backend.broadcast(torch.zeros(1), 0)
        if backend.rank == 1:
            backend.send(torch.tensor([1]), 0, 3)


def timeouts(backend: GroupBackend) -> None:
    for limit in (0.0, 0.02):
        try:
            backend.recv(torch.zeros(1), (backend.rank + 1) % backend.size, 77, timeout=limit)
        except DistTimeout:
            pass
        else:
            raise AssertionError("a receive of nothing returned")
    tensor = torch.ones(1)
    backend.all_reduce(tensor, ReduceOp.SUM)  # the group has not suffered
    same(tensor, torch.tensor([float(backend.size)]))


def _started(work: Work | int | None) -> Work:
    assert isinstance(work, Work), f"async_op=True must return a Work, got {work!r}"
    return work


CHECKS: list[Check] = [
    all_reduce,
    all_reduce_of_every_shape,
    all_reduce_of_many_elements,
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
    all_to_all,
    all_to_all_single_in_equal_parts,
    barrier,
    works,
    dropped_works,
    coalesced,
    sequence_numbers,
    messages,
    large_messages,
    blocking_messages,
    tags,
    any_source,
    timeouts,
]
