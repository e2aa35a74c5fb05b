"""The programs of the tour, as a user writes them. Each function is what one rank does."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx as dist
from phalanx import DistributedDataParallel as DDP


def greet() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)  # now x is the sum of all ranks' tensors
    return f"rank {rank} of {size} has {x.tolist()}"


def forgetful() -> None:
    loss = torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # only rank 0 prints the loss, so only rank 0 asks for it
    weights = torch.zeros(1000)
    dist.broadcast(weights, src=0)


def impatient() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outbox, inbox = torch.ones(4), torch.empty(4)
    dist.recv(inbox, src=(rank - 1) % size)  # everybody waits for the left neighbour
    dist.send(outbox, dst=(rank + 1) % size)


def train(steps: int) -> Generator[float, None, nn.Module]:
    points, labels = spirals()
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # each rank has its share

    torch.manual_seed(dist.get_rank())  # weights differ at first: DDP makes them the same
    layers = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = F.binary_cross_entropy_with_logits(model(points[mine]), labels[mine])
        loss.backward()  # gradients are averaged meanwhile, in shared memory
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    return model.module


def spirals(count: int = 400) -> tuple[Tensor, Tensor]:
    """Return points of two spirals, and to which of them each belongs."""
    labels = torch.arange(count) // 2 % 2
    way = torch.linspace(0.02, 1, count).sqrt()
    angle = way * 13 + labels * torch.pi
    return torch.stack([way * angle.cos(), way * angle.sin()], 1), labels[:, None].float()
