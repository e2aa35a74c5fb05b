"""Warnings of ranks that are threads: each catches its own.

Python keeps what `warnings.catch_warnings` sets for the whole process, and `pytest.warns` stands on
it: ranks that enter and leave such blocks in any order would record each other's warnings, or
none. While there are thread worlds, a block that a rank records in gets what threads of this rank
warn of. Filters stay common: what ranks set in blocks holds for all until the last has left its.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from typing import Any, cast

from phalanx import forks
from phalanx.launch.identity import Member, here

_module: Any = warnings
_catch: Any = warnings.catch_warnings
_enter, _exit = _catch.__enter__, _catch.__exit__

_lock = threading.RLock()
forks.renew(sys.modules[__name__], "_lock", threading.RLock)
_logs: dict[Member, list[list[Any]]] = defaultdict(list)  # of each rank, the innermost last
_open: list[Any] = []  # blocks that ranks are in
_outside: tuple[Any, Any] = ([], None)  # filters and showwarning around all of them
_show: Any = None  # who shows what is not recorded


def begin() -> None:
    """Tell ranks apart from now on."""
    global _show
    if getattr(sys.flags, "context_aware_warnings", False):
        return  # Python does so itself
    _show, _module._showwarnmsg_impl = _module._showwarnmsg_impl, _show_or_record
    _catch.__enter__, _catch.__exit__ = _enter_as_rank, _exit_as_rank


def end() -> None:
    """Let Python do as it does."""
    _catch.__enter__, _catch.__exit__ = _enter, _exit
    if _module._showwarnmsg_impl is _show_or_record:
        _module._showwarnmsg_impl = _show
    with _lock:
        _logs.clear()
        if _open:
            _open.clear()
            _restore()


def _show_or_record(message: Any) -> None:
    rank = here.rank
    logs = _logs.get(rank) if rank is not None else None
    if logs:
        logs[-1].append(message)
    else:
        _show(message)


def _enter_as_rank(self: Any) -> list[Any] | None:
    global _outside
    rank = here.rank
    if rank is None or self._entered:
        return cast("list[Any] | None", _enter(self))
    self._entered = True
    self._rank, self._log = rank, [] if self._record else None
    with _lock:
        if not _open:
            _outside = _module.filters, _module.showwarning
            _module.filters = _module.filters[:]
        _open.append(self)
        _module._filters_mutated()
        if getattr(self, "_filter", None) is not None:
            warnings.simplefilter(*self._filter)
        if self._log is not None:
            _logs[rank].append(self._log)
            _module.showwarning = _module._showwarning_orig
    return cast("list[Any] | None", self._log)


def _exit_as_rank(self: Any, *exc_info: object) -> None:
    rank = getattr(self, "_rank", None)
    if rank is None:
        _exit(self, *exc_info)
        return
    with _lock:
        if self._log is not None:
            _logs[rank] = [log for log in _logs[rank] if log is not self._log]
        if self in _open:  # the block of a rank that was given up has been closed before
            _open.remove(self)
            if not _open:
                _restore()


def _restore() -> None:
    _module.filters, _module.showwarning = _outside
    _module._filters_mutated()
