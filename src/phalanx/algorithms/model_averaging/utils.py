"""Averaging parameters over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from phalanx.collectives import all_reduce, all_reduce_coalesced
from phalanx.groups import ProcessGroup
from phalanx.heap import empty_shared
from phalanx.types import ReduceOp
from phalanx.world import is_outside

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def average_parameters(params: Iterable[Tensor], process_group: ProcessGroup | None) -> None:
    """Replace parameters by their average over ``process_group`` (None: the default one).

    In place; gradients stay as they are. All ranks of the group must give the same parameters, in
    the same order; a rank outside it keeps its own. They travel as one flat tensor per dtype, in
    shared memory, which takes as much memory as the parameters for the time of the call.
    """
    if is_outside(process_group):
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in params:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    if not by_dtype:
        return
    flats: list[Tensor] = []
    views: list[Tensor] = []
    for dtype, same in by_dtype.items():
        flats.append(empty_shared(sum(parameter.numel() for parameter in same), dtype=dtype))
        start = 0
        for parameter in same:
            end = start + parameter.numel()
            views.append(flats[-1][start:end].view(parameter.shape))
            start = end
    ordered = [parameter for same in by_dtype.values() for parameter in same]
    with torch.no_grad():
        torch._foreach_copy_(views, ordered)
        all_reduce_coalesced(flats, op=ReduceOp.AVG, group=process_group)
        torch._foreach_copy_(ordered, views)


def get_params_to_average(params: Parameters) -> list[Tensor]:
    """Return those parameters, of a model or an optimizer's groups, that have a gradient here."""
    return [parameter for parameter in _listed(params) if parameter.grad is not None]


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: ProcessGroup | None
) -> None:
    """Average those parameters that have a gradient on any rank of ``process_group``.

    ``params`` are parameters, or the parameter groups of an optimizer, the same on all ranks of the
    group; a rank outside it keeps its own.
    """
    every = _listed(params)
    if is_outside(process_group) or not every:
        return
    # A parameter that was not used on this rank has been changed where it was.
    used = torch.tensor([parameter.grad is not None for parameter in every])
    all_reduce(used, op=ReduceOp.MAX, group=process_group)
    chosen = [parameter for parameter, use in zip(every, used.tolist(), strict=True) if use]
    average_parameters(chosen, process_group)


def _listed(params: Parameters) -> list[Tensor]:
    """Return the parameters of a model or of the parameter groups of an optimizer."""
    found: list[Tensor] = []
    for each in params:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            found += each["params"]
        else:
            raise TypeError(
                "parameters to average must be tensors or an optimizer's parameter groups, "
                f"got {type(each).__name__}"
            )
    return found
