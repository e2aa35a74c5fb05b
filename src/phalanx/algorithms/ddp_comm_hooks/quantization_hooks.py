"""Hooks that exchange gradients as bytes: a scale, a zero point, and eight bits per element.

Each rank quantises its own gradients, gathers those of all ranks, and averages them. Zero is always
exact. What is not finite makes the values that share its scale not finite on all ranks. Sparse
gradients are averaged as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.futures import Future

from phalanx.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from phalanx.collectives import all_gather_coalesced
from phalanx.groups import ProcessGroup
from phalanx.parallel.buckets import GradBucket
from phalanx.world import resolve

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_TOP = 255  # the largest byte


def quantization_pertensor_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients over ``process_group`` as bytes, with one scale per rank and bucket."""
    return _average(process_group, bucket, max(bucket.buffer().numel(), 1))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """Average the gradients over ``process_group`` as bytes, with scales of their own per channel.

    A channel is ``bucket_size`` elements in a row: small gradients survive beside large ones.
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1, got {bucket_size}")
    return _average(process_group, bucket, bucket_size)


def _average(
    process_group: ProcessGroup | None, bucket: GradBucket, channel: int
) -> Future[Tensor]:
    group, buffer = resolve(process_group), bucket.buffer()
    if buffer.is_sparse:
        return allreduce_hook(group, bucket)
    size, count = group.size(), buffer.numel()
    quantized, scales = _quantize(_channels(buffer, channel))
    # The bytes travel from the beginning of the buffer: if that is in shared memory, so are they.
    payload = _bytes(buffer)[:count].copy_(quantized.view(-1)[:count])
    gathered = payload.new_empty(size, count)
    all_scales = scales.new_empty(size, *scales.shape)
    future = all_gather_coalesced(
        [[gathered[rank], _bytes(all_scales[rank])] for rank in range(size)],
        [payload, _bytes(scales)],
        group=group,
        async_op=True,
    )
    assert future is not None  # this rank is in the group

    def dequantize(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the exchange raised
        total = torch.zeros_like(quantized, dtype=scales.dtype)
        for their_bytes, (scale, zero) in zip(gathered, all_scales, strict=True):
            values = _channels(their_bytes.to(total.dtype), channel).sub_(zero)
            total.addcmul_(values, scale / size)
        return buffer.copy_(total.view(-1)[:count])

    return future.then(dequantize)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _channels(values: Tensor, channel: int) -> Tensor:
    """View flat values as rows of ``channel`` elements; the last one is filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -len(values) % channel)).view(-1, channel)


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows as bytes, and the stack of their scales and zero points, a column each."""
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    low = exact.amin(1, keepdim=True).clamp_(max=0)
    high = exact.amax(1, keepdim=True).clamp_(min=0)
    scale = high / _TOP - low / _TOP  # the difference itself might overflow
    scale.masked_fill_(scale == 0, 1)
    zero = (-low / scale).round_().clamp_(0, _TOP)
    quantized = (exact / scale).round_().add_(zero).clamp_(0, _TOP).to(torch.uint8)
    return quantized, torch.stack([scale, zero])
