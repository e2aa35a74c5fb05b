"""Events for the profiler that look as those of an operation which ends on another thread."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx import profiling


class AsynchronousEvent(profiling.Event):
    """An event that never ends, which is how one looks that ended on another thread.

    Complex tensors count as the real ones that they consist of.
    """

    backend: ClassVar[str | None] = None  # what the title names, if not the one that is used
    _kept: ClassVar[list[Any]] = []

    def __init__(self, title: str, tensors: list[Tensor]) -> None:
        if self.backend is not None:
            title = f"{self.backend}:{title.partition(':')[2]}"
        super().__init__(title, [torch.view_as_real(t) if t.is_complex() else t for t in tensors])
        self._kept.extend(self._open)

    def end(self) -> None:
        pass


def make_events_asynchronous(backend: str | None = None) -> None:
    """Have the profiler see all operations so, from now on, and as those of ``backend``."""
    AsynchronousEvent.backend = backend
    profiling.Event = AsynchronousEvent  # type: ignore[misc]
