"""Only the members of a group call new_group, though every rank of the world has to."""

import torch

import phalanx as dist


def train() -> None:
    rank = dist.get_rank()
    if rank in (0, 1):
        stage = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(8), group=stage)
    dist.barrier()
    replicas = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(100), group=replicas)


if __name__ == "__main__":
    dist.run_threads(train, 3)
