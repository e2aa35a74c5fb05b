"""Collectives over messages: few steps, all ranks at once, and reductions in rank order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.backends import reduction
from phalanx.backends.base import GroupBackend
from phalanx.types import Deadline, ReduceOp

Part = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from

# Up to this size it costs less to send everything to everybody than to take a second step.
_FEW_BYTES = 8 << 10


class Collectives(GroupBackend):
    """A group whose collectives are made of exchanges in which nobody waits to send."""

    @abstractmethod
    def _exchange(self, deadline: Deadline, gives: Sequence[Part], takes: Sequence[Part]) -> None:
        """Send and receive all parts at once. They are the running collective's."""

    def _broadcast(self, deadline: Deadline, tensor: Tensor, root: int) -> None:
        flat = _flat(tensor)
        if flat.nbytes > _FEW_BYTES and self.size > 2:
            # Everybody has a slice of it, then everybody has all of it.
            slices = flat.tensor_split(self.size)
            if self.rank == root:
                self._exchange(deadline, [(slices[i], i) for i in self._others()], [])
            else:
                self._exchange(deadline, [], [(slices[self.rank], root)])
            self._share(deadline, slices, skip=root)
        else:
            self._descend(deadline, flat, root)
        if self.rank != root:
            _fill(tensor, flat)

    def _descend(self, deadline: Deadline, flat: Tensor, root: int) -> None:
        """Broadcast along a binomial tree."""
        place = (self.rank - root) % self.size
        step = 1
        while step <= place:
            step *= 2
        if place:
            self._exchange(deadline, [], [(flat, (place - step // 2 + root) % self.size)])
        gives = []
        while place + step < self.size:
            gives.append((flat, (place + step + root) % self.size))
            step *= 2
        self._exchange(deadline, gives, [])

    def _share(self, deadline: Deadline, slices: Sequence[Tensor], skip: int = -1) -> None:
        """Give one's own slice to all and take theirs; ``skip`` has all, and needs none."""
        mine = slices[self.rank]
        self._exchange(
            deadline,
            [(mine, peer) for peer in self._others() if peer != skip],
            [(slices[peer], peer) for peer in self._others() if self.rank != skip],
        )

    def _reduce_slices(self, deadline: Deadline, slices: Sequence[Tensor], op: ReduceOp) -> Tensor:
        """Return the reduction of everybody's slice of this rank's number, which it may change."""
        mine = slices[self.rank]
        parts = [mine if i == self.rank else torch.empty_like(mine) for i in range(self.size)]
        self._exchange(
            deadline,
            [(slices[peer], peer) for peer in self._others()],
            [(parts[peer], peer) for peer in self._others()],
        )
        return _reduced(parts, op)

    def _all_reduce(
        self, deadline: Deadline, tensor: Tensor, op: ReduceOp, squares: Tensor | None
    ) -> None:
        flat, rest = _prepared(tensor, op)
        if flat.nbytes <= _FEW_BYTES:
            total = self._reduce_slices(deadline, [flat] * self.size, rest).to(tensor.dtype)
        else:
            slices = flat.tensor_split(self.size)
            mine = self._reduce_slices(deadline, slices, rest).to(tensor.dtype)
            total = _flat(tensor)
            parts = total.tensor_split(self.size)
            _fill(parts[self.rank], mine)
            self._share(deadline, parts)
        _fill(tensor, total)
        if squares is not None:
            squares.fill_(reduction.sum_of_squares(tensor))

    def _reduce(
        self, deadline: Deadline, output: Tensor, input: Tensor, root: int, op: ReduceOp
    ) -> None:
        flat, rest = _prepared(input, op)
        if flat.nbytes > _FEW_BYTES:
            slices = list(flat.tensor_split(self.size))
            slices[self.rank] = slices[self.rank].clone()
            mine = self._reduce_slices(deadline, slices, rest).to(output.dtype)
            total = torch.empty(flat.shape, dtype=output.dtype)
            slices = list(total.tensor_split(self.size))
            slices[self.rank].copy_(mine)
            self._collect(deadline, slices, mine, root)
        else:
            parts = [torch.empty_like(flat) for _ in range(self.size)]
            parts[self.rank] = flat
            self._collect(deadline, parts, flat, root)
            if self.rank == root:
                total = reduction.reduce(parts, rest)
        if self.rank == root:
            _fill(output, total)

    def _collect(
        self, deadline: Deadline, outputs: Sequence[Tensor], input: Tensor, root: int
    ) -> None:
        if self.rank == root:
            self._exchange(deadline, [], [(outputs[peer], peer) for peer in self._others()])
        else:
            self._exchange(deadline, [(input, root)], [])

    def _gather(
        self, deadline: Deadline, outputs: Sequence[Tensor] | None, input: Tensor, root: int
    ) -> None:
        self._collect(deadline, outputs or (), input, root)
        if outputs is not None and self.rank == root:
            _fill(outputs[root], input)

    def _scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        if self.rank != root:
            self._exchange(deadline, [], [(output, root)])
            return
        assert inputs is not None
        self._exchange(deadline, [(inputs[peer], peer) for peer in self._others()], [])
        _fill(output, inputs[root])

    def _reduce_scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp
    ) -> None:
        prepared = [_prepared(input, op) for input in inputs]
        slices = [flat for flat, _ in prepared]
        slices[self.rank] = slices[self.rank].clone()
        _fill(output, self._reduce_slices(deadline, slices, prepared[0][1]))

    def _all_to_all(
        self, deadline: Deadline, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._exchange(
            deadline,
            [(inputs[peer], peer) for peer in self._others()],
            [(outputs[peer], peer) for peer in self._others()],
        )
        _fill(outputs[self.rank], inputs[self.rank])

    def _barrier(self, deadline: Deadline) -> None:
        """Hear, in each round, of twice as many ranks as in the one before."""
        nothing = torch.empty(0, dtype=torch.uint8)
        step = 1
        while step < self.size:
            ahead, behind = (self.rank + step) % self.size, (self.rank - step) % self.size
            self._exchange(deadline, [(nothing, ahead)], [(nothing, behind)])
            step *= 2


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in a row: a view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1)


def _fill(output: Tensor, elements: Tensor) -> None:
    """Put elements into a tensor of any shape, unless they are the tensor's own memory."""
    one = output.is_contiguous() and elements.is_contiguous()
    if not one or elements.data_ptr() != output.data_ptr():
        output.copy_(elements.reshape(output.shape))


def _reduced(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Do `reduction.reduce`, where no wider type is needed in the memory of the first part."""
    if parts[0].dtype in (torch.float16, torch.bfloat16):
        return reduction.reduce(list(parts), op)
    for part in parts[1:]:
        reduction.combine(parts[0], part, op)
    reduction.finish(parts[0], op, len(parts))
    return parts[0]


def _prepared(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """Return what a rank contributes to a reduction, and what is left for the reduction to do.

    A factor is a rank's own: it is applied before anything is sent.
    """
    if op.factor is None:
        return _flat(tensor), op
    return reduction.contribution(tensor, op).reshape(-1), ReduceOp.SUM
