"""For testing programs that run on several ranks, and stores and backends of your own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.testing.backend_kit import check_backend
    from phalanx.testing.injection import faults
    from phalanx.testing.interleavings import explore, schedule
    from phalanx.testing.ranks import run_ranks
    from phalanx.testing.store_kit import check_store
    from phalanx.testing.torch_threads.world import torch_world

__all__ = [
    "check_backend",
    "check_store",
    "explore",
    "faults",
    "run_ranks",
    "schedule",
    "torch_world",
]

_ORIGINS = {
    "check_backend": "backend_kit",
    "check_store": "store_kit",
    "explore": "interleavings",
    "faults": "injection",
    "run_ranks": "ranks",
    "schedule": "interleavings",
    "torch_world": "torch_threads.world",
}


def __getattr__(name: str) -> Any:
    # pytest loads the plugin, which is in here, in every run: torch must not come with it.
    if name not in _ORIGINS:
        raise AttributeError(f"module 'phalanx.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.testing.{_ORIGINS[name]}"), name)
