"""Averaging often within small groups of ranks, and less often within larger ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

from phalanx.algorithms.model_averaging.averagers import (
    ModelAverager,
    check_warmup,
    warn_of_every_step,
)
from phalanx.algorithms.model_averaging.utils import (
    Parameters,
    average_parameters_or_parameter_groups,
)
from phalanx.groups import ProcessGroup
from phalanx.subgroups import new_subgroups, split_group
from phalanx.world import default_group, resolve

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(ModelAverager):
    """Average a model in groups of several sizes, each with its own period.

    Hierarchical SGD: https://arxiv.org/abs/2010.12998. ``period_group_size_dict`` maps periods, in
    ascending order, to the sizes of groups, of which the last is that of ``process_group`` (None:
    the default one): ``{2: 2, 4: 4, 16: 8}`` averages among 2 ranks every 2 steps, among 4 every 4,
    among all 8 every 16. At a step that several periods divide, the longest one counts.

    All ranks of ``process_group`` must make it; ranks outside cannot. Groups are neighbours in
    ``process_group``; this rank's are in ``period_process_group_dict``.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        overall = resolve(process_group)
        super().__init__(overall)
        sizes = dict(period_group_size_dict or {})
        _check(sizes, overall.size())
        check_warmup(warmup_steps)
        if list(sizes) == [1]:
            warn_of_every_step()
        self.warmup_steps = warmup_steps
        self._periods = list(sizes)
        self.period_process_group_dict = OrderedDict(
            (period, _part(overall, size)) for period, size in sizes.items()
        )

    def average_parameters(self, params: Parameters) -> None:
        """Average in the group whose time it is, if it is one's, and count a step.

        Only parameters that have a gradient on any rank of the group are averaged.
        """
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def _find_process_group(self) -> ProcessGroup | None:
        """Return the group with the longest period that ends at this step."""
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None


def _check(sizes: dict[int, int], overall: int) -> None:
    """Refuse what is no hierarchy of ``overall`` ranks."""
    if not sizes:
        raise ValueError(
            "period_group_size_dict must not be empty: it maps periods to sizes of groups"
        )
    periods = list(sizes)
    if min(periods) < 1:
        raise ValueError(f"the periods in period_group_size_dict must be positive, got {periods}")
    if any(later <= earlier for earlier, later in pairwise(periods)):
        raise ValueError(
            f"the periods in period_group_size_dict must be in ascending order, got {periods}"
        )
    for period, size in sizes.items():
        if size < 1 or overall % size != 0:
            raise ValueError(
                f"period_group_size_dict: groups of {size} (period {period}) do not divide the "
                f"{overall} ranks of the process group evenly"
            )
    if sizes[periods[-1]] != overall:
        raise ValueError(
            "the last group size in period_group_size_dict must be the size of the process group, "
            f"{overall}, got {sizes[periods[-1]]}"
        )


def _part(group: ProcessGroup, size: int) -> ProcessGroup:
    """Return the group of ``size`` neighbours in ``group`` that this rank is in."""
    overall = group.size()
    if size == overall:
        return group
    part: ProcessGroup | None
    if group is default_group():
        part, _ = new_subgroups(size)
    else:
        # The ranks outside take no part in this, as new_subgroups would need them to.
        cuts = [list(range(start, start + size)) for start in range(0, overall, size)]
        part = split_group(group, cuts)
    assert part is not None  # each rank is in one
    return part
