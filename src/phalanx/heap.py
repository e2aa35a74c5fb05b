"""Tensors that every rank on this machine can reach, so that collectives on them copy nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from phalanx import _native


def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor in this process' shared heap; other ranks reach it during collectives.

    Takes a shape as ``torch.empty`` does; the content is zero. No other rank need call it. The
    memory is given back when the last tensor on it dies. Lack of memory raises ``MemoryError``
    here, not a signal later.
    """
    shape = cast(
        "Sequence[int]", size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    )
    if any(length < 0 for length in shape):
        raise ValueError(f"empty_shared: lengths must not be negative, got {tuple(shape)}")
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    memory = torch.from_numpy(_native.allocate(max(count, 1) * dtype.itemsize))
    tensor = memory.view(dtype)[:count].view(tuple(shape))
    return tensor.requires_grad_() if requires_grad else tensor


def is_shared(tensor: Tensor) -> bool:
    """Say whether all of a tensor's memory is in this process' shared heap."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return bool(_native.in_heap(storage.data_ptr(), storage.nbytes()))
