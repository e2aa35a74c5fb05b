"""What a reader needs to compare numbers with those of another machine."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

BUSY = 0.5  # a load from which on something else runs as well


def describe() -> dict[str, Any]:
    """Return the facts: processor, cores, memory, versions, and how busy it is."""
    import numpy as np
    import torch

    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": lines.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }
