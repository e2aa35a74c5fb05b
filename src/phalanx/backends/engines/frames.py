"""What is sent before, or with, the bytes of a message."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

FRAME_BYTES = 16 << 10  # the most that a frame takes, with what it carries of the message itself
LABEL_BYTES = 1024  # the most that a sender may say about a message

NOTHING = torch.empty(0, dtype=torch.uint8)

MESSAGE, LEAVING, FAILED, ABORTED = range(4)

# kind, length of the label, tag, bytes of the message, number of the payload that follows (0: none)
_HEADER = struct.Struct("<HHiqI")


class Frame(NamedTuple):
    """One message, with its bytes if they are few; else ``number`` says where they come."""

    kind: int
    tag: int
    num_bytes: int
    number: int
    label: bytes
    data: Tensor | None


def fits(num_bytes: int, label: bytes) -> bool:
    """Say whether a message travels within its frame."""
    return _HEADER.size + len(label) + num_bytes <= FRAME_BYTES


def pack(kind: int, tag: int, num_bytes: int, number: int, label: bytes, data: Tensor) -> Tensor:
    """Return a frame as bytes; ``data`` is flat and of bytes, empty if it does not travel here."""
    if len(label) > LABEL_BYTES:
        raise ValueError(f"a label has at most {LABEL_BYTES} bytes, got {len(label)}")
    start = _HEADER.pack(kind, len(label), tag, num_bytes, number) + label
    frame = torch.empty(len(start) + data.numel(), dtype=torch.uint8)
    array = frame.numpy()
    array[: len(start)] = memoryview(start)
    array[len(start) :] = data.numpy()
    return frame


def unpack(buffer: Tensor) -> Frame:
    """Read a frame from a buffer that begins with it; what it carries is copied."""
    memory = buffer.numpy()
    kind, length, tag, num_bytes, number = _HEADER.unpack_from(memory.data)
    end = _HEADER.size + length
    label = memory[_HEADER.size : end].tobytes()
    data = None if number else buffer[end : end + num_bytes].clone()
    return Frame(kind, tag, num_bytes, number, label, data)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as flat bytes: a view if it is contiguous, else a copy."""
    whole = tensor.detach().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, which a view would keep.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
