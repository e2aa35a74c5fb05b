"""What the states of hooks have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from phalanx import logs
from phalanx.parallel.buckets import GradBucket
from phalanx.world import group

log = logs.area("hooks")


class HookState:
    """Counts the iterations of a hook; pickles without its process groups.

    What was a group is the default group after loading, on every rank that has one.
    """

    __slots__: tuple[str, ...] = ()
    GROUPS: ClassVar[tuple[str, ...]]  # the slots that hold process groups

    iter: int

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count an iteration when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1  # type: ignore[misc]  # a slot of each subclass

    def __getstate__(self) -> dict[str, Any]:
        log.warning(
            "%s is saved without %s: a process group cannot be pickled",
            type(self).__name__,
            " and ".join(self.GROUPS),
        )
        return {name: getattr(self, name) for name in self.__slots__ if name not in self.GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in self.GROUPS:
            setattr(self, name, group.WORLD)
        for name, value in state.items():
            setattr(self, name, value)
        log.warning(
            "%s is loaded with the default process group as its %s: set it if it was another",
            type(self).__name__,
            " and ".join(self.GROUPS),
        )
