"""What a rank without input does for DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.algorithms.join import JoinHook
from phalanx.collectives import all_reduce
from phalanx.groups import ProcessGroup
from phalanx.parallel.replicas import sync_module_states
from phalanx.types import ReduceOp

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """Make the same exchanges as a rank with input, in the same order, contributing nothing."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger.set_fact("join_uneven_inputs", 1)
        self._kept: list[Tensor | None] | None = None

    def main_hook(self) -> None:
        """Shadow one forward and backward pass.

        Until the end this rank has the gradients of the others, for whoever joins with them.
        """
        ddp = self.ddp
        syncing = announce_sync(ddp.process_group, False)
        if syncing:
            if not ddp._divide_by_initial_world_size:
                ddp.reducer.exchange.divisor = self.num_active
            ddp.reducer.check_finished()
            if ddp.reducer.rebuild_buckets():
                ddp._has_rebuilt_buckets = True
        if ddp.will_sync_module_buffers():
            ddp._sync_module_buffers(find_common_rank(ddp.process_group, False))
        ddp.require_forward_param_sync = syncing
        if syncing:
            if self._kept is None:
                self._kept = ddp.reducer.set_gradients_aside()
            ddp.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had the most input."""
        ddp = self.ddp
        ddp._authoritative_rank = find_common_rank(ddp.process_group, is_last_joiner)
        sync_module_states(
            ddp.module,
            ddp.process_group,
            ddp.broadcast_bucket_size,
            ddp._authoritative_rank,
            ddp.parameters_to_ignore,
            ddp.forward_sync_buffers,
        )
        if self._kept is not None:
            for slot, grad in zip(ddp.reducer.slots, self._kept, strict=True):
                slot.param.grad = grad


def find_common_rank(group: ProcessGroup, is_candidate: bool) -> int:
    """Agree on the highest group rank that is a candidate."""
    rank = torch.tensor([group.rank() if is_candidate else -1])
    all_reduce(rank, ReduceOp.MAX, group)
    return int(rank.item())


def announce_sync(group: ProcessGroup, syncing: bool) -> bool:
    """Tell ranks that have joined whether this iteration reduces gradients; return if it does."""
    flag = torch.tensor([float(syncing)])
    all_reduce(flag, group=group)
    return bool(flag.item())
