"""Every collective, as a call with tensors of one shape and dtype, full of the rank's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import phalanx as dist

SUM = dist.ReduceOp.SUM

# What a message calls the operations whose arguments come in two forms.
SPELLED = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
MOVING = [
    *["broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather"],
    *["scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"],
]
COLLECTIVES = [*MOVING, "barrier"]


class Call:
    """A collective and the tensors it was given; `root` is a rank of the group."""

    def __init__(
        self,
        name: str,
        group: Any = None,
        shape: tuple[int, ...] = (4,),
        dtype: torch.dtype = torch.float32,
        op: Any = SUM,
        root: int = 0,
        **options: Any,
    ) -> None:
        self.tensors: list[Tensor] = []
        size, mine = dist.get_world_size(group), dist.get_rank(group)

        def one(times: int = 1) -> Tensor:
            whole = (times * shape[0], *shape[1:])
            self.tensors.append(torch.full(whole, dist.get_rank(), dtype=dtype))
            return self.tensors[-1]

        def many() -> list[Tensor]:
            return [one() for _ in range(size)]

        def many_at_root() -> list[Tensor] | None:
            return many() if mine == root else None

        arguments: dict[str, Callable[[], list[Any]]] = {
            "broadcast": lambda: [one()],
            "all_reduce": lambda: [one(), op],
            "reduce": lambda: [one(), None, op],
            "all_gather": lambda: [many(), one()],
            "all_gather_into_tensor": lambda: [one(size), one()],
            "gather": lambda: [one(), many_at_root()],
            "scatter": lambda: [one(), many_at_root()],
            "reduce_scatter": lambda: [one(), many(), op],
            "reduce_scatter_tensor": lambda: [one(), one(size), op],
            "all_to_all": lambda: [many(), many()],
            "all_to_all_single": lambda: [one(size), one(size)],
            "barrier": list,
        }
        if name in ROOTED:
            options["group_src" if name in ("broadcast", "scatter") else "group_dst"] = root
        self.name, self.group, self.options = name, group, options
        self.arguments = arguments[name]()

    def run(self) -> Any:
        return getattr(dist, self.name)(*self.arguments, group=self.group, **self.options)

    def untouched(self) -> bool:
        return all(bool((tensor == dist.get_rank()).all()) for tensor in self.tensors)


def everybody_goes_on(group: Any = None) -> None:
    """Check, on all ranks of a group, that it works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = torch.arange(3.0) + 10 * rank
    dist.all_reduce(total, group=group)
    tens = 10 * sum(range(size))
    assert total.tolist() == [tens, tens + size, tens + 2 * size]
