"""Where in the user's program a call was made."""

from __future__ import annotations

import os
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def user_site(frame: FrameType | None) -> str:
    """Name the innermost line outside this package: "train.py:88 in step"."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "?"
    code = frame.f_code
    text = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
    return text if code.co_name == "<module>" else f"{text} in {code.co_name}"
