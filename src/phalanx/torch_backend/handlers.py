"""What torch's debug server, `torch.distributed.debug`, can ask a rank about Phalanx."""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

from phalanx.debug import flight_record
from phalanx.torch_backend.theirs import c10d
from phalanx_autoload import NAME


@functools.cache
def register() -> None:
    """Let the server answer requests for ``phalanx_flight_record``."""
    # Torch lets go of it after the interpreter has ended, when it cannot be freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_flight_record))
    c10d._register_handler(f"{NAME}_flight_record", _flight_record)


def _flight_record(_: Any, response: Any) -> None:
    response.set_content(json.dumps(flight_record()), "application/json")
    response.set_status(200)
