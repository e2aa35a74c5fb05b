"""Neighbours exchange the edges of a field, and all receive before they send."""

import torch

import phalanx as dist


def exchange_edges(field: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(field[0], (rank - 1) % size)
    dist.send(field[-1], (rank + 1) % size)


def simulate() -> None:
    field = torch.zeros(10, 1000)
    for _ in range(100):
        exchange_edges(field)
        field = (field + field.roll(1, 0)) / 2


if __name__ == "__main__":
    dist.run_threads(simulate, 3)
