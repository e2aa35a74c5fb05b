"""torch.compile for each rank.

What torch has compiled it keeps with the function, for all threads; rank and group are constants in
it. It looks only at what the same backend has compiled: here every rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.testing.torch_threads.ranks import mine


@dataclass(frozen=True)
class _Backend:
    """A backend of torch.compile, as one rank of a world has it."""

    theirs: Any
    rank: int
    size: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.theirs(*args, **kwargs)


class _Callback:
    """What torch calls to compile a function, for one rank."""

    def __init__(self, theirs: Any, rank: int, size: int) -> None:
        self._theirs = theirs
        backend = theirs
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        self._torchdynamo_orig_backend = _Backend(backend, rank, size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._theirs(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


def for_ranks(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what stands for the function of torch's that decides what is to compile now."""

    def callback_of(callback: Any) -> Any:
        found, rank = theirs(callback), mine()
        if rank is None or not callable(found) or isinstance(found, _Callback):
            return found
        return _Callback(found, rank.rank, rank.meeting.size)

    return callback_of
