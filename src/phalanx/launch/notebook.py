"""Programs that are typed cell by cell: whether this is one, and what is in its cells."""

from __future__ import annotations

import linecache
import os
import sys


def is_here() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


def labelling(label: bool | None) -> bool:
    """Decide whether what ranks print is labelled: if nobody says, then in notebooks."""
    return is_here() if label is None else label


def sources() -> dict[str, list[str]]:
    """Return the lines of the cells, by the names that tracebacks call them."""
    if not is_here():
        return {}
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }


def know(cells: dict[str, list[str]]) -> None:
    """Have tracebacks of this process, too, show the lines of cells."""
    for name, lines in cells.items():
        # Without a time of change: no file is looked for.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
