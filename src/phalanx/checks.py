"""What arguments may be: one function per kind of argument.

What is wrong with a single rank's call is found here, before anybody else hears of it.
Types are a TypeError, values a ValueError, devices and splits a RuntimeError, as torch has it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from phalanx._native import common_dtype_code, dtype_code
from phalanx.backends import registry
from phalanx.errors import DistBackendError
from phalanx.groups import ProcessGroup
from phalanx.types import DTYPES, ReduceOp

_STRIDED = torch.strided

# Reductions of complex numbers that are those of their parts.
_BY_PARTS = frozenset({"SUM", "AVG", "PREMUL_SUM"})

# Types that only messages can carry, and as what they do: those of bits and of less than a byte.
_BYTES = {
    getattr(torch, name): torch.int16 if name == "bits16" else torch.uint8
    for name in (
        *(f"{kind}{bits}" for kind in ("uint", "int") for bits in range(1, 8)),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
}


def plain(tensor: object) -> TypeGuard[Tensor]:
    """Say whether this is a tensor that needs no second look. Fast; False is no verdict."""
    return dtype_code(tensor) >= 0


def movable(value: Any, name: str, operation: str, written: bool = True) -> Tensor:
    """Return argument ``name``, a tensor or NumPy array, as a tensor whose bytes can be moved."""
    if plain(value):
        return value
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value = torch.from_numpy(value)
        elif written:
            raise ValueError(f"{operation} writes to {name}, which is a read-only array")
        else:
            value = torch.from_numpy(value.copy())
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{operation} needs a tensor or array as {name}, got {type(value).__name__}"
        )
    if not value.is_cpu and value.device.type not in registry.served:
        raise DistBackendError(
            f"{operation} cannot use {name} on device {value.device}: no group has an engine for "
            "it; move it with .cpu(), or name one per device, such as 'cpu:phalanx,cuda:nccl'"
        )
    if value.layout is not _STRIDED:
        raise ValueError(
            f"{operation} needs {name} with dense layout, got {value.layout}; "
            "make it dense with .to_dense()"
        )
    if value.is_conj() or value.is_neg():
        raise ValueError(
            f"{operation} cannot use {name}, a view whose conjugation or negation is still to be "
            "done; do it with .resolve_conj().resolve_neg()"
        )
    if value.dtype is torch.complex32:
        return torch.view_as_real(value)
    if value.dtype not in DTYPES:
        raise TypeError(
            f"{operation} cannot move elements of {value.dtype} ({name}): pass the bytes, with "
            ".view(torch.uint8)"
        )
    return value


def message(value: Any, name: str, operation: str, written: bool = True) -> Tensor:
    """Return argument ``name`` of a message, whose elements may be of any type."""
    if plain(value):
        return value
    if isinstance(value, Tensor) and value.dtype in _BYTES and value.is_cpu:
        return value.view(_BYTES[value.dtype])
    return movable(value, name, operation, written)


def reducible(value: Any, name: str, operation: str, op: ReduceOp, written: bool = True) -> Tensor:
    """Return argument ``name`` as a tensor that ``op`` can reduce."""
    if dtype_code(value) in op.codes:
        return cast(Tensor, value)
    tensor = movable(value, name, operation, written)
    is_paired = isinstance(value, Tensor) and value.dtype is torch.complex32
    if tensor.dtype not in op.dtypes or (is_paired and op.name not in _BY_PARTS):
        if op == ReduceOp.PREMUL_SUM:
            raise ValueError(f"{operation}: PREMUL_SUM needs its factor, as ReduceOp.premul_sum(2)")
        raise ValueError(f"{operation} does not support {op} on {value.dtype} tensors")
    return tensor


def tensors(
    values: Any, name: str, operation: str, size: int | None = None, written: bool = True
) -> list[Tensor]:
    """Return argument ``name``, a list of ``size`` tensors of one dtype."""
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{operation} needs a list of tensors as {name}, got {type(values).__name__}"
        )
    if isinstance(values, list) and common_dtype_code(values) >= 0:
        found = values
    else:
        found = _each_movable(values, name, operation, written)
    if size is not None and len(found) != size:
        raise ValueError(
            f"{operation} needs one tensor per rank in {name}: got {len(found)} for {size} ranks"
        )
    return found


def _each_movable(values: Sequence[Any], name: str, operation: str, written: bool) -> list[Tensor]:
    found = [
        value if plain(value) else movable(value, f"{name}[{i}]", operation, written)
        for i, value in enumerate(values)
    ]
    for i, tensor in enumerate(found):
        if tensor.dtype != found[0].dtype:
            raise ValueError(
                f"{operation} needs one dtype, but {name}[0] is {found[0].dtype} and "
                f"{name}[{i}] is {tensor.dtype}"
            )
    return found


def same_dtype(a: Tensor, b: Tensor, names: str, operation: str) -> None:
    """Check that ``names``, two arguments such as "output and input", have one dtype."""
    if a.dtype != b.dtype:
        raise ValueError(f"{operation} needs {names} of one dtype, got {a.dtype} and {b.dtype}")


def same_count(a: Tensor, b: Tensor, names: str, operation: str, times: int = 1) -> None:
    """Check that the first of ``names`` has ``times`` as many elements as the second."""
    if a.numel() != times * b.numel():
        relation = f"{times} times as many elements in" if times != 1 else "as many elements in"
        raise ValueError(
            f"{operation} needs {relation} the first of {names} as in the second, got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )


def splits(
    tensor: Tensor, sizes: Sequence[int] | None, name: str, operation: str, size: int
) -> list[int]:
    """Return how the first dimension of argument ``name`` is cut for ``size`` ranks."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if length % size:
            raise RuntimeError(
                f"{operation}: {name} has {length} rows, which {size} ranks cannot share equally; "
                "give split sizes"
            )
        return [length // size] * size
    found = [int(part) for part in sizes]
    if len(found) != size:
        raise RuntimeError(
            f"{operation} needs one split size per rank for {name}: got {len(found)} for {size} "
            "ranks"
        )
    if min(found) < 0 or sum(found) != length:
        raise RuntimeError(
            f"{operation}: the split sizes {found} of {name} do not add up to its {length} rows"
        )
    return found


def peer(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str, operation: str
) -> int:
    """Return the group rank that ``name`` (global) or ``group_name`` (in the group) means."""
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{operation} takes {name} or group_{name}, not both")
        group.to_global_rank(group_rank)
        return operator.index(group_rank)  # NumPy's integers, too
    if global_rank is None:
        raise ValueError(f"{operation} needs {name} (a global rank) or group_{name}")
    return group.to_group_rank(global_rank)


def tag(value: Any, operation: str) -> int:
    """Return a message tag, an integer of at most 31 bits."""
    if type(value) is not int and isinstance(value, SupportsIndex):
        value = operator.index(value)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{operation} needs a tag from 0 to 2**31 - 1, got {value!r}")
    return value


def only_on_root(given: object, name: str, is_root: bool, root: str, operation: str) -> None:
    """Check that argument ``name`` is there on the root rank and nowhere else."""
    if is_root and not given:
        raise ValueError(f"{operation} needs {name} on the {root} rank")
    if given and not is_root:
        raise ValueError(f"{operation} takes {name} on the {root} rank only")
