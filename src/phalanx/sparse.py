"""Reducing sparse COO tensors, whose pattern may differ from rank to rank."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor

from phalanx import checks
from phalanx.backends.base import GroupBackend
from phalanx.types import ReduceOp
from phalanx.work import ThreadWork, Work

LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def all_reduce(
    transport: GroupBackend, tensor: Tensor, op: ReduceOp, async_op: bool
) -> Work | None:
    """Replace ``tensor`` by the coalesced sum or average of all ranks', in rank order."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce can reduce dense and sparse COO tensors, not {tensor.layout}")
    if op.name not in ("SUM", "AVG") or tensor.dtype not in op.dtypes:
        raise ValueError(
            f"all_reduce does not support {op} on sparse {tensor.dtype} tensors (SUM and AVG do)"
        )
    own = tensor.detach().coalesce()
    values = checks.movable(own.values(), "values", "all_reduce", written=False)
    # How much each rank has is known before anything else is issued, so that the order of
    # collectives is the same on all ranks.
    counts = torch.empty(transport.size, dtype=torch.int64)
    transport.all_gather_single(counts, torch.tensor([values.shape[0]]))
    all_indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts.tolist()]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts.tolist()]
    gathers = [
        transport.all_gather(all_indices, own.indices(), async_op=True),
        transport.all_gather(all_values, values, async_op=True),
    ]

    def finish() -> None:
        for gather in gathers:
            cast(Work, gather).wait()
        parts = [
            torch.sparse_coo_tensor(
                indices, values, tensor.shape, is_coalesced=True, check_invariants=False
            )
            for indices, values in zip(all_indices, all_values, strict=True)
        ]
        with torch.no_grad():
            total = functools.reduce(torch.add, parts).coalesce()
            if op.name == "AVG":
                total = total / transport.size
            tensor.copy_(total)

    if async_op:
        return ThreadWork(finish, [tensor]).start()
    finish()
    return None
