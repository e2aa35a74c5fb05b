"""What is sent before, or with, the bytes of a message."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

FRAME_BYTES = 64 << 10  # the most that a frame takes, with what it carries of the message itself
LABEL_BYTES = 1024  # the most that a sender may say about a message

MESSAGE, LEAVING, FAILED, ABORTED, OUT_OF_STEP = range(5)

# kind, length of the label, tag, bytes of the message, number of the payload that follows (0: none)
_HEADER = struct.Struct("<HHiqI")


class Frame(NamedTuple):
    """One message, with its bytes if they are few; else ``number`` says where they come."""

    kind: int
    tag: int
    num_bytes: int
    number: int
    label: bytes
    data: bytes


def fits(num_bytes: int, label: bytes) -> bool:
    """Say whether a message travels within its frame."""
    return _HEADER.size + len(label) + num_bytes <= FRAME_BYTES


def pack(kind: int, tag: int, num_bytes: int, number: int, label: bytes, data: bytes) -> Tensor:
    """Return a frame as bytes; ``data`` is empty if it does not travel here."""
    if len(label) > LABEL_BYTES:
        raise ValueError(f"a label has at most {LABEL_BYTES} bytes, got {len(label)}")
    header = _HEADER.pack(kind, len(label), tag, num_bytes, number)
    return torch.frombuffer(bytearray(header + label + data), dtype=torch.uint8)


def unpack(memory: memoryview) -> Frame:
    """Read a frame from memory that begins with it, and copy what it carries."""
    kind, length, tag, num_bytes, number = _HEADER.unpack_from(memory)
    end = _HEADER.size + length
    label = bytes(memory[_HEADER.size : end])
    data = b"" if number else bytes(memory[end : end + num_bytes])
    return Frame(kind, tag, num_bytes, number, label, data)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as flat bytes: a view if it is contiguous, else a copy."""
    whole = tensor.detach().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, which a view would keep.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def read(tensor: Tensor) -> bytes:
    """Return a copy of a CPU tensor's elements."""
    whole = tensor.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.numel() else b""


def write(tensor: Tensor, data: bytes) -> None:
    """Put into a CPU tensor what `read` returned for one of its size."""
    if not data:
        return
    if tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    ctypes.memmove(whole.data_ptr(), data, len(data))
    with torch.no_grad():
        tensor.copy_(whole)
