"""What launchers say in the environment (RANK, WORLD_SIZE, ...), told to each thread rank.

Threads share `os.environ`. For these variables alone a rank reads and writes values of its own; in
the copy of the environment that a child process gets, they are the process's.
"""

from __future__ import annotations

import os
from typing import Any

from phalanx.testing.torch_threads.ranks import mine

_Environ: Any = type(os.environ)
_get, _set, _delete = _Environ.__getitem__, _Environ.__setitem__, _Environ.__delitem__
_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _own(environment: Any, name: str) -> dict[str, str] | None:
    """Return where the calling thread's rank keeps a variable, None if it shares it."""
    if name not in _NAMES or environment is not os.environ:
        return None
    rank = mine()
    return None if rank is None else rank.variables


def get_variable(environment: Any, name: str) -> str:
    """Return a variable of the environment, the rank's own if it has one."""
    own = _own(environment, name)
    found: str = _get(environment, name) if own is None else own[name]
    return found


def set_variable(environment: Any, name: str, value: str) -> None:
    """Set a variable of the environment, for the rank alone if it has its own."""
    own = _own(environment, name)
    if own is None:
        _set(environment, name, value)
    elif isinstance(value, str):
        own[name] = value
    else:
        raise TypeError(f"str expected, not {type(value).__name__}")


def delete_variable(environment: Any, name: str) -> None:
    """Delete a variable of the environment, for the rank alone if it has its own."""
    own = _own(environment, name)
    if own is None:
        _delete(environment, name)
    else:
        del own[name]


PATCHES = [
    (_Environ, "__getitem__", get_variable),
    (_Environ, "__setitem__", set_variable),
    (_Environ, "__delitem__", delete_variable),
]
