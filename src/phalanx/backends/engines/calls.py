"""Which collective a message belongs to, and what to say if it is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from phalanx.errors import CollectiveMismatch, DistTimeout, PeerFailed
from phalanx.types import ReduceOp

# Those in which all ranks have tensors of one size; in others each message says its own.
_ALIKE = {"_all_reduce", "_reduce", "_broadcast"}
_NEXT = "\x1f"


class Call:
    """One collective of a group: the ``number``-th, what it is, and the user's line."""

    __slots__ = ("number", "site", "what")

    def __init__(self, number: int, what: str, site: str) -> None:
        self.number = number
        self.what = what
        self.site = site

    @classmethod
    def of(cls, step: str, args: Sequence[Any], number: int, site: str) -> Call:
        """Describe a step by what must be the same on all ranks."""
        words = []
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
        if tensor is not None:
            count = f" x {tensor.numel()}" if step in _ALIKE else ""
            words.append(f"{str(tensor.dtype).removeprefix('torch.')}{count}")
        return cls(number, f"{step.removeprefix('_')}({', '.join(words)})", site)

    def label(self) -> bytes:
        """Return what travels with each message of the collective."""
        return _NEXT.join([str(self.number), self.what, self.site]).encode()[:500]

    @classmethod
    def read(cls, label: bytes) -> Call:
        number, what, site = [*label.decode(errors="replace").split(_NEXT), "", ""][:3]
        return cls(int(number), what, site)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and (self.number, self.what) == (other.number, other.what)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.what} #{self.number}{self.place()}"

    def place(self) -> str:
        return f", {self.site}" if self.site else ""


def differ(group: str, calls: Mapping[int, Call]) -> str:
    """Say, line by line, which ranks are in which collective."""
    lines = [f"\n  rank {rank}: {call}" for rank, call in sorted(calls.items())]
    return (
        f"ranks of group {group!r} are in different collectives; all must make the same calls in "
        f"the same order{''.join(lines)}"
    )


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
