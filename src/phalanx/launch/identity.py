"""Which rank of a thread world the calling thread belongs to."""

from __future__ import annotations

import threading
from typing import Protocol

from phalanx import forks


class Member(Protocol):
    """A rank of a thread world, as its threads know it."""

    rank: int
    outer: Member | None  # the rank that started this one's world, if one did


class _Here(threading.local):
    rank: Member | None = None


here = _Here()


@forks.after_fork_in_child
def _be_nobody() -> None:
    here.rank = None


def ancestry(member: Member | None) -> list[Member]:
    """Return a rank and those that its world, and theirs, were started by, the innermost first."""
    found = []
    while member is not None:
        found.append(member)
        member = member.outer
    return found
