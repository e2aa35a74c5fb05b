"""What torch.compile is to leave alone.

Torch's own groups are written in C++, where it cannot look: it breaks its graph there and calls
them. It is told to do the same here, without importing it, which takes more than a second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type)

_frames: Any = torch._C._dynamo.eval_frame
# Neither this frame nor those that are called from it.
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(kind: T) -> T:
    """Keep torch.compile out of all methods of a class."""
    for member in vars(kind).values():
        if isinstance(member, property):
            member = member.fget
        if inspect.isfunction(member):
            untrace(member)
    return kind


def untrace(function: Callable[..., Any]) -> None:
    """Keep torch.compile out of a function, and of all that it calls."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it communicates"  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
