"""How the ranks of a job on one machine meet when nobody gave them an address.

Rank 0 runs a store on a free port and writes its address, with a token made for the occasion, to
a file in a directory that only this user can enter. The file's name is a hash of what the ranks of
one job share and no other job has (see `rendezvous`). The last rank to arrive removes it.

A file that a killed job left behind does no harm: whoever reads it finds no server that knows its
secret, and looks again until rank 0 of the living job has replaced it. Rank 0 of the next job, of
whichever, removes it: the file says whose it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from phalanx import leftovers
from phalanx.errors import DistNetworkError, DistStoreError, StoreTimeout
from phalanx.stores import TCPStore, secret

# A server on this machine that is alive answers within this time.
_CONNECT_SECONDS = 5.0
_HOST = "127.0.0.1"
_REFUSED_SECONDS = 5.0  # for rank 0 to replace an address at which another job answers
_OWNER = re.compile(r'"owner": "(?P<owner>[0-9a-f]{8}-\d+-\d+)"')


def private_directory() -> Path:
    """Return this user's directory for meetings, made if need be; refuse one open to others."""
    try:
        path = Path(tempfile.gettempdir(), f"phalanx-{os.geteuid()}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise DistStoreError(f"ranks cannot meet: {leftovers.unusable(error)}") from None
    status = path.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise DistStoreError(
            f"'{path}' must be a directory that this user owns and nobody else can enter, but it "
            f"is {stat.filemode(status.st_mode)} of user {status.st_uid}; remove it, or set TMPDIR"
        )
    return path


def meet(identity: tuple[str, ...], rank: int, world_size: int, timeout: float) -> TCPStore:
    """Return a store that all ranks of the job `identity` share; rank 0 runs its server."""
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    path = private_directory() / name
    store = _host(path, timeout) if rank == 0 else _find(path, identity, timeout)
    if store.add("arrived", 1) == world_size:
        path.unlink(missing_ok=True)
    return store


def _host(path: Path, timeout: float) -> TCPStore:
    token = secret.token()
    mixed = secret.mixed(token)
    store = TCPStore(_HOST, 0, is_master=True, timeout=timeout, secret=mixed)
    _sweep(path.parent)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"port": store.port, "token": token, "owner": leftovers.owner()}, file)
        draft.replace(path)  # at once: nobody reads half of it
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DistStoreError(
            f"rank 0 cannot write '{path}' to be found by the others: {error}"
        ) from error
    return store


@functools.cache
def _sweep(directory: Path) -> None:
    """Remove what killed jobs have left in the directory, the first time that this is called."""
    leftovers.sweep()
    for path in directory.iterdir():
        if path.is_file() and not path.is_symlink():
            leftovers.remove_if_left(path, _OWNER)


def _find(path: Path, identity: tuple[str, ...], timeout: float) -> TCPStore:
    deadline = time.monotonic() + timeout
    tried = found = ""
    retry = math.inf  # when to ask once more where this process was refused
    pause = 0.001
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            found = path.read_text()
        if found != tried or time.monotonic() > retry:
            is_second = found == tried
            tried, retry = found, math.inf
            address = json.loads(found)
            try:
                store = TCPStore(
                    _HOST,
                    address["port"],
                    timeout=_CONNECT_SECONDS,
                    secret=secret.mixed(address["token"]),
                )
            except DistNetworkError as error:
                if secret.is_about_secrets(error):
                    if is_second:
                        raise
                    retry = time.monotonic() + _REFUSED_SECONDS
            else:
                store.set_timeout(timeout)
                return store
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 0.05)
    raise StoreTimeout(
        f"rank 0 of the job ({' '.join(identity)}) did not show up in '{path.parent}' within "
        f"{timeout:g} s; look at its output first: it must run on this machine, as this user"
    )
