"""What torch.compile is to leave alone.

Torch's own groups are written in C++, where it cannot look: it breaks its graph there and calls
them. It is told to do the same here, without importing it, which takes more than a second.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

from phalanx import dispatch

T = TypeVar("T", bound=type)


def untraced(kind: T) -> T:
    """Keep torch.compile out of all methods of a class."""
    for member in vars(kind).values():
        if isinstance(member, property):
            member = member.fget
        if inspect.isfunction(member):
            dispatch.untrace(member, "it communicates")
    return kind
