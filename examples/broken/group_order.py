"""Rank 1 averages over the two groups it is in in another order than its peers."""

import torch

import phalanx as dist


def train() -> None:
    rank = dist.get_rank()
    tensor_parallel = dist.new_group([0, 1], group_desc="tensor")
    data_parallel = dist.new_group([1, 2, 0], group_desc="data")
    activations, gradients = torch.ones(8), torch.ones(100)
    if rank == 1:
        dist.all_reduce(gradients, group=data_parallel)
        dist.all_reduce(activations, group=tensor_parallel)
    else:
        if rank == 0:
            dist.all_reduce(activations, group=tensor_parallel)
        dist.all_reduce(gradients, group=data_parallel)


if __name__ == "__main__":
    dist.run_threads(train, 3)
