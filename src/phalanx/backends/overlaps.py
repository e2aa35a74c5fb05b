"""Calls of one batch that share memory: all of them read before any of them writes.

So a tensor that stands twice in a batch of reductions ends up as the sum, as with torch's Gloo. A
batch runs in order. A call that reads what one before it writes therefore gets a copy, made before
the first call. Batches without such calls, which is nearly all, are run as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx import _native

Call = tuple[str, tuple[Any, ...]]

COPY = "copy_in_turn"  # the method of a backend that copies one tensor to another

_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})


class Used(NamedTuple):
    """The tensors of a call."""

    read: list[Tensor]
    written: list[Tensor]


def used(name: str, args: Sequence[Any], rank: int) -> Used:
    """Return the tensors that a call of a transport reads and writes on a rank of the group."""
    if name in ("broadcast", "reduce"):
        is_root = args[1] == rank
        reads, writes = is_root or name == "reduce", is_root == (name == "reduce")
        return Used([args[0]] if reads else [], [args[0]] if writes else [])
    if name == "all_reduce":
        return Used([args[0]], _tensors(args[0]) + _tensors(args[2] if len(args) > 2 else None))
    if name in ("send", "recv"):
        return Used([args[0]], []) if name == "send" else Used([], [args[0]])
    outputs, inputs = (*args[:2], (), ())[:2]
    return Used(_tensors(inputs), _tensors(outputs))


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [each for each in given or () if isinstance(each, Tensor)]


def found(calls: Sequence[Call]) -> list[int]:
    """Return which calls of a batch use memory of other calls, as far as its bounds tell."""
    return _native.overlapping_calls(calls) if len(calls) > 1 else []


def resolved(calls: Sequence[Call], suspects: Collection[int], rank: int) -> list[Call]:
    """Return calls to make in order that do what the given ones do at once.

    ``suspects`` are those that `found` has found. Among the calls returned are such of `COPY`.
    These are not collectives: other ranks need not have them.
    """
    suspects = frozenset(suspects)
    copies: list[Call] = []
    steps: list[Call] = []
    written: list[Tensor] = []

    def apart(tensor: Tensor) -> Tensor:
        if not any(_share_memory(tensor, other) for other in written):
            return tensor
        copy = torch.empty_like(
            tensor.detach(), memory_format=torch.contiguous_format, requires_grad=False
        )
        copies.append((COPY, (copy, tensor)))
        return copy

    for index, (name, args) in enumerate(calls):
        reads, writes = used(name, args, rank)
        if index not in suspects or not reads:
            steps.append((name, args))
        elif name in _IN_PLACE:
            buffer = apart(args[0])
            steps.append((name, (buffer, *args[1:])))
            if buffer is not args[0] and writes:
                steps.append((COPY, (args[0], buffer)))
        else:
            given = args[1]
            inputs = apart(given) if isinstance(given, Tensor) else [apart(each) for each in given]
            steps.append((name, (args[0], inputs, *args[2:])))
        written += writes if index in suspects else []
    return copies + steps


def spared(inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: int = -1) -> list[Tensor]:
    """Return the inputs of one call, as copies where it would write to them while it reads.

    An input may lie where ``outputs[own]`` does, which is a result that it makes itself.
    """

    def is_hit(tensor: Tensor, index: int) -> bool:
        output = outputs[index]
        is_itself = index == own and output.data_ptr() == tensor.data_ptr()
        return not is_itself and _share_memory(tensor, output)

    return [
        each.detach().clone() if any(is_hit(each, i) for i in range(len(outputs))) else each
        for each in inputs
    ]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(_native.overlapping_calls([("", (one,)), ("", (other,))]))
