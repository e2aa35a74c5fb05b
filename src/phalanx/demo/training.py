"""The training run of the tour: what its ranks do besides, and what can be seen of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx

Train = Callable[[int], Generator[float, None, nn.Module]]
Data = Callable[[], tuple[Tensor, Tensor]]

WIDTH, HEIGHT = 60, 30  # of the picture, in points
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Learnt:
    """What a rank has after the training."""

    losses: list[float]
    weights: str  # a digest of all their bits
    right: float  # share of the points
    picture: list[list[bool]]  # what it says of each place, from the upper left


def be_a_rank(train: Train, data: Data, steps: int, log: str) -> Learnt:
    """Train; rank 0 writes every loss down for whoever looks on."""
    dist: Any = phalanx
    torch.set_num_threads(1)
    losses: list[float] = []
    run = train(steps)
    with open(log if dist.get_rank() == 0 else "/dev/null", "w", buffering=1) as lines:
        while True:
            try:
                losses.append(next(run))
            except StopIteration as end:
                model: nn.Module = end.value
                break
            print(losses[-1], file=lines)
    with torch.no_grad():
        points, labels = data()
        right = ((model(points) > 0) == (labels > 0.5)).float().mean().item()
        across, down = torch.linspace(-1.1, 1.1, WIDTH), torch.linspace(1.1, -1.1, HEIGHT)
        places = torch.cartesian_prod(down, across).flip(1)
        picture = (model(places) > 0).view(HEIGHT, WIDTH).tolist()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return Learnt(losses, sha256(weights).hexdigest()[:16], right, picture)


def read(log: Path) -> list[float]:
    """Return the losses that rank 0 has written so far."""
    if not log.exists():
        return []
    return [float(line) for line in log.read_text().split("\n")[:-1]]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a line of bars, several of them together where there are more than fit."""
    if not values:
        return ""
    per_bar = -(-len(values) // width)
    means = [
        sum(chunk) / len(chunk)
        for start in range(0, len(values), per_bar)
        if (chunk := values[start : start + per_bar])
    ]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
