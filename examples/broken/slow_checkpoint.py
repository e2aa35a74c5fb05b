"""Rank 0 writes a checkpoint for longer than the others are willing to wait."""

import time

import torch

import phalanx as dist
from phalanx.launch.processes import run_processes


def save_checkpoint(weights: torch.Tensor) -> None:
    time.sleep(4)  # a large model, a slow disk


def train() -> None:
    dist.barrier()  # all have started
    dist.group.WORLD.set_timeout(2)  # seconds, instead of 30 minutes
    weights = torch.zeros(64)
    for step in range(4):
        gradients = torch.randn(64)
        dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
        weights -= 0.1 * gradients
        if dist.get_rank() == 0 and step == 1:
            save_checkpoint(weights)


if __name__ == "__main__":
    run_processes(train, 2)
