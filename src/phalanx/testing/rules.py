"""How a conformance kit says which of its rules has been broken."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


def law(rule: Callable[..., Any]) -> str:
    """Return what a rule demands."""
    return " ".join((rule.__doc__ or rule.__name__).split())


def stack_of(thread: threading.Thread) -> str:
    """Return the innermost frames of a thread that runs, as Python prints them."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-6:]).rstrip() if frame is not None else ""


def broken(rule: Callable[..., Any], error: BaseException, who: str) -> AssertionError:
    """Return an error that names the rule, who has broken it, and the line that found out."""
    lines = traceback.extract_tb(error.__traceback__)
    line = next((line for line in reversed(lines) if line.name == rule.__name__), lines[-1])
    said = f": {error}" if str(error) else ""
    return AssertionError(
        f"{rule.__name__}, {who}, broke the rule: {law(rule)}\n"
        f"  {type(error).__name__}{said}\n"
        f"  found by line {line.lineno} of {os.path.basename(line.filename)}: {line.line}"
    )
