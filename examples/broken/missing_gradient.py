"""The batch of rank 1 has no images, so there is no gradient for the encoder of images."""

import torch
from torch import nn

import phalanx as dist


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def train() -> None:
    model = nn.ModuleDict({"image": nn.Linear(64, 8), "text": nn.Linear(32, 8)})
    for step in range(3):
        output = model["text"](torch.randn(4, 32))
        if dist.get_rank() == 0 or step < 2:
            output = output + model["image"](torch.randn(4, 64))
        model.zero_grad()
        output.sum().backward()
        average_gradients(model)


if __name__ == "__main__":
    dist.run_threads(train, 2)
