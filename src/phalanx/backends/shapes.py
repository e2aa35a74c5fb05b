"""Telling that ranks bring equally many elements in different shapes, which is no fault.

Above the debug level OFF it is logged. At DETAIL shapes must agree, as torch has it there.
"""

from __future__ import annotations

from phalanx import _native, logs

_log = logs.area("collectives")
_told: set[str] = set()  # the lines of the user's

DIFFER = "the ranks bring equally many elements in different shapes"
REFUSED = (
    f"{DIFFER}, which only debug level DETAIL refuses: give them one shape (tensor.view), or use "
    "INFO or OFF"
)


def tell(rank: int, site: str, what: str) -> None:
    """Log, once per line, what the ranks bring; ``rank`` is the global rank that tells."""
    if site not in _told:
        _told.add(site)
        _log.info("%s", what, extra={"rank": rank})


def forget() -> None:
    """Tell of every line again."""
    _told.clear()


_native.set_shapes_observer(tell)
