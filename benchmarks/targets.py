"""The speed this project asks of itself, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from phalanx.bench.operations import OPERATIONS
from phalanx.bench.results import Results, readable_bytes, readable_ratio

from .documents import Table

KIB, MIB = 1 << 10, 1 << 20


class Verdict(NamedTuple):
    """How a target fared: its worst cell, and how many cells there were."""

    ratio: float
    where: str
    num_cells: int


def worst(found: Iterable[tuple[float, str]]) -> Verdict | None:
    """Judge ratios with the cells they are from; None if there are none."""
    cells = list(found)
    return Verdict(*min(cells), len(cells)) if cells else None


class Judged(Protocol):
    """What a table of targets needs of each."""

    @property
    def what(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def at_least(self) -> float: ...
    def verdict(self, results: Any) -> Verdict | None: ...


def target_table(targets: Iterable[Judged], results: Any) -> Table:
    """Return the project's own targets, each with the worst ratio over its cells."""
    rows = []
    for target in targets:
        verdict = target.verdict(results)
        if verdict is None:
            rows.append([target.what, target.rule, "not measured", "", "0", ""])
            continue
        ratio, where, num_cells = verdict
        outcome = "met" if ratio >= target.at_least else "missed"
        rows.append(
            [target.what, target.rule, readable_ratio(ratio), where, str(num_cells), outcome]
        )
    heading = ["what", "at least", "worst measured", "where", "cells", "outcome"]
    return "Targets", heading, rows


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
        return worst(found)


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
