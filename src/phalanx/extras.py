"""Packages that only some parts need: installed with ``pip install "phalanx[EXTRA]"``."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ImportError):
    """Says which package is missing, for what, and how to install it."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a module that an extra brings, or say how to install it.

    `purpose` completes "... needs": "a plot", "phalanx top".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {module.partition('.')[0]}: {install(extra)}", name=module
        ) from error


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "phalanx[{extra}]"'
