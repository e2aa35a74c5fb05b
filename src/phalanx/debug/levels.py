"""How much the package says and records, as in torch.distributed: OFF, INFO or DETAIL."""

from __future__ import annotations

import enum
import logging
import os

from phalanx import logs

VARIABLES = ("PHALANX_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


class DebugLevel(enum.IntEnum):
    """How much is said.

    OFF: errors only. INFO: also log what happens to worlds and groups, and once per line that ranks
    bring equally many elements in different shapes. DETAIL: also refuse such shapes (if all ranks
    of the group are at this level), log every operation, look for NaN and Inf in inputs, refuse to
    touch tensors of operations that have not been waited for, and add to errors the Python stack,
    the checksum and the NaN count of every rank.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2

    __str__ = enum.Enum.__str__


_SHOWN = {DebugLevel.OFF: None, DebugLevel.INFO: logging.INFO, DebugLevel.DETAIL: logging.DEBUG}

_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    When first asked for, at the latest in ``init_process_group``, it is read from the environment.
    """
    global _level
    if _level is None:
        _level = _from_environment()
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process, also for groups that exist."""
    if not isinstance(level, DebugLevel):
        raise TypeError(f"set_debug_level needs a DebugLevel, got {level!r}")
    global _level
    _level = level
    from phalanx.debug import watch

    watch.level_changed()


def set_debug_level_from_env() -> None:
    """Set the debug level to PHALANX_DEBUG, else TORCH_DISTRIBUTED_DEBUG, else OFF.

    ValueError if that is none of OFF, INFO and DETAIL, in upper or lower case.
    """
    set_debug_level(_from_environment())


def forget_debug_level() -> None:
    """Let the level be read from the environment again, once somebody asks for it."""
    global _level
    _level = None


def _from_environment() -> DebugLevel:
    for variable in VARIABLES:
        if variable in os.environ:
            name = os.environ[variable].upper()
            if name not in DebugLevel.__members__:
                raise ValueError(f"The value of {variable} must be OFF, INFO, or DETAIL: {name!r}")
            return DebugLevel[name]
    return DebugLevel.OFF


def log_level() -> int | None:
    """Return from which level on log records are wanted, None if nobody asked for any."""
    return logs.requested(_SHOWN[get_debug_level()])
