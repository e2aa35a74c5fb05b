"""Small values used by every layer: reductions, element types, timeouts."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, ClassVar

import torch

import phalanx_autoload
from phalanx import _native

# Tell the native core what a tensor is, and in whose files no line is the user's.
_native.configure(
    torch.Tensor,
    torch.uint8,
    torch.int8,
    [
        os.path.dirname(os.path.abspath(module)) + os.sep
        for module in (__file__, phalanx_autoload.__file__, torch.__file__)
    ],
)

default_pg_timeout = timedelta(minutes=30)
"""How long the operations of a group wait for other ranks, unless it was made with another time."""

Timeout = timedelta | float

# The order is the protocol between ranks: it mirrors `enum class DType` in native/types.hpp.
_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
# Older torch lacks the newest of the float8 types; codes do not shift for that.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_NAMES) if hasattr(torch, name)
}
_INTEGERS = frozenset(d for d, code in DTYPES.items() if code <= 8)
_FLOATS = frozenset(d for d, code in DTYPES.items() if 9 <= code <= 12)
_COMPLEX = frozenset(d for d, code in DTYPES.items() if 13 <= code <= 14)
_REAL = _INTEGERS | _FLOATS

# Which op means something on which element type. float8 is moved, never reduced.
_CELLS: dict[str, frozenset[torch.dtype]] = {
    "SUM": _REAL | _COMPLEX,
    "AVG": _FLOATS | _COMPLEX,
    "PRODUCT": _REAL | _COMPLEX,
    "MIN": _REAL,
    "MAX": _REAL,
    "BAND": _INTEGERS,
    "BOR": _INTEGERS,
    "BXOR": _INTEGERS,
    "PREMUL_SUM": _FLOATS | _COMPLEX,
}
_CODES = {name: code for code, name in enumerate(_CELLS)}


class ReduceOp:
    """Name a reduction: ``ReduceOp.SUM``, ``ReduceOp.MAX``, ``ReduceOp.premul_sum(0.5)``.

    ``ReduceOp(x)`` accepts a name, another ``ReduceOp``, or an operation of another library whose
    text form ends in one of the names (such as torch's own ``RedOpType.SUM``).
    Values are immutable, hashable and picklable. On bool, SUM and MAX are *or*, PRODUCT and MIN
    are *and*.
    """

    __slots__ = ("code", "codes", "dtypes", "factor", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]

    name: str
    code: int
    dtypes: frozenset[torch.dtype]  # those it can reduce
    codes: frozenset[int]  # the same as the core names them
    factor: float | None

    def __init__(self, op: object, factor: float | None = None) -> None:
        if isinstance(op, ReduceOp):
            name, factor = op.name, op.factor if factor is None else factor
        else:
            # torch's wrapper class keeps its enum member under `.op`.
            name = str(getattr(op, "op", op)).rpartition(".")[2].upper()
        if name not in _CODES:
            raise ValueError(f"unknown reduce op {op!r} (known: {', '.join(_CODES)})")
        if factor is not None and name != "PREMUL_SUM":
            raise ValueError(f"ReduceOp.{name} takes no factor; only PREMUL_SUM has one")
        init = object.__setattr__
        init(self, "name", name)
        init(self, "code", _CODES[name])
        init(self, "factor", factor)
        # Without its factor PREMUL_SUM is but a name.
        dtypes = _CELLS[name] if name != "PREMUL_SUM" or factor is not None else frozenset()
        init(self, "dtypes", dtypes)
        init(self, "codes", frozenset(DTYPES[dtype] for dtype in dtypes))

    @classmethod
    def premul_sum(cls, factor: float | torch.Tensor) -> ReduceOp:
        """Return a sum in which each rank's contribution is first multiplied by its ``factor``."""
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                raise ValueError(
                    f"premul_sum takes a number or a tensor of one element, got {factor.numel()}"
                )
            factor = factor.item()
        return cls("PREMUL_SUM", float(factor))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ReduceOp is immutable: cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self.name == other.name and self.factor == other.factor

    def __hash__(self) -> int:
        return hash((self.name, self.factor))

    def __repr__(self) -> str:
        if self.factor is None:
            return f"ReduceOp.{self.name}"
        return f"ReduceOp.premul_sum({self.factor!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.name, self.factor)


for _name in _CODES:
    setattr(ReduceOp, _name, ReduceOp(_name))


def supports(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Say whether ``op`` means something on elements of ``dtype``."""
    return dtype in op.dtypes


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Say whether complex tensors can be reduced with ``reduceOp``."""
    return torch.complex64 in _CELLS[ReduceOp(reduceOp).name]


def seconds(timeout: Timeout, name: str = "timeout") -> float:
    """Read a timeout, a timedelta or a number of seconds, as seconds."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    elif isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(
            f"{name} must be a timedelta or a number of seconds, got {type(timeout).__name__}"
        )
    if not timeout >= 0:  # also refuses NaN
        raise ValueError(f"{name} must not be negative, got {timeout} s")
    return float(timeout)


class Deadline:
    """A moment that several waits in a row share."""

    __slots__ = ("_at", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit  # in seconds, from the beginning
        self._at = time.monotonic() + limit

    def left(self) -> float:
        """Return the seconds that remain, never less than zero."""
        return max(0.0, self._at - time.monotonic())
