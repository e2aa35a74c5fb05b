"""What torch parallelises itself: models in shards, and a language model that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from .models import GPT, Chain

CHAIN_UNIT = 50  # layers of a chain that are gathered together
HEAD_WIDTH = 32
VOCABULARY = 4096
CONTEXT = 128


def shard(module: nn.Module, group: Any) -> nn.Module:
    """Shard a model of benchmarks.models over a group with FSDP2, unit by unit."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for unit in units(module):
        fully_shard(unit, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def units(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the layers whose parameters are gathered and freed together."""
    if isinstance(module, GPT):
        yield from ([layer] for layer in module.layers.layers)
    elif isinstance(module, Chain):
        layers = list(module.layers)
        yield from (layers[at : at + CHAIN_UNIT] for at in range(0, len(layers), CHAIN_UNIT))
    else:
        yield from ([layer] for layer in module.children() if isinstance(layer, nn.Linear))


class Attention(nn.Module):
    """Attend to everything so far, one token at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        cache = torch.zeros(2, 1, width // HEAD_WIDTH, CONTEXT, HEAD_WIDTH)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, place: int, rotation: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        cache = self.cache[:, :, : key.shape[1]]  # a rank has as many heads as its projections
        cache[0, :, :, place] = rotate(key, rotation)[:, :, 0]
        cache[1, :, :, place] = value[:, :, 0]
        keys, values = cache[:, :, :, : place + 1]
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), keys, values)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn pairs of elements by the angles of a place."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = rotation
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class Gated(nn.Module):
    """A SwiGLU layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (width * 8 // 3 + 63) // 64 * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.perceptron = Attention(width), Gated(width)
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, place: int, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x), place, rotation)
        return x + self.perceptron(self.second_norm(x))


class Decoder(nn.Module):
    """A language model as LLaMA is built, for a batch of one, with a cache of keys and values."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        pairs = torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH
        angles = torch.outer(torch.arange(CONTEXT), 10_000.0**-pairs)
        rotations = torch.stack([angles.cos(), angles.sin()], dim=1)
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, token: Tensor, place: int) -> Tensor:
        """Return the logits of what follows `token`, a tensor of shape (1, 1), at `place`."""
        x, rotation = self.tokens(token), self.rotations[place]
        for layer in self.layers:
            x = layer(x, place, rotation)
        return self.head(self.norm(x))


def parallelise(model: Decoder, group: Any) -> Decoder:
    """Split the heads, the hidden units and the vocabulary over a group."""
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        **{f"layers.*.attention.{name}": columns() for name in ("query", "key", "value")},
        "layers.*.attention.out": rows(),
        **{f"layers.*.perceptron.{name}": columns() for name in ("gate", "up")},
        "layers.*.perceptron.down": rows(),
        "head": columns(output_layouts=Replicate()),
    }
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    return model


@torch.no_grad()
def read(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the logits after each token of a text."""
    logits = [model(token.view(1, 1), place) for place, token in enumerate(tokens)]
    return torch.cat([one.flatten(0, 1) for one in logits])


@torch.no_grad()
def decode(model: Decoder, count: int) -> None:
    """Write `count` tokens, each the likeliest; another text begins after CONTEXT of them."""
    token = torch.zeros(1, 1, dtype=torch.long)
    for index in range(count):
        token = model(token, index % CONTEXT).argmax(dim=-1)
