"""PowerSGD: gradients are exchanged as products of two narrow matrices.

T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727.
A gradient, seen as a matrix M, is approximated by P Qᵀ after one step of power iteration: P is the
average of M Q over all ranks, made orthonormal; Q the average of Mᵀ P. Sparse gradients are
averaged as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from phalanx.algorithms.ddp_comm_hooks.default_hooks import _allreduce_fut
from phalanx.algorithms.ddp_comm_hooks.states import HookState, log
from phalanx.collectives import all_reduce
from phalanx.groups import ProcessGroup
from phalanx.heap import empty_shared
from phalanx.parallel.buckets import GradBucket
from phalanx.types import ReduceOp
from phalanx.work import Work
from phalanx.world import resolve

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


class PowerSGDState(HookState):
    """What PowerSGD is told, and what it remembers between iterations, on one rank.

    All ranks of ``process_group`` (None: the default one) must give the same values.

    - ``matrix_approximation_rank``: the number of columns of P and Q. More are slower and exacter.
    - ``start_powerSGD_iter``: so many iterations average plain gradients first. At least 2 with
      error feedback or warm start, since DDP arranges its buckets anew after the first one.
    - ``min_compression_rate``: a matrix is compressed if that makes it more than so many times
      smaller; others, and all vectors, are averaged as they are.
    - ``use_error_feedback``: what a rank's approximation leaves out is added to its next gradient.
    - ``warm_start``: begin with the Q of the iteration before instead of a random one.
    - ``orthogonalization_epsilon``: is added to the length by which a column of P is divided. Not
      needed against zero gradients; it damps directions that are not much longer.
    - ``random_seed``: of the first Q.
    - ``compression_stats_logging_frequency``: in iterations, of a record at level INFO.
    - ``batch_tensors_with_same_shape``: multiply all matrices of one shape at once.

    It can be pickled, to be part of a checkpoint, without its process group. If a bucket has other
    gradients than before, what was remembered of it is dropped.
    """

    __slots__ = (
        "batch_tensors_with_same_shape",
        "compression_stats_logging_frequency",
        "error_dict",
        "iter",
        "layout_dict",
        "matrix_approximation_rank",
        "min_compression_rate",
        "next_stats_report",
        "orthogonalization_epsilon",
        "p_memory_dict",
        "process_group",
        "q_memory_dict",
        "rng",
        "start_powerSGD_iter",
        "total_numel_after_compression",
        "total_numel_before_compression",
        "use_error_feedback",
        "warm_start",
    )
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group",)

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank must be at least 1, got {matrix_approximation_rank}"
            )
        if orthogonalization_epsilon < 0:
            raise ValueError(
                f"orthogonalization_epsilon must not be negative, got {orthogonalization_epsilon}"
            )
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, got "
                f"{start_powerSGD_iter}: DDP arranges its buckets anew after the first iteration"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        # Draws a seed for each new Q: another one every time, the same on all ranks.
        self.rng = np.random.RandomState(random_seed)
        # By bucket: what the last approximation left out; P and what is averaged along with it; Q;
        # and the shapes that all of these were made for.
        self.error_dict: dict[int, Tensor] = {}
        self.p_memory_dict: dict[int, Tensor] = {}
        self.q_memory_dict: dict[int, Tensor] = {}
        self.layout_dict: dict[int, tuple[object, ...]] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Return how many times less was exchanged; the elements before, and after compression."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def _is_early(self) -> bool:
        return self.iter < self.start_powerSGD_iter

    def _count(self, before: int, after: int) -> None:
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after

    def _end_of_bucket(self, bucket: GradBucket) -> None:
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            log.info(
                "PowerSGD, iteration %d: %d elements were exchanged for %d, %.1f times fewer",
                self.iter,
                after,
                before,
                rate,
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
        self.maybe_increase_iter(bucket)

    def _forget(self, index: int) -> None:
        for memory in (self.error_dict, self.p_memory_dict, self.q_memory_dict, self.layout_dict):
            cast("dict[int, Any]", memory).pop(index, None)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients, each matrix among them as a product of two narrow ones.

    Tensors of more dimensions are matrices of as many rows as they have outermost slices. A bucket
    takes two exchanges, however many gradients it has.
    """
    if state._is_early() or bucket.buffer().is_sparse:
        return _average(state, bucket)
    matrices, rest = [], []
    for gradient in bucket.gradients():
        count = gradient.numel()
        if gradient.dim() > 1 and count > 0:
            matrix = _as_matrix(gradient)
            compressed = sum(matrix.shape) * min(*matrix.shape, state.matrix_approximation_rank)
            if compressed * state.min_compression_rate < count:
                state._count(count, compressed)
                matrices.append(matrix)
                continue
        state._count(count, count)
        rest.append(gradient)
    return _approximate(state, bucket, bucket.buffer(), matrices, rest)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients of a bucket as one square matrix, approximated by two narrow ones.

    Faster than ``powerSGD_hook``, and less exact: the square does not have the structure of the
    layers. ``min_compression_rate`` is not looked at.
    """
    if state._is_early() or bucket.buffer().is_sparse:
        return _average(state, bucket)
    buffer = bucket.buffer()
    count = buffer.numel()
    side = math.isqrt(max(count - 1, 0)) + 1
    square = buffer
    if side * side != count:
        square = buffer.new_zeros(side * side)
        square[:count] = buffer
    state._count(count, 2 * side * min(side, state.matrix_approximation_rank))
    future = _approximate(state, bucket, square, [square.view(side, side)], [])
    if square is buffer:
        return future

    def cut(done: Future[Tensor]) -> Tensor:
        if state.use_error_feedback and bucket.index() in state.error_dict:
            state.error_dict[bucket.index()][count:] = 0
        return buffer.copy_(done.value()[:count])

    return future.then(cut)


def _average(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    state.maybe_increase_iter(bucket)
    return _allreduce_fut(state.process_group, bucket.buffer())


def _approximate(
    state: PowerSGDState,
    bucket: GradBucket,
    flat: Tensor,
    matrices: Sequence[Tensor],
    rest: Sequence[Tensor],
) -> Future[Tensor]:
    """Replace ``matrices`` by an approximation of their average, and ``rest`` by its average.

    Both are views of ``flat``; return the future of that.
    """
    group, index = resolve(state.process_group), bucket.index()
    start = flat.storage_offset()
    places = [(each.shape, each.storage_offset() - start) for each in (*matrices, *rest)]
    layout = (flat.dtype, state.matrix_approximation_rank, *places)
    if state.layout_dict.setdefault(index, layout) != layout:
        log.warning("PowerSGD: bucket %d holds other gradients than before and starts anew", index)
        state._forget(index)
        state.layout_dict[index] = layout
    if state.use_error_feedback:
        if index not in state.error_dict:
            state.error_dict[index] = torch.zeros_like(flat)
        flat.add_(state.error_dict[index])
    is_new = index not in state.q_memory_dict
    batches = _batches(matrices, state)
    averages = _place(state, index, batches, rest, flat.dtype)
    p_memory, q_memory = state.p_memory_dict[index], state.q_memory_dict[index]

    if is_new or not state.warm_start:
        generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
        for batch in batches:
            batch.q.copy_(torch.randn(batch.q.shape, generator=generator, dtype=flat.dtype))
    for batch in batches:
        _orthonormalize(batch.q)
        torch.bmm(batch.stack, batch.q, out=batch.p)
    for average, gradient in zip(averages, rest, strict=True):
        average.copy_(gradient)
    state._end_of_bucket(bucket)
    work = all_reduce(p_memory, op=ReduceOp.AVG, group=group, async_op=True)

    def finish(done: Future[Any]) -> Tensor:
        done.value()  # raises what the exchange raised
        for gradient, average in zip(rest, averages, strict=True):
            gradient.copy_(average)
        if not batches:
            return flat
        for batch in batches:
            _orthonormalize(batch.p, state.orthogonalization_epsilon)
            torch.bmm(batch.stack.mH, batch.p, out=batch.q)
            if state.use_error_feedback:
                batch.write_error(flat, state.error_dict[index])
        try:
            all_reduce(q_memory, op=ReduceOp.AVG, group=group)
        except BaseException:
            state._forget(index)  # each rank has its own Q now
            raise
        for batch in batches:
            batch.write_average()
        if not q_memory.isfinite().all():
            # So it is on all ranks. One bad gradient is not to spoil the iterations to come.
            state._forget(index)
        return flat

    return cast(Work, work).get_future().then(finish)


def _place(
    state: PowerSGDState,
    index: int,
    batches: list[_Batch],
    rest: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Find places for P and Q in the memory of a bucket; return those for ``rest``, behind P."""
    shapes = [*(batch.p_shape for batch in batches), *(each.shape for each in rest)]
    if index not in state.q_memory_dict:
        state.p_memory_dict[index] = empty_shared(sum(map(math.prod, shapes)), dtype=dtype)
        q_count = sum(math.prod(batch.q_shape) for batch in batches)
        state.q_memory_dict[index] = empty_shared(q_count, dtype=dtype)
    ps = _cut(state.p_memory_dict[index], shapes)
    qs = _cut(state.q_memory_dict[index], [batch.q_shape for batch in batches])
    for batch, p, q in zip(batches, ps[: len(batches)], qs, strict=True):
        batch.p, batch.q = p, q
    return ps[len(batches) :]


class _Batch:
    """Matrices of one shape, and the P and Q of each."""

    p: Tensor
    q: Tensor

    def __init__(self, matrices: list[Tensor], width: int) -> None:
        self.matrices = matrices
        self.stack = matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)
        length, rows, columns = self.stack.shape
        width = min(rows, columns, width)
        self.p_shape, self.q_shape = (length, rows, width), (length, columns, width)

    def write_error(self, flat: Tensor, error: Tensor) -> None:
        """Put what P and this rank's own Q leave out of the matrices where they are in ``flat``.

        Only with its own Q is it the error of this rank alone: with that of all ranks, errors would
        have the same average, but the differences between ranks would pile up in them.
        """
        left_out = torch.baddbmm(self.stack, self.p, self.q.mH, alpha=-1)
        for matrix, each in zip(self.matrices, left_out, strict=True):
            start = matrix.storage_offset() - flat.storage_offset()
            error.as_strided(matrix.shape, matrix.stride(), start).copy_(each)

    def write_average(self) -> None:
        """Put P Qᵀ in the place of the matrices."""
        torch.bmm(self.p, self.q.mH, out=self.stack)
        if len(self.matrices) > 1:
            torch._foreach_copy_(self.matrices, list(self.stack))


def _as_matrix(gradient: Tensor) -> Tensor:
    """View a dense tensor as a matrix that has a row per slice of its outermost dimension.

    Outermost in memory: so channels-last and transposed gradients need no copy either.
    """
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    inner = gradient.permute(order)
    return inner.view(inner.shape[0], -1)


def _batches(matrices: Sequence[Tensor], state: PowerSGDState) -> list[_Batch]:
    """Group matrices that are worked on together; those of one shape are neighbours anyway."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    groups = list(by_shape.values())
    if not state.batch_tensors_with_same_shape:
        groups = [[matrix] for same in groups for matrix in same]
    return [_Batch(group, state.matrix_approximation_rank) for group in groups]


def _cut(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """View a flat tensor as tensors of the given shapes, one behind the other."""
    views, start = [], 0
    for shape in shapes:
        count = math.prod(shape)
        views.append(memory[start : start + count].view(shape))
        start += count
    return views


def _orthonormalize(matrices: Tensor, epsilon: float = 0) -> None:
    """Make the columns of each matrix orthonormal, in place, by Householder reflections.

    Columns that are zero or depend on others become some other direction. With ``epsilon`` a column
    comes out shorter, by the share that ``epsilon`` has in its length.
    """
    exact = torch.promote_types(matrices.dtype, torch.float32)  # halves have no QR
    columns, triangle = torch.linalg.qr(matrices.to(exact))
    if epsilon:
        lengths = triangle.diagonal(dim1=-2, dim2=-1).abs()
        columns *= (lengths / (lengths + epsilon)).unsqueeze(-2)
    matrices.copy_(columns)
