"""Gradients that are reduced all together, when that of one parameter is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from phalanx.groups import ProcessGroup
from phalanx.heap import empty_shared
from phalanx.parallel.replicas import broadcast_coalesced
from phalanx.types import ReduceOp
from phalanx.world import active


class DelayedReduction:
    """One flat tensor with the gradients of some parameters, which accumulate there."""

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[nn.Parameter], trigger: nn.Parameter
    ) -> None:
        dtypes = {param.dtype for param in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"delayed parameters must have one dtype, got {dtypes}")
        self._group = group
        self.parameters = parameters
        self._flat = empty_shared(sum(p.numel() for p in parameters), dtype=dtypes.pop())
        pieces = self._flat.split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
        self._views = [v.view(p.shape) for v, p in zip(pieces, parameters, strict=True)]
        broadcast_coalesced(group, [p.detach() for p in parameters])
        trigger.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def attach(self) -> None:
        """Let gradients that are not there accumulate in the flat tensor."""
        with torch.no_grad():
            for param, view in zip(self.parameters, self._views, strict=True):
                if param.grad is None:
                    param.grad = view.zero_()

    def _queue(self, _: Tensor) -> None:
        # At the end of backward: how many buckets have been launched now may differ by rank.
        Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        elsewhere = []
        for param, view in zip(self.parameters, self._views, strict=True):
            grad = param.grad
            if grad is view:
                continue
            # Cleared after the forward pass, or not added to in place, as with create_graph.
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
            if grad is not None and grad.requires_grad:
                elsewhere.append((grad, view))
            else:
                param.grad = view
        active(self._group).all_reduce(self._flat, ReduceOp.AVG)
        for grad, view in elsewhere:
            grad.data.copy_(view)
