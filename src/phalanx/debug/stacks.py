"""Python stacks of other processes, read by py-spy without stopping them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from phalanx.debug.outside import Rank

INSTALL = 'pip install "phalanx[why]"'
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class NoStacks(Exception):
    """Says why there are none, and what would help."""


def stack_of(rank: Rank, threads: bool) -> list[str]:
    """Return the stack of a rank, innermost call first, with a heading for each thread.

    Of a rank that is a process also its other threads that are at work.
    """
    found = _dump(rank.pid)
    mine = [thread for thread in found if thread["os_thread_id"] == rank.thread]
    others = [thread for thread in found if thread["active"] and thread not in mine]
    if threads:
        others = []
    lines = []
    for thread in mine + others:
        lines.append(f"thread {thread['thread_name']} ({'active' if thread['active'] else 'idle'})")
        lines += (
            f"  {frame['short_filename'] or frame['filename']}:{frame['line']} in {frame['name']}"
            for frame in _own(thread["frames"])
        )
    if not lines:
        raise NoStacks(f"py-spy sees no Python thread of rank {rank.rank} in process {rank.pid}")
    return lines


def _own(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what has started the program: our launchers, and Python's helpers around them."""
    around = list(takewhile(_starts_programs, (frame["filename"] for frame in reversed(frames))))
    return frames[: -len(around)] or frames if any(map(_is_launcher, around)) else frames


def _is_launcher(file: str) -> bool:
    return PurePath(file).parts[-3:-1] == ("phalanx", "launch")


def _starts_programs(file: str) -> bool:
    folder, name = PurePath(file).parent.name, PurePath(file).name
    return (
        _is_launcher(file)
        or folder == "multiprocessing"
        or name in ("<string>", "<frozen runpy>", "runpy.py", "threading.py")
    )


def _program() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise NoStacks(f"to see Python stacks: {INSTALL}")
    return found


def _dump(pid: int) -> list[dict[str, Any]]:
    command = [_program(), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    failure = ""
    # Read while it runs, a stack can be torn: then the next look may be luckier.
    for _ in range(3):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            raise NoStacks(f"py-spy did not answer about process {pid}") from None
        if done.returncode == 0:
            threads: list[dict[str, Any]] = json.loads(done.stdout)
            return threads
        failure = done.stderr
        if "ermission" in failure or "not permitted" in failure:
            raise NoStacks(_forbidden(pid))
    facts = [line for line in failure.splitlines() if line.strip()]
    raise NoStacks(f"py-spy failed on process {pid}: {facts[0] if facts else 'no reason given'}")


def _forbidden(pid: int) -> str:
    try:
        scope = f" ({_SCOPE} is {_SCOPE.read_text().strip()})"
    except OSError:
        scope = ""
    return (
        f"py-spy may not read process {pid}: ptrace is forbidden here{scope}; run this as root, "
        "set kernel.yama.ptrace_scope=0, or give the container SYS_PTRACE"
    )
