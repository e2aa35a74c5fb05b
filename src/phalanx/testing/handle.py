"""What a test is told of the world that it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.groups import ProcessGroup
from phalanx.testing.injection import faults
from phalanx.world import resolve

Kind = Literal["threads", "processes"]


@dataclass(frozen=True)
class WorldHandle:
    """One rank's view of the world that a test runs in."""

    rank: int
    size: int
    ranks: Kind = "threads"

    @property
    def group(self) -> ProcessGroup:
        """The default group."""
        return resolve(None)

    faults = staticmethod(faults)
