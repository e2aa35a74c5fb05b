"""What helps when a program hangs or fails: the flight recorder, levels, breakpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.debug.recorder import dump_flight_record, flight_record

__all__ = ["dump_flight_record", "flight_record"]


def __getattr__(name: str) -> Any:
    # The recorder needs torch, which those who look at jobs from outside do without.
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.debug' has no attribute {name!r}")
    from phalanx.debug import recorder

    return getattr(recorder, name)
