"""The system ends rank 2, as it does with a process when memory runs out."""

import os
import signal

import torch

import phalanx as dist
from phalanx.launch.processes import run_processes


def load_batch(step: int) -> torch.Tensor:
    if dist.get_rank() == 2 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.randn(64)


def train() -> None:
    weights = torch.zeros(64)
    for step in range(10):
        gradients = weights - load_batch(step)
        dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
        weights -= 0.1 * gradients


if __name__ == "__main__":
    run_processes(train, 3)
