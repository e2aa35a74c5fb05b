"""Post-local SGD: gradients are averaged over all ranks at first, then within subgroups.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
https://arxiv.org/abs/1808.07217.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.futures import Future

from phalanx.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from phalanx.algorithms.ddp_comm_hooks.default_hooks import _allreduce_fut
from phalanx.algorithms.ddp_comm_hooks.states import HookState
from phalanx.groups import ProcessGroup
from phalanx.parallel.buckets import GradBucket
from phalanx.world import resolve

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState(HookState):
    """When ``post_localSGD_hook`` averages over which group, on one rank.

    Until ``start_localSGD_iter`` iterations are over it is ``process_group`` (None: the default
    one), after that ``subgroup`` (None: the ranks of ``process_group`` on this machine, which are
    all of them), or nothing at all without ``post_local_gradient_allreduce``. It can be pickled,
    without its groups.
    """

    __slots__ = (
        "iter",
        "post_local_gradient_allreduce",
        "process_group",
        "start_localSGD_iter",
        "subgroup",
    )
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group", "subgroup")

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients over all ranks for some iterations, then over this rank's subgroup.

    From then on a model averager must bring the subgroups together: see
    ``phalanx.optim.PostLocalSGDOptimizer``, or call a ``PeriodicModelAverager`` after each step,
    with ``warmup_steps`` equal to ``start_localSGD_iter``.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return _allreduce_fut(state.process_group, bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    if state.subgroup is None:
        state.subgroup = resolve(state.process_group)
    return _allreduce_fut(state.subgroup, bucket.buffer())
