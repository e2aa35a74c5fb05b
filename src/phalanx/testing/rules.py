"""How a conformance kit says which of its rules has been broken."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any


def broken(rule: Callable[..., Any], error: BaseException, who: str) -> AssertionError:
    """Return an error that names the rule, who has broken it, and the line that found out."""
    law = " ".join((rule.__doc__ or rule.__name__).split())
    lines = traceback.extract_tb(error.__traceback__)
    line = next((line for line in reversed(lines) if line.name == rule.__name__), lines[-1])
    said = f": {error}" if str(error) else ""
    return AssertionError(
        f"{rule.__name__}, {who}, broke the rule: {law}\n"
        f"  {type(error).__name__}{said}\n"
        f"  found by line {line.lineno} of {os.path.basename(line.filename)}: {line.line}"
    )
