"""Operations as a program names them: the function it called, and the line it called it from."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

import phalanx
from phalanx.backends.base import COLLECTIVES, MESSAGES

_PACKAGE = os.path.dirname(os.path.abspath(phalanx.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_THEIRS = os.path.join(_TORCH, "distributed", "")
_PUBLIC = tuple(
    os.path.join(_PACKAGE, f"{module}.py")
    for module in ("collectives", "functional", "objects", "p2p")
)

# These consist of several operations of a group.
_OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
_BATCH = "batch_isend_irecv"
_ALIASES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
NAMES = sorted(
    (COLLECTIVES - {"coalesce"})
    | MESSAGES
    | _OBJECTS
    | set(_ALIASES)
    | {"all_gather_coalesced", "all_reduce_coalesced", _BATCH, "irecv", "isend"}
)


@dataclass(frozen=True)
class Operation:
    """One operation of a group.

    `names` are what a program may call it: an isend is a send as well, and what is coalesced is one
    operation with all the names in it. The operations that an object is sent by have only the name
    of the function that sends it.
    """

    names: frozenset[str]
    site: str
    whole: FrameType | None = None  # the call that it is only a part of

    @property
    def title(self) -> str:
        """The longest name, which says most."""
        return max(sorted(self.names), key=len)


def identify(name: str, args: tuple[Any, ...], frame: FrameType | None) -> Operation:
    """Say what a call of a transport's method `name` is, which comes by way of `frame`."""
    ours: list[FrameType] = []
    theirs: list[FrameType] = []
    while frame is not None and _is_between(path := frame.f_code.co_filename):
        if frame.f_code.co_name in NAMES and path in _PUBLIC:
            ours.append(frame)
        elif frame.f_code.co_name in NAMES and path.startswith(_THEIRS):
            theirs.append(frame)
        frame = frame.f_back
    calls = theirs or ours  # torch's are served by calls of ours, which the program has not made
    functions = [call.f_code.co_name for call in calls]
    site = site_of(frame)
    if functions and functions[-1] in _OBJECTS:
        return Operation(frozenset(functions[-1:]), site, calls[-1])
    names = {_ALIASES.get(function, function) for function in functions}
    names |= {each for each, _ in args[0]} if name == "coalesce" else {name}
    return Operation(frozenset(names), site, calls[-1] if _BATCH in names else None)


def innermost(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from this one outwards, outside of Phalanx and torch."""
    while frame is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, _TORCH, contextlib.__file__)
    ):
        frame = frame.f_back
    return frame


def site_of(frame: FrameType | None) -> str:
    """Name the innermost line outside of Phalanx and torch, as the engine's reports do."""
    frame = innermost(frame)
    if frame is None:
        return "?"
    text = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    function = frame.f_code.co_name
    return text if function == "<module>" else f"{text} in {function}"


def _is_between(path: str) -> bool:
    return path.startswith((_PACKAGE, _THEIRS, contextlib.__file__))


@dataclass(frozen=True)
class Place:
    """Which operations are meant by `at`: "all_reduce#17@group", or a part of that."""

    name: str | None
    number: int | None
    group: str | None

    @classmethod
    def parse(cls, at: str | None) -> Place:
        """Read `at`; ValueError if it cannot be read or names no operation."""
        if at is None:
            return cls(None, None, None)
        found = re.fullmatch(r"(\w+)?(?:#(\d+))?(?:@(.+))?", at) if isinstance(at, str) else None
        if found is None or not at or found[2] == "0":
            raise ValueError(
                f"cannot read at={at!r}: it is an operation, its number from 1, and a group, or "
                "some of them, as in 'all_reduce#17@world', 'barrier' or '#3'"
            )
        if found[1] is not None and found[1] not in NAMES:
            raise ValueError(f"unknown operation in at={at!r} (known: {', '.join(NAMES)})")
        name: str | None = found[1] and _ALIASES.get(found[1], found[1])
        return cls(name, None if found[2] is None else int(found[2]), found[3])

    def covers(self, operation: Operation, group_names: set[str]) -> bool:
        """Say whether an operation is of the kind that is counted."""
        if self.group is not None and self.group not in group_names:
            return False
        return self.name is None or self.name in operation.names

    def counts_parts(self, operation: Operation) -> bool:
        """Say whether each part of a call counts, or only the whole."""
        return self.name not in (None, _BATCH) and not operation.names & _OBJECTS
