"""Hooks that average gradients as they are, or in half precision.

Sparse gradients are never compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.futures import Future

from phalanx.collectives import all_reduce
from phalanx.groups import ProcessGroup
from phalanx.parallel.buckets import GradBucket
from phalanx.types import ReduceOp
from phalanx.work import Work
from phalanx.world import resolve

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, GradBucket], Future[Tensor]]

_CHUNK = 1 << 16  # elements that are converted at a time: they stay in the core's own cache


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients over ``process_group``, as happens without a hook."""
    return _allreduce_fut(process_group, bucket.buffer())


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients over ``process_group`` as float16.

    Halves are summed in float32 and rounded once, so the sum cannot overflow; a gradient beyond
    65504 becomes infinite.
    """
    return _compressed(allreduce_hook, torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients over ``process_group`` as bfloat16, summed in float32."""
    return _compressed(allreduce_hook, torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that shows float16 gradients to ``hook`` and converts its result back."""

    def fp16_compress_wrapper_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return _compressed(hook, torch.float16, state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that shows bfloat16 gradients to ``hook`` and converts its result back."""

    def bf16_compress_wrapper_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return _compressed(hook, torch.bfloat16, state, bucket)

    return bf16_compress_wrapper_hook


def _allreduce_fut(group: ProcessGroup | None, tensor: Tensor) -> Future[Tensor]:  # torch's name
    """Start to average ``tensor`` in place; return the future of it."""
    work = all_reduce(tensor, op=ReduceOp.AVG, group=resolve(group), async_op=True)
    return cast(Work, work).get_future().then(lambda done: flat(done.value()))


def flat(value: Tensor | list[Tensor]) -> Tensor:
    """Return the tensor that a hook's future holds, by itself or in a list."""
    return value if isinstance(value, Tensor) else value[0]


def _compressed(hook: Hook, dtype: torch.dtype, state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Run ``hook`` on a bucket of ``dtype``, then put its result into the bucket's own buffer."""
    buffer = bucket.buffer()
    if buffer.dtype is dtype or buffer.is_sparse:
        return hook(state, bucket)
    bucket.set_buffer(_convert(buffer, dtype))

    def restore(done: Future[Tensor]) -> Tensor:
        bucket.set_buffer(buffer)
        return _convert_back(flat(done.value()), buffer)

    return hook(state, bucket).then(restore)


def _convert(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a flat tensor to a type that is no wider, into the beginning of its own memory.

    That takes no memory, and what lies in shared memory stays there.
    """
    count = buffer.numel()
    converted = buffer.view(dtype)[:count]
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        converted[part] = buffer[part].to(dtype)
    return converted


def _convert_back(value: Tensor, buffer: Tensor) -> Tensor:
    """Convert ``value`` into ``buffer``, in whose beginning it may lie."""
    count = buffer.numel()
    for start in reversed(range(0, count, _CHUNK)):
        part = slice(start, start + _CHUNK)
        buffer[part] = value[part].clone()
    return buffer
