"""Patches of unittest.mock that a test is decorated with: made once, around all of its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@contextmanager
def made_once(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """Make the patches of a body; yield what is left to be called by each rank.

    Ranks that are threads would enter, and leave, the same patch at once: one of them would take
    another's patch for the original, and restore that.
    """
    mock: Any = sys.modules.get("unittest.mock")
    with ExitStack() as stack:
        while mock and _is_of(mock, body):
            held = [cell.cell_contents for cell in body.__closure__]
            if patch := next((each for each in held if isinstance(each, mock._patch_dict)), None):
                stack.enter_context(patch)
            else:
                patch = body.patchings[0]
                args, kwargs = stack.enter_context(patch.decoration_helper(body, args, kwargs))
            inner = body.__wrapped__
            body = inner.__get__(body.__self__) if hasattr(body, "__self__") else inner
        if mock and (name := _decorator_above(mock, body)):
            pytest.fail(
                f"mock.patch is below another decorator ({name}), so that each rank would patch "
                "what all share: put mock.patch above it, or patch in a fixture",
                pytrace=False,
            )
        yield body, args, kwargs


def _is_of(mock: Any, body: Any) -> bool:
    code = getattr(body, "__code__", None)
    return code is not None and code.co_filename == mock.__file__


def _decorator_above(mock: Any, body: Any) -> str:
    """Return which decorator hides a patch, "" if there is none."""
    name = ""
    while hasattr(body, "__wrapped__"):
        code = body.__code__
        name = str(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
        body = body.__wrapped__
        if _is_of(mock, body):
            return name
    return ""
