"""Buckets of gradients, and what DistributedDataParallel does with them around a hook."""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx as dist
from phalanx.algorithms.ddp_comm_hooks.default_hooks import flat
from phalanx.parallel.buckets import GradBucket


def bucket_of(gradients: list[Tensor], index: int = 0, num_buckets: int = 1) -> GradBucket:
    """Copy dense gradients, as they lie in memory, into a bucket in shared memory."""
    buffer = dist.empty_shared(sum(g.numel() for g in gradients), dtype=gradients[0].dtype)
    views, start = [], 0
    for gradient in gradients:
        view = buffer.as_strided(gradient.shape, gradient.stride(), start)
        views.append(view.copy_(gradient))
        start += gradient.numel()
    return GradBucket(index, num_buckets, buffer, views, [torch.empty_like(g) for g in gradients])


def reduce(hook, state, gradients: list[Tensor], **where: int) -> list[Tensor]:
    """Run a hook on gradients; return what they become."""
    bucket = bucket_of(gradients, **where)
    buffer, views = bucket.buffer(), bucket.gradients()
    result = flat(hook(state, bucket).wait())
    assert result.dtype == buffer.dtype
    assert result.shape == buffer.shape
    assert bucket.buffer() is buffer
    buffer.copy_(result)
    return [view.clone() for view in views]


def gradients_of(
    rank: int, step: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the same random gradients whenever asked."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def mean_of(ranks: list[int], step: int, shapes, dtype: torch.dtype = torch.float32):
    """Return the average, in float64, of ``gradients_of`` several ranks."""
    each = [gradients_of(rank, step, shapes, dtype) for rank in ranks]
    return [torch.stack(same).double().mean(0) for same in zip(*each, strict=True)]


def equal(results: list[list[Tensor]]) -> list[Tensor]:
    """Make sure that all ranks got the same bits, and return them."""
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    return results[0]


def assert_close(values: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare lists of tensors, the expected ones in float64."""
    for value, true in zip(values, expected, strict=True):
        torch.testing.assert_close(value.double(), true, rtol=tolerance, atol=tolerance)
