"""Which parameters took part in a backward pass, here and on the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from phalanx.groups import ProcessGroup
from phalanx.objects import all_gather_object
from phalanx.parallel.buckets import Slot
from phalanx.types import ReduceOp

_SHOWN = 10  # parameters named per rank

ADVICE = (
    "Either use them in the loss on every rank (all `forward` function outputs participate in "
    "calculating loss), or freeze them (requires_grad_(False)) before wrapping the module, or "
    "allow for it by passing the keyword argument `find_unused_parameters=True` to "
    "DistributedDataParallel."
)


class Usage:
    """The agreement of all ranks, after each backward pass, on what was used in it.

    It costs one small exchange, in which each rank says which parameters it used. So every rank
    knows which parameters nobody used, and raises the same error if some are missing somewhere.
    """

    def __init__(self, slots: Sequence[Slot], statistics: Any) -> None:
        self._slots = slots
        self._statistics = statistics
        # How many ranks used each parameter; then how many abandoned their pass, and how many miss
        # gradients that they should have. Arrays, since they are looked at one by one.
        self._counts = np.zeros(len(slots) + 2, dtype=np.int32)
        self._before = np.zeros_like(self._counts)
        self._arrived: Sequence[Slot] = ()
        self.always_same = True  # whether all passes so far used the same parameters
        self.passes = 0

    @property
    def order(self) -> list[int]:
        """The parameters in the order of their gradients' arrival in the last pass."""
        arrived = [slot.index for slot in self._arrived]
        others = set(range(len(self._slots))).difference(arrived)
        return arrived + sorted(others, reverse=True)

    def used_anywhere(self, slot: Slot) -> bool:
        """Say whether any rank used a parameter in the last backward pass."""
        return bool(self._counts[slot.index])

    def local_map(self) -> Tensor:
        """Return how many ranks used each parameter in the last backward pass."""
        return torch.from_numpy(self._counts[:-2].copy())

    def settle(
        self,
        group: ProcessGroup,
        arrived: Sequence[Slot],
        *,
        find_unused: bool,
        static_graph: bool,
        abandoned: bool = False,
        joining: bool = False,
    ) -> None:
        """Exchange what was used; raise if that is not what was announced, on all ranks alike."""
        learning = static_graph and not self.passes
        self._counts, self._before = self._before, self._counts
        counts = self._counts
        counts.fill(1)
        missing: list[Slot] = []
        if len(arrived) < len(self._slots):
            counts[[slot.index for slot in self._slots if not slot.used]] = 0
            if not (find_unused or learning or abandoned):
                # Nobody misses a parameter that is frozen, or that a static graph never used.
                missing = [
                    slot
                    for slot in self._slots
                    if slot.left > 0 and not slot.carried and slot.param.requires_grad
                ]
        counts[-2:] = abandoned, bool(missing)
        # Not for the profiler's eyes, which expect one event per bucket.
        group.transport.all_reduce(torch.from_numpy(counts), ReduceOp.SUM)
        if counts[-2]:  # such a pass shows nothing of the graph
            self._raise_abandoned(group, abandoned)
            return
        self._arrived = arrived
        if self.passes and self.always_same:
            self.always_same = np.array_equal(self._before, counts)
        self.passes += 1
        if learning:
            for slot in self._slots:
                slot.due -= slot.left
        elif counts[-1] or (
            not (find_unused or static_graph or joining) and self._differ(group.size())
        ):
            self._raise_missing(group, missing, static_graph)

    def _differ(self, size: int) -> bool:
        """Say whether a parameter was used on some ranks only."""
        counts = self._counts[:-2]
        return bool((counts < size).any()) and bool(((counts > 0) & (counts < size)).any())

    def _raise_missing(
        self, group: ProcessGroup, missing: Sequence[Slot], static_graph: bool
    ) -> NoReturn:
        everybody: list[Any] = [None] * group.size()
        own = [(slot.index, slot.name) for slot in missing]
        all_gather_object(everybody, own, group=group)
        if static_graph:
            headline = (
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one. This error indicates that your training graph has changed in this iteration, "
                "e.g., one parameter is used in first iteration, but then got unused in the second "
                "iteration. this is not compatible with static_graph set to True.\n"
            )
            fix = ""
        else:
            headline = (
                "Expected to have finished reduction in the prior iteration, but some parameters "
                "got no gradient in this backward pass.\n"
            )
            fix = ADVICE
        rank = group.ranks[group.rank()]
        lines = []
        if own:
            indices = " ".join(str(index) for index, _ in own)
            lines.append(f"Parameter indices which did not receive grad for rank {rank}: {indices}")
        for other, theirs in zip(group.ranks, everybody, strict=True):
            names = ", ".join(name for _, name in theirs[:_SHOWN])
            more = f" and {len(theirs) - _SHOWN} more" if len(theirs) > _SHOWN else ""
            lines.append(
                f"Parameters which did not receive grad for rank {other}: {names}{more}"
                if theirs
                else f"All parameters that require it received grad on rank {other}"
            )
        message = headline + "\n".join(lines) + ("\n" + fix if fix else "")
        self._statistics.set_error_and_log(message)
        raise RuntimeError(message)

    def _raise_abandoned(self, group: ProcessGroup, abandoned: bool) -> None:
        everybody: list[Any] = [None] * group.size()
        all_gather_object(everybody, abandoned, group=group)
        if abandoned:
            return  # its own exception has told it
        ranks = [rank for rank, left in zip(group.ranks, everybody, strict=True) if left]
        message = (
            f"rank {', '.join(map(str, ranks))} left its backward pass by an exception and has "
            "gone on: the gradients of this pass are not complete on any rank"
        )
        self._statistics.set_error_and_log(message)
        raise RuntimeError(message)

    def raise_again(self, slot: Slot, static_graph: bool) -> NoReturn:
        """Raise for a gradient that has come more often than it should."""
        if static_graph:
            message = (
                "Your training graph has changed in this iteration, "
                f"e.g., parameter {slot.name} (index {slot.index}) was used {slot.due} times in "
                "the first iteration and more often now: this does not go with static_graph=True"
            )
        else:
            message = (
                f"Expected to mark a variable ready only once, but the gradient of {slot.name} "
                f"(index {slot.index}) has come a second time in one backward pass. This happens "
                "when a parameter is used in several reentrant backward passes, as of "
                "torch.utils.checkpoint(use_reentrant=True): use use_reentrant=False, or "
                "static_graph=True if the graph is the same in every iteration"
            )
        self._statistics.set_error_and_log(message)
        raise RuntimeError(message)
