"""Models to train: small GPTs, a perceptron with large layers, and one of many small parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


class GPT(nn.Module):
    """Predict the next byte at each place of a text."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0, activation=F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.layers(self.tokens(text) + self.places, self.mask, is_causal=True)
        return self.head(self.norm(x))


class Chain(nn.Module):
    """Many small layers, each added to its input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, the batches of one rank, and the loss."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]


def gpt(title: str, width: int, layers: int, heads: int, context: int, size: int) -> Workload:
    def batch(random: torch.Generator) -> Batch:
        text = torch.randint(VOCABULARY, (size, context + 1), generator=random)
        return text[:, :-1], text[:, 1:]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return Workload(title, lambda: GPT(width, layers, heads, context), batch, loss)


def regression(title: str, build: Callable[[], nn.Module], size: int, width: int) -> Workload:
    def batch(random: torch.Generator) -> Batch:
        inputs, targets = torch.randn(2, size, width, generator=random)
        return inputs, targets

    return Workload(title, build, batch, F.mse_loss)


def perceptron(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )


WORKLOADS = {
    "gpt-5m": gpt("GPT, 5 M", width=256, layers=6, heads=8, context=128, size=4),
    "gpt-20m": gpt("GPT, 20 M", width=512, layers=6, heads=8, context=128, size=2),
    "mlp": regression("MLP, large layers", lambda: perceptron(1024, 4096), size=128, width=1024),
    "many": regression("1,000 small parameters", lambda: Chain(32, 500), size=64, width=32),
    "tiny": gpt("a tiny GPT", width=16, layers=2, heads=2, context=8, size=2),
}
