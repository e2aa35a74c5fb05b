"""The shard of data that rank 1 wants to read does not exist."""

from pathlib import Path

import torch

import phalanx as dist
from phalanx.launch.processes import run_processes


def load(rank: int) -> torch.Tensor:
    if rank == 1:
        Path("shards/data-1.bin").read_bytes()
    return torch.randn(16)


def train() -> None:
    dist.barrier()
    batch = load(dist.get_rank())
    dist.all_reduce(batch)


if __name__ == "__main__":
    run_processes(train, 3)
