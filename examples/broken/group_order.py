"""Each pair of neighbours in a ring has a group, and all begin with the one on their right."""

import torch

import phalanx as dist


def train() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [
        dist.new_group([left, (left + 1) % size], group_desc=f"edge {left}") for left in range(size)
    ]
    edges = torch.ones(2, 100)
    dist.all_reduce(edges[0], group=pairs[rank])
    dist.all_reduce(edges[1], group=pairs[rank - 1])


if __name__ == "__main__":
    dist.run_threads(train, 3)
