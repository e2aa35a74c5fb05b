"""Logging: a logger per area below ``phalanx``, and the rank in every record.

Records go to Python's ``logging`` and say their rank in ``record.rank`` (-1: no rank) and in their
text. Importing configures nothing. A debug level or ``TORCH_CPP_LOG_LEVEL`` asks for output; then
``init_process_group`` sets the level of the logger ``phalanx``, unless it has one, and adds a
handler that writes to stderr, unless its records reach one already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

_ROOT = logging.getLogger("phalanx")
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_TORCH_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_TORCH_LEVELS = {
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "0": logging.INFO,
    "1": logging.WARNING,
    "2": logging.ERROR,
    "3": logging.CRITICAL,
}

_rank_here: Callable[[], int] = lambda: -1  # noqa: E731

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """The logger of an area; ``extra={"rank": …}`` speaks for a rank that is not yet known."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        extra = kwargs.setdefault("extra", {})
        rank = extra.setdefault("rank", _rank_here())
        return f"[{f'rank {rank}' if rank >= 0 else 'no rank'}] {msg}", kwargs


def area(name: str) -> Log:
    """Return the logger ``phalanx.<name>``."""
    return Log(_ROOT.getChild(name), {})


def set_identity(rank: Callable[[], int]) -> None:
    """Say how to find the calling thread's rank."""
    global _rank_here
    _rank_here = rank


def requested(level: int | None) -> int | None:
    """Return from which level on records are wanted, if a debug level wants them from ``level`` on.

    ``TORCH_CPP_LOG_LEVEL`` can ask for records and, above INFO, hold back those below it. A value
    that torch cannot read does neither: torch says so when it is imported.
    """
    limit = _TORCH_LEVELS.get(os.environ.get(_TORCH_VARIABLE, "").strip().upper())
    if limit is None or level is None:
        return limit if level is None else level
    return max(level, limit) if limit > logging.INFO else level


_level_set: int | None = None
_handler: logging.Handler | None = None


def show(level: int | None) -> None:
    """Make records from ``level`` on visible, or withdraw what an earlier call has done."""
    global _level_set, _handler
    if _ROOT.level in (logging.NOTSET, _level_set):
        _level_set = level
        _ROOT.setLevel(logging.NOTSET if level is None else level)
    if level is None and _handler is not None:
        _ROOT.removeHandler(_handler)
        _handler = None
    elif level is not None and not _ROOT.hasHandlers():
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter(_FORMAT))
        _ROOT.addHandler(_handler)
