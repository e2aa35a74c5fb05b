"""The processes below this one, and what becomes of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

from phalanx.process import Stat

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """Make what a process below this one leaves behind a child of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the processes below one, the nearest first, without those `spared` and below them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := Stat(f"/proc/{entry}")).alive:
            children.setdefault(stat.parent, []).append(int(entry))
    found = [pid]
    for each in found:
        found += (child for child in children.get(each, []) if child not in spared)
    return found[1:]


def has_children() -> bool:
    """Say whether this process has children, running or not yet waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def signal_below(pid: int, number: int, spared: Collection[int] = ()) -> bool:
    """Send a signal to all processes below one, and return whether there were any."""
    below = descendants(pid, spared)
    for each in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
    return bool(below)


def kill_below(pid: int, spared: Collection[int] = ()) -> None:
    """Kill all processes below one until there are none, and reap those that are ours."""
    while signal_below(pid, signal.SIGKILL, spared):
        time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, and now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
