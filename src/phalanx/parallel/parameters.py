"""The parameters of a module that are trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn


class Found(NamedTuple):
    """A parameter, its full name, and whether its gradients are sparse."""

    name: str
    param: nn.Parameter
    sparse: bool


def trainable(
    module: nn.Module, ignored: Collection[str]
) -> tuple[list[Found], list[tuple[str, nn.Parameter]]]:
    """Return the parameters that require gradients, each once, and by name those that do not."""
    found: dict[nn.Parameter, Found] = {}
    frozen = []
    for module_name, part in module.named_modules():
        sparse = bool(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse)
        for name, param in part.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            # torch writes the parameters of the module itself with a leading dot.
            if full in ignored or f".{full}" in ignored:
                continue
            if not param.requires_grad:
                frozen.append((full, param))
            elif param not in found:
                found[param] = Found(full, param, sparse)
    return list(found.values()), frozen
