"""What this process keeps in the directory for temporary files, and what others have left there.

Who is killed cannot tidy up. So what is made there says whose it is: the process, by number and
start time, and where that number means something (this boot, this pid namespace). Whoever makes
something new first removes what is this user's and whose process is gone, once in its life. What
was made elsewhere, in a container with the same directory or before the machine was started, is
left alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from phalanx.process import Stat

_DIRECTORY = re.compile(r"phalanx-(?P<owner>[0-9a-f]{8}-\d+-\d+)-\w+")


@functools.cache
def place() -> str:
    """Name where process numbers mean the same processes as here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def owner() -> str:
    """Name this process, such that no other is ever named so."""
    pid = os.getpid()
    return f"{place()}-{pid}-{Stat(f'/proc/{pid}').start_time}"


def is_gone(name: str) -> bool:
    """Say whether an `owner` is known to have ended; what cannot be known counts as no."""
    where, pid, start = name.split("-")
    process = Stat(f"/proc/{pid}")
    return where == place() and not (process.alive and process.start_time == int(start))


def prefix() -> str:
    """Return how the name of a directory of this process begins; others are swept before that."""
    sweep()
    return f"phalanx-{owner()}-"


def new_directory(within: str | None = None) -> str:
    """Make a directory that only this user can enter, and return its path.

    `within` is a directory of this process.
    """
    try:
        return tempfile.mkdtemp(prefix=prefix() if within is None else "phalanx-", dir=within)
    except OSError as error:
        raise unusable(error) from None


def unusable(error: OSError) -> OSError:
    """Say what to do where something cannot be made in the directory for temporary files."""
    advice = "set TMPDIR to a directory with room that this user can write to"
    told = f"cannot keep temporary files: {error.strerror or error}; {advice}"
    return OSError(error.errno, told, error.filename)


@functools.cache
def sweep() -> None:
    """Remove directories whose owners are gone, the first time that this is called."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            found = _DIRECTORY.fullmatch(entry.name)
            if found and is_gone(found["owner"]) and _is_own_directory(entry):
                # Others may be at it, too: the name is never used again, so nothing else is hit.
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_own_directory(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def remove_if_left(path: Path, owner_of: re.Pattern[str]) -> None:
    """Remove a file if what is in it names an owner that is gone.

    Another process may just be putting a new file in its place, which must stay: so it is taken
    aside before it is looked at for good, and put back unless there is a newer one.
    """
    with suppress(OSError):
        if not _names_one_gone(path, owner_of):
            return
        aside = path.with_name(f"{path.name}.{owner()}")
        path.rename(aside)
        if not _names_one_gone(aside, owner_of):
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _names_one_gone(path: Path, owner_of: re.Pattern[str]) -> bool:
    found = owner_of.search(path.read_text(errors="replace"))
    return found is not None and is_gone(found["owner"])
