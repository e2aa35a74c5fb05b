"""What ranks put in, and what must come out: every rank can compute every other rank's input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.backends import reduction
from phalanx.backends.base import GroupBackend
from phalanx.types import DTYPES, ReduceOp
from phalanx.work import Work

Rule = Callable[[GroupBackend], None]

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


def is_reduction(
    backend: GroupBackend, got: Tensor, inputs: list[Tensor], op: ReduceOp, *case: object
) -> None:
    """Assert that ``got`` is the reduction of all ranks' inputs, as exactly as a backend says."""
    expected = reduction.reduce(inputs, op)
    is_exact = not (got.is_floating_point() or got.is_complex()) or op.name in ("MIN", "MAX")
    if backend.in_rank_order or is_exact:
        same(got, expected, op, *case)
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (got, expected, op, case)
    # Each of the ranks' contributions may have been rounded once more, on its way to the result.
    wide = [_wide(each) for each in inputs]
    size = _wide(expected).abs() if op.name == "PRODUCT" else sum(each.abs() for each in wide)
    room = 2 * backend.size * torch.finfo(got.dtype).eps * size
    far = (_wide(got) - _wide(expected)).abs() > room
    wrong = far | (got.isfinite() != expected.isfinite()) | (got.isnan() != expected.isnan())
    assert not bool(wrong.any()), f"{op} {case}: got {got.tolist()}, expected {expected.tolist()}"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def inputs_of(
    backend: GroupBackend, shape: Sequence[int], dtype: torch.dtype, salt: int = 0
) -> list[Tensor]:
    """Return the inputs of all ranks."""
    return [values(rank, shape, dtype, salt) for rank in range(backend.size)]


def like(tensor: Tensor, layout: str) -> Tensor:
    """Return an output for ``tensor``: of its shape and type, with none of its values."""
    return laid_out(torch.zeros_like(tensor), layout)


def cells() -> list[tuple[ReduceOp, torch.dtype]]:
    """Return each op with each dtype that it means something on."""
    return [(op, dtype) for op in OPS for dtype in DTYPES if dtype in op.dtypes]


def started(work: Work | int | None) -> Work:
    """Return the work of an asynchronous call."""
    assert isinstance(work, Work), f"async_op=True must return a Work, got {work!r}"
    return work
