"""Which ranks of a group are on which host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank is."""

    host: int  # index of its host
    seat: int  # its number among the group's ranks there


class Topology:
    """The ranks of a group by host, as one of them sees it. All ranks here are group ranks.

    ``labels`` has one entry per rank, equal for ranks of one host. Hosts are numbered in the order
    of their first ranks, and the ranks of a host keep their order.
    """

    def __init__(self, labels: Sequence[object], rank: int) -> None:
        members: dict[object, list[int]] = {}
        for each, label in enumerate(labels):
            members.setdefault(label, []).append(each)
        self.hosts = list(members.values())
        index = {label: number for number, label in enumerate(members)}
        self.places = [
            Place(index[label], members[label].index(each)) for each, label in enumerate(labels)
        ]
        self.rank = rank
        self.host, self.seat = self.places[rank]
        self.mine = self.hosts[self.host]
        # Each slice of a large tensor is led by one rank of every host.
        self.num_slices = min(len(host) for host in self.hosts)

    def peers(self, seat: int) -> list[int]:
        """Return the ranks that lead slice ``seat``, one per host, in the order of the hosts."""
        return [host[seat] for host in self.hosts]

    def is_local(self, rank: int) -> bool:
        """Say whether a rank is on this rank's host."""
        return self.places[rank].host == self.host

    def counterpart(self, rank: int, host: int) -> int:
        """Return who looks after ``rank`` on a host: itself on its own."""
        members = self.hosts[host]
        return members[self.places[rank].seat % len(members)]
