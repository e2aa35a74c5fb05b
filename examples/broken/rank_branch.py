"""Only rank 0 logs the loss, and the logging communicates."""

import torch

import phalanx as dist


def step(weights: torch.Tensor) -> torch.Tensor:
    gradients = torch.randn_like(weights)
    dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
    weights -= 0.1 * gradients
    return weights.square().mean()


def log(number: int, loss: torch.Tensor) -> None:
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    print(f"step {number}")


def train() -> None:
    weights = torch.zeros(128, 64)
    for number in range(10):
        loss = step(weights)
        if dist.get_rank() == 0:
            log(number, loss)


if __name__ == "__main__":
    dist.run_threads(train, 4)
