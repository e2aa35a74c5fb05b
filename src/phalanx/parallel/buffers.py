"""Keeping the buffers of a module the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.futures import Future

from phalanx.groups import ProcessGroup
from phalanx.parallel.replicas import broadcast_coalesced

Hook = Callable[[Any, dict[str, Tensor]], Any]


class BufferCommHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class Buffers:
    """The buffers of a module, but those to be ignored, and how they are synchronised.

    Copied from one rank to all before a forward pass, or left to a hook, before or after it.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._hook: tuple[Any, Hook] | None = None
        self.location = BufferCommHookLocation.PRE_FORWARD
        self.refresh()

    def refresh(self) -> None:
        """Look the buffers up anew, since a module may put others in their place."""
        self.named = {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    def register_hook(self, state: Any, hook: Hook, location: BufferCommHookLocation) -> None:
        """Let ``hook(state, buffers by name)`` synchronise them."""
        if not callable(hook):
            raise AssertionError(f"a buffer hook must be callable, got {type(hook).__name__}")
        self._hook = (state, hook)
        self.location = location

    @torch.no_grad()
    def sync(self, group: ProcessGroup, src: int) -> Sequence[Future[Any]]:
        """Synchronise them; returns what is to be waited for at the end of backward."""
        buffers = tuple(self.named.values())
        # A graph that is still to be differentiated may have saved them: what it saved is what
        # they were, on whichever rank.
        with _unsafe_preserve_version_counter(buffers):
            if self._hook is None:
                broadcast_coalesced(group, buffers, src=src)
                return ()
            state, hook = self._hook
            futures = hook(state, self.named)
            if futures is None:
                return ()
            return [futures] if isinstance(futures, Future) else list(futures)
