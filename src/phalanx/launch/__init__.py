"""How ranks are started: as threads, as processes, from a shell, and on a cluster of Ray's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch.on_ray import ray

__all__ = ["ray"]


def __getattr__(name: str) -> Any:
    if name == "ray":
        from phalanx.launch.on_ray import ray

        return ray
    raise AttributeError(f"module 'phalanx.launch' has no attribute {name!r}")
