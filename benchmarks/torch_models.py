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
BLOCK = 64  # hidden units that stay together when a layer is split
VOCABULARY = 4096
CONTEXT = 128


def mesh_of(group: Any) -> DeviceMesh:
    """Return the ranks of a group as a mesh.

    Its dimension has the group's name: to DTensor, which keeps plans by mesh, meshes of the same
    ranks and names are the same, whatever groups they stand for.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))


def shard(module: nn.Module, group: Any) -> nn.Module:
    """Shard a model of benchmarks.models over a group with FSDP2, unit by unit."""
    mesh = mesh_of(group)
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
    """Attend to everything so far, one token at a time.

    One projection makes query, key and value, head by head, so that its rows can be split.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        cache = torch.zeros(2, 1, width // HEAD_WIDTH, CONTEXT, HEAD_WIDTH)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, place: int, rotation: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (-1, 3, HEAD_WIDTH)).transpose(1, 2)
        query, key, value = heads.unbind(-2)
        cache = self.cache[:, :, : key.shape[1]]  # a rank has as many heads as its projection
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
    """A SwiGLU layer; gates and values alternate in one projection, block by block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (width * 8 // 3 + 2 * BLOCK - 1) // (2 * BLOCK) * (2 * BLOCK)
        self.project = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.project(x).unflatten(-1, (-1, 2, BLOCK)).unbind(-2)
        return self.out((F.silu(gate) * value).flatten(-2))


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
    plan = {
        "layers.*.attention.project": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.perceptron.project": ColwiseParallel(),
        "layers.*.perceptron.out": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh_of(group), plan)
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
