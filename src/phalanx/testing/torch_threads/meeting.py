"""Where ranks wait for each other before they make a default group."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.errors import PeerFailed
from phalanx.types import Deadline

if TYPE_CHECKING:
    from phalanx.testing.torch_threads.ranks import RankState

_LOOK = 0.1  # seconds in which a rank that is to be stopped notices


class Meeting:
    """The meeting of one run's ranks.

    Who waits here learns of a rank that will not come; before there is a group, nothing else would
    tell.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._gone: dict[int, str] = {}
        self._arrived: dict[tuple[int, int], set[int]] = {}

    def leave(self, rank: int, reason: str) -> None:
        """Say that a rank will not come to further meetings, and why."""
        with self._changed:
            self._gone[rank] = reason
            self._changed.notify_all()

    def wait(self, rank: RankState, size: int, timeout: float) -> None:
        """Wait for `size` ranks to make a group; PeerFailed if there cannot be as many.

        Nothing is raised after the timeout: whoever makes the group says who is missing.
        """
        rank.num_meetings += 1
        deadline = Deadline(timeout)
        with self._changed:
            arrived = self._arrived.setdefault((size, rank.num_meetings), set())
            arrived.add(rank.rank)
            self._changed.notify_all()
            while len(arrived) < size and deadline.left() > 0:
                missing = set(range(self.size)) - arrived
                lost = sorted(missing & set(self._gone))
                if lost and len(arrived) + len(missing) - len(lost) < size:
                    raise PeerFailed(
                        f"init_process_group on rank {rank.rank}: "
                        f"rank {lost[0]} {self._gone[lost[0]]}"
                    )
                self._changed.wait(min(_LOOK, deadline.left()))
