"""Small models, and training them on several ranks or on one, for tests."""

import copy

import torch
from torch import nn

import phalanx as dist

BATCH = 4  # per rank


def mlp(width=40, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)
    )


def batches(count, seed=1):
    """Return the same batches on every rank, for all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    size = BATCH * dist.get_world_size()
    return [torch.randn(size, 6, generator=generator) for _ in range(count)]


def own(batch):
    """Return this rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(output):
    return output.square().mean()


def train(model, steps=4, part=own, set_to_none=True):
    """Train on a part of each batch; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(part(batch))).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def reference(model, steps=4):
    """Train a copy on whole batches, as one rank would."""
    return train(copy.deepcopy(model), steps, part=lambda batch: batch)


def assert_close(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-5)
