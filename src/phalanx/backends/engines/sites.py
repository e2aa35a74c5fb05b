"""Which line of the user's a call comes from."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
import typing_extensions

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARY = os.path.dirname(os.__file__)  # which runs threads and leaves `with` blocks
_INNER = (
    _PACKAGE + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    typing_extensions.__file__,  # which decorates what torch calls deprecated
)


def here() -> str:
    """Name the innermost line on the stack that is the user's; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INNER) and os.path.dirname(name) != _LIBRARY:
            function = frame.f_code.co_name
            line = f"{os.path.basename(name)}:{frame.f_lineno}"
            return line if function == "<module>" else f"{line} in {function}"
        frame = frame.f_back
    return ""
