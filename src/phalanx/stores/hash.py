"""A store in the memory of one process."""

from __future__ import annotations

from phalanx import _native
from phalanx.stores.core import CoreStore


class HashStore(CoreStore):
    """Keep keys in this process, for ranks that are threads."""

    def __init__(self) -> None:
        super().__init__(_native.Table())

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._core = self._core
        twin._seconds = self._seconds
        return twin
