"""Tensors of any types, one behind the other in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as torch aligns what it allocates


def room(tensor: Tensor) -> int:
    """Return how many bytes are set apart for a tensor."""
    return -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT


def places(tensors: Sequence[Tensor], memory: Tensor) -> Iterator[Tensor]:
    """Yield views of bytes in memory, one behind the other, that are laid out as ``tensors``."""
    offset = 0
    for tensor in tensors:
        part = memory[offset : offset + tensor.numel() * tensor.itemsize].view(tensor.dtype)
        yield part.as_strided(tensor.shape, dense_stride(tensor))
        offset += room(tensor)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if it lies dense in memory, else those of a contiguous one."""
    return torch.empty_like(tensor, device="meta").stride()
