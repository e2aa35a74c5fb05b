"""What a rank tells the others of its calls, where they can read it also while it hangs."""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
import zlib
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INNER = (PACKAGE, contextlib.__file__)  # blocks of `with` are left through contextlib
_LAUNCHER = os.path.join(PACKAGE, "launch", "")

_ROOM = 8192  # bytes of a note, of which the engine keeps no more
_STACK_ROOM = 5000
NOW = "now"  # key of the entry, always the last, that says where a rank stands between calls
_NEXT_ENTRY, _NEXT_FIELD = "\x1e", "\x1f"


class Entry(NamedTuple):
    """One call of a rank. ``key`` is the same on all ranks that take part in an operation."""

    key: str
    title: str
    statistics: str
    stack: str  # "" if there was no room for it


def written(entries: Sequence[Entry]) -> str:
    """Put entries, the latest last, into a note.

    Where room is short, older ones lose their stacks; the oldest are left out.
    """
    room = _ROOM
    kept: list[str] = []
    for entry in reversed(entries):
        text = _NEXT_ENTRY + _NEXT_FIELD.join(entry)
        if len(text.encode()) > room:
            text = _NEXT_ENTRY + _NEXT_FIELD.join(entry._replace(stack=""))
        room -= len(text.encode())
        if room < 0:
            break
        kept.append(text)
    return "".join(reversed(kept))


def read(note: str) -> list[Entry]:
    """Return the entries of a note, the latest last."""
    texts = (text.split(_NEXT_FIELD) for text in note.split(_NEXT_ENTRY))
    return [Entry(*fields) for fields in texts if len(fields) == len(Entry._fields)]


class Statistics(NamedTuple):
    """What is known of the tensors that a rank puts into an operation."""

    shape: str = ""
    checksum: int = 0
    num_nan: int = 0
    num_inf: int = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Statistics:
        if not tensors:
            return cls()
        checksum = num_nan = num_inf = 0
        for tensor in tensors:
            flat = _flat(tensor)
            checksum = checksum_of(flat, checksum)
            if flat.is_floating_point() or flat.is_complex():
                known = flat.float() if flat.itemsize == 1 else flat  # little is defined on float8
                num_nan += int(torch.isnan(known).sum())
                num_inf += int(torch.isinf(known).sum())
        first = tensors[0]
        shape = f"{str(first.dtype).removeprefix('torch.')}{list(first.shape)}"
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return cls(shape + more, checksum, num_nan, num_inf)

    def __str__(self) -> str:
        if not self.shape:
            return "no input"
        text = f"{self.shape}, checksum {self.checksum:08x}"
        if self.num_nan or self.num_inf:
            text += f", {self.num_nan} NaN, {self.num_inf} Inf"
        return text


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def checksum_of(tensor: Tensor, before: int = 0) -> int:
    """Return a checksum of a tensor's elements, which goes on from one of others."""
    return zlib.crc32(_flat(tensor).view(torch.uint8).numpy().data, before)


def user_stack(frame: FrameType) -> traceback.StackSummary:
    """Return the part of a stack between the launcher and this package, the inner frames last."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename.startswith(_INNER):
        inner = inner.f_back
    stack = traceback.StackSummary.extract(
        itertools.takewhile(
            lambda place: not place[0].f_code.co_filename.startswith(_LAUNCHER),
            traceback.walk_stack(inner),
        )
    )
    stack.reverse()
    return stack


def site(stack: traceback.StackSummary) -> str:
    """Name the line that a call was made from, as the engine's reports do."""
    if not stack:
        return "?"
    frame = stack[-1]
    text = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return text if frame.name == "<module>" else f"{text} in {frame.name}"


def shown(stack: traceback.StackSummary) -> str:
    """Format a stack; of a deep one, the inner frames."""
    frames = stack.format()
    room = _STACK_ROOM
    kept: list[str] = []
    for frame in reversed(frames):
        room -= len(frame.encode())
        if room < 0:
            kept.append(f"  ({len(frames) - len(kept)} outer frames left out)\n")
            break
        kept.append(frame)
    return "".join(reversed(kept)).rstrip()
