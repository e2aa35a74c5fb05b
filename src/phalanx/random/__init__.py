"""Random streams for the ranks of a thread world: those that processes would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

from phalanx.random import libraries, torch_stream
from phalanx.random.torch_stream import DefaultGenerator

__all__ = ["Choice", "DefaultGenerator", "Streams", "told_apart"]

# Which libraries have a stream for each rank: all, torch alone, or none.
Choice = Literal["all"] | bool


class Streams:
    """What one rank draws from. The streams start where those of the calling thread stand."""

    def __init__(self, rng: Choice) -> None:
        self._torch = torch_stream.Stream() if rng else None
        self._others = libraries.Streams() if rng == "all" else None

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Let the calling thread draw from these streams."""
        with ExitStack() as stack:
            if self._torch is not None:
                stack.enter_context(torch_stream.draw_from(self._torch))
            if self._others is not None:
                stack.enter_context(libraries.draw_from(self._others))
            yield


def told_apart(rng: Choice) -> Any:
    """Return a context in which functions without a generator argument tell ranks apart."""
    if isinstance(rng, bool):
        return nullcontext()
    if rng != "all":
        raise ValueError(f"unknown rng {rng!r} (known: True for torch, 'all', False for none)")
    return libraries.told_apart
