"""Tests that Hypothesis draws examples for: each is drawn once, and run on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from phalanx.launch.threads import run_threads
from phalanx.testing.plugin.arguments import of_ranks


class _OfEachRank:
    """Stands in an example that is shown for what each rank has its own of."""

    def __repr__(self) -> str:
        return "<of each rank>"


def run(item: pytest.Function, arguments: dict[str, Any], call: Callable[..., None]) -> None:
    """Run a test of Hypothesis; `call(body, ...)` runs its body on ranks with one example."""
    __tracebackhide__ = True
    handle = item.obj.hypothesis
    body = handle.inner_test

    @wraps(body)
    def on_ranks(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        call(body, args, kwargs, _in_context_of_caller())

    run_threads(lambda: None, 1)  # what only the first world takes is no part of an example
    handle.inner_test = on_ranks
    try:
        item.obj(**arguments, **dict.fromkeys(of_ranks(item), _OfEachRank()))
    finally:
        handle.inner_test = body


def _in_context_of_caller() -> Callable[[Any], Any]:
    """Have `assume`, `note` and the like work in other threads as they do in the calling one."""
    context = sys.modules["hypothesis.control"]._current_build_context
    outer = context.value

    def wrap(body: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(body)
        def within(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            with context.with_value(outer):
                return body(*args, **kwargs)

        return within

    return wrap
