"""Gradients that are reduced together."""

from __future__ import annotations

from torch import Tensor


class GradBucket:
    """What a communication hook is given: gradients, flat, and which parameters they belong to.

    ``buffer()`` holds this rank's gradients, not yet divided by the number of ranks. Buckets are
    numbered in the order in which they are reduced, which is the same on all ranks.
    """

    def __init__(
        self,
        index: int,
        num_buckets: int,
        buffer: Tensor,
        gradients: list[Tensor],
        parameters: list[Tensor],
    ) -> None:
        self._index = index
        self._num_buckets = num_buckets
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters

    def index(self) -> int:
        """Return which bucket this is."""
        return self._index

    def is_last(self) -> bool:
        """Say whether this is the last bucket of the backward pass."""
        return self._index == self._num_buckets - 1

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the flat one."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients, one per parameter, as views of the buffer."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the gradients belong to."""
        return self._parameters
