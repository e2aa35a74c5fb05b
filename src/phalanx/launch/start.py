"""Starting the keeper of a job: what a launcher does first, since there may be torch to import.

This imports little. What else the launcher needs is loaded while the keeper is at it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.launch.descendants import descendants

STREAMS = ("stdout", "stderr", "report")


class Started(NamedTuple):
    """A keeper that waits for its order."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    readers: list[list[int]]  # for each rank and each of STREAMS, our end of a pipe
    writers: list[list[int]]  # and the keeper's, which is closed here
    spared: list[int]  # processes that a shell left to this one when it became it: not the job's


def start(
    size: int, preload: Sequence[str], environment: Mapping[str, str], words: Sequence[str]
) -> Started:
    """Start a keeper that imports modules and then waits for the order to start ranks.

    The environment holds for what it imports; `words` are for those who list processes.
    """
    spared = descendants(os.getpid())
    ours, theirs = socket.socketpair()
    pipes = [[os.pipe() for _ in STREAMS] for _ in range(size)]
    readers = [[reader for reader, _ in each] for each in pipes]
    writers = [[writer for _, writer in each] for each in pipes]
    process = subprocess.Popen(
        command(theirs.fileno(), preload, words),
        pass_fds=[theirs.fileno(), *(writer for each in writers for writer in each)],
        env=environment,
    )
    for each in writers:
        for writer in each:
            os.close(writer)
    theirs.close()
    return Started(process, ours, readers, writers, spared)


def command(
    descriptor: int, preload: Sequence[str], words: Sequence[str], told: int = -1
) -> list[str]:
    """Return how a keeper is started.

    It does not look for modules in this directory: a file there might hide one it needs.
    """
    source = (
        "import sys; getattr(sys.flags, 'safe_path', 0) or sys.path.pop(0); "
        f"from phalanx.launch.keeper import main; main({descriptor}, {list(preload)}, {told})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", source, *words]
