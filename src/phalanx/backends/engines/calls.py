"""Which collective a message belongs to, and what to say if it is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx import _native
from phalanx.backends import shapes
from phalanx.errors import CollectiveMismatch, DistTimeout, PeerFailed
from phalanx.types import ReduceOp

# Those in which all ranks have tensors of one size; in others each message says its own.
_ALIKE = {"_all_reduce", "_reduce", "_broadcast", "_gather", "_scatter"}
_NEXT = "\x1f"
_INFO, _DETAIL = 1, 2


class Call:
    """One collective of a group: the ``number``-th, what it is, and the user's line.

    ``what`` shows the shape of a tensor; ``agreed`` says what must be the same on all ranks, its
    size among it.
    """

    __slots__ = ("agreed", "is_strict", "number", "site", "what")

    def __init__(
        self, number: int, what: str, site: str, agreed: str, is_strict: bool | None = None
    ) -> None:
        self.number = number
        self.what = what
        self.site = site
        self.agreed = agreed
        self.is_strict = _native.debug_level() >= _DETAIL if is_strict is None else is_strict

    @classmethod
    def of(cls, step: str, args: Sequence[Any], number: int, site: str) -> Call:
        """Describe a step by what must be the same on all ranks."""
        words = []
        tensors = ["", ""]
        tensor: Tensor | None = None
        for arg in args:
            if isinstance(arg, ReduceOp):
                words.append(arg.name)
            elif isinstance(arg, int):
                words.append(f"root {arg}")
            elif isinstance(arg, Tensor):
                tensor = arg if tensor is None else tensor
            elif arg and tensor is None:
                tensor = arg[0]
        if tensor is not None and step in _ALIKE:
            tensors = [shown(tensor), counted(tensor)]
        elif tensor is not None:
            tensors = [dtype_name(tensor.dtype)] * 2
        name = step.removeprefix("_")
        what, agreed = (f"{name}({', '.join(filter(None, [*words, of]))})" for of in tensors)
        return cls(number, what, site, agreed)

    def label(self) -> bytes:
        """Return what travels with each message of the collective."""
        strict = "strict" if self.is_strict else ""
        fields = [str(self.number), self.agreed, strict, self.what, self.site]
        return _NEXT.join(fields).encode()[:500]

    @classmethod
    def read(cls, label: bytes) -> Call:
        fields = [*label.decode(errors="replace").split(_NEXT), *[""] * 4]
        number, agreed, strict, what, site = fields[:5]
        return cls(int(number), what, site, agreed, bool(strict))

    def matches(self, other: Call) -> bool:
        """Say whether two ranks are in one collective, for all that must agree."""
        if (self.number, self.agreed) != (other.number, other.agreed):
            return False
        return not (self.is_strict and other.is_strict) or self.what == other.what

    def is_to_tell(self, other: Call) -> bool:
        """Say whether this rank wants to hear that a call that matches has another shape."""
        return self.what != other.what and _native.debug_level() >= _INFO

    def __str__(self) -> str:
        return f"{self.what} #{self.number}{self.place()}"

    def place(self) -> str:
        return f", {self.site}" if self.site else ""


def differ(group: str, calls: Mapping[int, Call]) -> str:
    """Say, line by line, which ranks are in which collective."""
    if len({(call.number, call.agreed) for call in calls.values()}) == 1:
        return f"group {group!r}: {shapes.REFUSED}{_lines(calls)}"
    return (
        f"ranks of group {group!r} are in different collectives; all must make the same calls in "
        f"the same order{_lines(calls)}"
    )


def differ_in_shape(group: str, calls: Mapping[int, Call]) -> str:
    """Say, line by line, which ranks bring which shape."""
    return f"group {group!r}: {shapes.DIFFER}{_lines(calls)}"


def _lines(calls: Mapping[int, Call]) -> str:
    return "".join(f"\n  rank {rank}: {call}" for rank, call in sorted(calls.items()))


def shown(tensor: Tensor) -> str:
    """Describe a tensor by its shape: "float32[3,4]"."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".replace(" ", "")


def counted(tensor: Tensor) -> str:
    """Describe a tensor by its size: "float32 x 12"."""
    return f"{dtype_name(tensor.dtype)} x {tensor.numel()}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without torch's name."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def running(engine: Any, call: Call, limit: float) -> Iterator[None]:
    """Have an engine be in a collective; if that fails, ranks are out of step for ever."""
    engine.call = call
    try:
        yield
    except DistTimeout as error:
        engine.end_collectives(f"{call} took more than {limit:g} s")
        raise DistTimeout(
            f"{error}; a limit of {limit:g} s was set, and the group has no collectives any more"
        ) from error
    except (CollectiveMismatch, PeerFailed) as error:
        engine.end_collectives(getattr(error, "reason", str(error)), type(error))
        raise
    except BaseException as error:
        engine.end_collectives(f"{type(error).__name__} in {call}: {error}".rstrip(": "))
        raise
    finally:
        engine.call = None
