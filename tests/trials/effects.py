"""What goes into an operation and what must come out, computed without the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trials.oracle import Place
from trials.programs import REDUCING, Program, Step

UNTOUCHED = 77  # what is in a buffer before it is written


def values(step: Step, rank: int, key: int, part: int = 0) -> Tensor:
    """Return what a rank puts into an operation; reductions of these are exact."""
    span = 4 if step.reduce == "PRODUCT" and step.kind in REDUCING else 50
    start = rank * 17 + key * 11 + part * 5
    flat = (torch.arange(step.count) + start) % span + 1
    return flat.to(getattr(torch, step.dtype)).reshape(step.shape)


def an_object(rank: int, key: int, part: int = 0) -> dict[str, Any]:
    """Return an object that a rank puts into an operation."""
    return {"from": rank, "key": key, "part": part, "padding": "x" * ((rank * 7 + key) % 40)}


class Effect:
    """The buffers of one step, which know what must be in them."""

    def __init__(self, program: Program, place: Place) -> None:
        self.place = place
        self.rank = place[0]
        self.step = program.steps[self.rank][place[1]]
        self.group = program.groups[self.step.group]
        self.work: Any = None
        self.outputs = _outputs(self.step, self.rank, self.group)
        self.before = [_copy(output) for output in self.outputs]

    def is_untouched(self) -> bool:
        """Say whether nothing has been written."""
        return all(map(_same, self.outputs, self.before))

    def is_right(self, keys: dict[int, int]) -> bool:
        """Say whether the result is there, given the ranks that took part and their keys."""
        return all(map(_same, self.outputs, _results(self.step, self.rank, self.group, keys)))

    def in_one(self) -> Tensor:
        """Return the outputs as the parts of one tensor, which they are from now on."""
        whole = torch.stack(self.outputs)
        self.outputs = list(whole.unbind(0))
        return whole


def _outputs(step: Step, rank: int, group: tuple[int, ...]) -> list[Any]:
    own = values(step, rank, step.key)
    empty = torch.full_like(own, UNTOUCHED)
    at_root = rank == step.root
    match step.kind:
        case "all_reduce" | "reduce":
            return [own]
        case "all_reduce_coalesced":
            return [values(step, rank, step.key, part) for part in range(step.tensors)]
        case "broadcast":
            return [own if at_root else empty]
        case "scatter" | "reduce_scatter" | "reduce_scatter_single" | "recv" | "irecv":
            return [empty]
        case "all_gather" | "all_gather_single" | "all_to_all" | "all_to_all_single":
            return [empty.clone() for _ in group]
        case "gather":
            return [empty.clone() for _ in group] if at_root else []
        case "all_gather_object":
            return [[None] * len(group)]
        case "gather_object":
            return [[None] * len(group)] if at_root else []
        case "broadcast_object_list":
            return [[an_object(rank, step.key), step.key] if at_root else [None, None]]
        case "scatter_object_list":
            return [[None]]
    return []


def _results(step: Step, rank: int, group: tuple[int, ...], keys: dict[int, int]) -> list[Any]:
    root, mine = step.root, group.index(rank)

    def of_all(part: int = 0) -> list[Tensor]:
        return [values(step, r, keys[r], part) for r in group]

    match step.kind:
        case "reduce" if rank != root:
            return [values(step, rank, step.key)]
        case "all_reduce" | "reduce":
            return [_reduced(step, of_all())]
        case "all_reduce_coalesced":
            return [_reduced(step, of_all(part)) for part in range(step.tensors)]
        case "reduce_scatter" | "reduce_scatter_single":
            return [_reduced(step, of_all(mine))]
        case "broadcast":
            return [values(step, root, keys[root])]
        case "scatter":
            return [values(step, root, keys[root], mine)]
        case "recv" | "irecv":
            return [values(step, rank, key) for rank, key in keys.items()]
        case "gather" if rank != root:
            return []
        case "all_gather" | "all_gather_single" | "gather":
            return of_all()
        case "all_to_all" | "all_to_all_single":
            return of_all(mine)
        case "gather_object" if rank != root:
            return []
        case "all_gather_object" | "gather_object":
            return [[an_object(r, keys[r]) for r in group]]
        case "broadcast_object_list":
            return [[an_object(root, keys[root]), keys[root]]]
        case "scatter_object_list":
            return [[an_object(root, keys[root], mine)]]
    return []


def _reduced(step: Step, tensors: list[Tensor]) -> Tensor:
    if step.reduce == "BOR":
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total | tensor
        return total
    wide = torch.stack(tensors).to(torch.float64)
    reductions = {"SUM": wide.sum, "AVG": wide.mean, "PRODUCT": wide.prod}
    reductions |= {"MIN": wide.amin, "MAX": wide.amax}
    return reductions[step.reduce](0).to(tensors[0].dtype)


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else list(output)


def _same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if expected.dtype.is_floating_point:  # an average may be rounded in another order
        tolerance = 0.01 if expected.dtype is torch.bfloat16 else 1e-6
        return torch.allclose(found, expected, rtol=tolerance, atol=0)
    return torch.equal(found, expected)
