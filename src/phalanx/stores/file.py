"""A store in a file."""

from __future__ import annotations

import os
import weakref

from phalanx import _native
from phalanx.stores.core import CoreStore


class FileStore(CoreStore):
    """Keep keys in a file that all ranks can reach, on one machine.

    The file is a log of changes that every user replays, under a lock that also the file system
    must support. It is made if it does not exist. With `world_size` given, the last of that many
    users to go removes it; with -1 it stays.
    """

    _core: _native.FileLog

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        self._path = os.fspath(file_name)
        self._world_size = world_size
        core = _native.FileLog(self._path, world_size)
        super().__init__(core)
        # Also at the end of the interpreter, which does not collect every object.
        self._finalizer = weakref.finalize(self, core.close)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._path

    def clone(self) -> FileStore:
        twin = FileStore(self._path, self._world_size)
        twin._seconds = self._seconds
        return twin

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, world_size={self._world_size})"
