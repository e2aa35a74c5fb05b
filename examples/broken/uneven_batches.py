"""Eleven samples for three ranks: rank 2 runs out of them before the others."""

import torch

import phalanx as dist
from phalanx.launch.processes import run_processes


def train() -> None:
    weights = torch.zeros(16)
    samples = torch.randn(11, 16)
    for sample in samples[dist.get_rank() :: dist.get_world_size()]:
        gradients = weights - sample
        dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
        weights -= 0.1 * gradients


if __name__ == "__main__":
    run_processes(train, 3)
