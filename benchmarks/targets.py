"""The speed this project asks of itself, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .operations import OPERATIONS
from .results import Results, readable_bytes

KIB, MIB = 1 << 10, 1 << 20


class Verdict(NamedTuple):
    """How a target fared: its worst cell, and how many cells there were."""

    ratio: float
    where: str
    num_cells: int


class Target(NamedTuple):
    """At least `at_least` times the speed of `other`, in every cell that `covers` picks."""

    what: str
    ours: str
    other: str
    title: str
    at_least: float
    operations: tuple[str, ...]
    ranks: tuple[int, ...] = (2,)
    covers: Callable[[int], bool] = lambda num_bytes: True
    kind: str = "processes"

    @property
    def rule(self) -> str:
        return f"{self.at_least:g}x {self.title}"

    def verdict(self, results: Results) -> Verdict | None:
        """Return the lowest ratio, None if no cell was measured.

        A cell where Phalanx failed has the ratio 0; one where only the other did is left out.
        """
        found = []
        for kind, ranks, operation in results.groups():
            if kind != self.kind or ranks not in self.ranks or operation not in self.operations:
                continue
            for num_bytes in filter(self.covers, results.sizes(kind, ranks, operation)):
                cell = (kind, ranks, operation, num_bytes)
                ours = results.get(*cell, self.ours)
                ratio = results.ratio(*cell, self.ours, self.other)
                if ours and ours["error"]:
                    ratio = 0.0
                if ratio is not None:
                    size = f" {readable_bytes(num_bytes)}" if num_bytes else ""
                    found.append((ratio, f"{operation}{size}, {ranks} {kind}"))
        return Verdict(*min(found), len(found)) if found else None


def small(num_bytes: int) -> bool:
    return num_bytes <= 64 * KIB


def large(num_bytes: int) -> bool:
    return num_bytes >= MIB


ALL_REDUCE = ("all_reduce",)
OTHERS = tuple(name for name in OPERATIONS if name != "all_reduce")
EVERY = tuple(OPERATIONS)

TARGETS = [
    Target("all_reduce, 8 B - 64 KiB", "phalanx", "gloo", "Gloo", 50, ALL_REDUCE, covers=small),
    Target(
        "all_reduce, 8 B", "phalanx", "mpi", "MPI", 0.5, ALL_REDUCE, covers=lambda size: size == 8
    ),
    Target("all_reduce, 1 - 256 MiB", "phalanx", "gloo", "Gloo", 4, ALL_REDUCE, covers=large),
    Target("all_reduce, 1 - 256 MiB", "phalanx", "mpi", "MPI", 1.5, ALL_REDUCE, covers=large),
    Target(
        "all_reduce of shared tensors, 1 - 256 MiB",
        "phalanx-shared",
        "gloo",
        "Gloo",
        10,
        ALL_REDUCE,
        covers=large,
    ),
    Target(
        "all_reduce of shared tensors, 1 - 256 MiB",
        "phalanx-shared",
        "bare",
        "a bare two-thread add",
        0.7,
        ALL_REDUCE,
        covers=large,
    ),
    Target("every other operation, every size", "phalanx", "gloo", "Gloo", 4, OTHERS),
    Target("every other operation, every size", "phalanx", "mpi", "MPI", 1, OTHERS),
    Target("4 and 8 ranks, every operation", "phalanx", "gloo", "Gloo", 3, EVERY, ranks=(4, 8)),
    Target(
        "all_reduce of 4, 16, 64 threads",
        "phalanx-threads",
        "threadedpg",
        "ThreadedPG",
        5,
        ALL_REDUCE,
        ranks=(4, 16, 64),
        kind="threads",
    ),
]
