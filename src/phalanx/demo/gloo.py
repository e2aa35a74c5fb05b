"""Race Phalanx against Gloo in the same processes: this module uses torch.distributed, its peer."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch

import phalanx
from phalanx.bench.torch_peer import gloo

ROUNDS = 5
TIMEOUT = timedelta(minutes=1)


def available() -> bool:
    """Say whether this torch has Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def race(folder: str, sizes: list[int], seconds: float) -> list[tuple[float, float]]:
    """Be one rank: return how long an all_reduce of each size takes, on Phalanx and on Gloo.

    They take turns. Of their turns, each about `seconds` long, the median counts.
    """
    dist: Any = phalanx
    torch.set_num_threads(1)
    found = []
    with gloo(Path(folder), dist.get_rank(), dist.get_world_size(), TIMEOUT) as peer:
        for size in sizes:
            tensor = torch.zeros(max(size // 4, 1))
            times: dict[Any, list[float]] = {dist.all_reduce: [], peer.all_reduce: []}
            counts = {}
            for all_reduce in times:
                all_reduce(tensor)  # the first one makes connections
                # Ranks must agree on how often.
                once = torch.tensor(_time(all_reduce, tensor, 3))
                dist.all_reduce(once, op=dist.ReduceOp.MAX)
                counts[all_reduce] = max(int(seconds / once.item()), 3)
            for _ in range(ROUNDS):
                for all_reduce, taken in times.items():
                    dist.barrier()
                    taken.append(_time(all_reduce, tensor, counts[all_reduce]))
            ours, theirs = (median(taken) for taken in times.values())
            found.append((ours, theirs))
    return found


def _time(all_reduce: Any, tensor: torch.Tensor, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        all_reduce(tensor)
    return (time.perf_counter() - start) / times
