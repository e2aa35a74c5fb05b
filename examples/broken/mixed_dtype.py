"""One rank has its own idea of the precision of gradients."""

import torch

import phalanx as dist


def gradients_for(rank: int) -> torch.Tensor:
    gradients = torch.randn(1000)
    return gradients.half() if rank == 2 else gradients.bfloat16()


def train() -> None:
    for _ in range(3):
        dist.all_reduce(gradients_for(dist.get_rank()), op=dist.ReduceOp.AVG)


if __name__ == "__main__":
    dist.run_threads(train, 4)
