"""The arithmetic of a reduction, in plain torch: what every fast kernel is tested against.

Contributions are combined one after the other in rank order. float16 and bfloat16 are summed in
float32 and rounded once, at the end; so results are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phalanx.types import ReduceOp

_COMBINE: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# What torch lacks on the wider unsigned integers.
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
_COMBINE_UNSIGNED: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
}


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def contribution(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return a contiguous copy of one rank's input, ready to be combined."""
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=wide).copy_(tensor)
    if op.factor is not None:
        _parts(copy).mul_(op.factor)
    return copy


def combine(
    left: torch.Tensor, right: torch.Tensor, op: ReduceOp, out: torch.Tensor | None = None
) -> None:
    """Combine two contributions into one of them: ``left``, from the lower ranks, unless told."""
    out = left if out is None else out
    if left.dtype in _UNSIGNED and op.name in _COMBINE_UNSIGNED:
        _COMBINE_UNSIGNED[op.name](left.numpy(), right.numpy(), out=out.numpy())
    elif left.is_complex() and op.name == "PRODUCT":
        # Spelled out: torch's own product may fuse a multiplication with the addition after it.
        a, b, c, d = left.real, left.imag, right.real, right.imag
        out.copy_(torch.complex(a * c - b * d, a * d + b * c))
    else:
        _COMBINE[op.name](left, right, out=out)


def finish(total: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Turn the combination of all ``size`` contributions into the result."""
    if op.name == "AVG":
        _parts(total).div_(size)


def reduce(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return the reduction of all ranks' tensors, given in rank order."""
    total = contribution(tensors[0], op)
    for tensor in tensors[1:]:
        combine(total, contribution(tensor, op), op)
    finish(total, op, len(tensors))
    return total.to(tensors[0].dtype)


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of all elements (of their magnitudes), in float64."""
    return _parts(tensor.detach().contiguous()).to(torch.float64).square().sum()


def check_squares(squares: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``squares`` can hold the sum of squares of a reduced tensor."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:
        raise ValueError(
            f"all_reduce: squares: a sum of squares is not defined for {tensor.dtype} "
            "(floating and complex dtypes have one)"
        )
    if squares.dtype != torch.float64 or squares.numel() != 1:
        raise ValueError("all_reduce: squares must be a float64 tensor of one element")
