"""The numbers of one run, and the questions that tables, plots and targets ask of them."""

from __future__ import annotations

import re
from typing import Any

TITLES = {"mpi": "MPI"}
MPI = ("openmpi", "mpich")
Group = tuple[str, int, str]  # kind and number of ranks, operation
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Results:
    """Results by cell. The peer "mpi" stands for the fastest MPI measured in a cell."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = data["results"]
        self.names: dict[str, dict[str, Any]] = data["peers"]
        self._by_cell = {
            (one["kind"], one["ranks"], one["operation"], one["bytes"], one["peer"]): one
            for one in self.rows
        }

    def title(self, peer: str) -> str:
        return TITLES.get(peer) or self.names[peer]["title"]

    def has(self, kind: str, peer: str) -> bool:
        wanted = MPI if peer == "mpi" else (peer,)
        return any(name in self.names and self.names[name]["kind"] == kind for name in wanted)

    def groups(self) -> list[Group]:
        return list(
            dict.fromkeys((one["kind"], one["ranks"], one["operation"]) for one in self.rows)
        )

    def sizes(self, kind: str, ranks: int, operation: str) -> list[int]:
        wanted = (kind, ranks, operation)
        return sorted({cell[3] for cell in self._by_cell if cell[:3] == wanted})

    def peers_of(self, kind: str, ranks: int, operation: str) -> list[str]:
        wanted = (kind, ranks, operation)
        return list(dict.fromkeys(cell[4] for cell in self._by_cell if cell[:3] == wanted))

    def get(
        self, kind: str, ranks: int, operation: str, num_bytes: int, peer: str
    ) -> dict[str, Any] | None:
        return self._by_cell.get((kind, ranks, operation, num_bytes, peer))

    def p50(self, kind: str, ranks: int, operation: str, num_bytes: int, peer: str) -> float | None:
        """Return the seconds of a call, None where it was not measured."""
        found = [
            result["p50"]
            for name in (MPI if peer == "mpi" else (peer,))
            if (result := self.get(kind, ranks, operation, num_bytes, name)) and not result["error"]
        ]
        return min(found, default=None)

    def ratio(
        self, kind: str, ranks: int, operation: str, num_bytes: int, ours: str, other: str
    ) -> float | None:
        """Return how many times faster `ours` is than `other`."""
        mine = self.p50(kind, ranks, operation, num_bytes, ours)
        theirs = self.p50(kind, ranks, operation, num_bytes, other)
        return None if mine is None or theirs is None else theirs / mine


def parse_bytes(text: str) -> int:
    """Read a size such as 8, 64K or 1M (powers of 1024)."""
    if not (match := re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)):
        raise ValueError(f"not a size: {text!r} (such as 8, 64K or 1M)")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(text: str, factor: int = 2) -> list[int]:
    """Read sizes such as 8,64K or 8:64M (each `factor` times the one before) or 8:64M:4."""
    sizes: list[int] = []
    for word in filter(None, text.split(",")):
        first, *further = word.split(":")
        if len(further) > 2:
            raise ValueError(f"not a range of sizes: {word!r} (such as 8:64M, or 8:64M:4)")
        largest = parse_bytes(further[0]) if further else parse_bytes(first)
        sizes += size_range(
            parse_bytes(first), largest, int(further[1]) if len(further) > 1 else factor
        )
    return list(dict.fromkeys(sizes))


def size_range(smallest: int, largest: int, factor: int) -> list[int]:
    """Return sizes up to `largest`, each `factor` times the one before."""
    if smallest < 1:
        raise ValueError(f"a size is at least one element, got {smallest} B")
    if smallest > largest:
        raise ValueError(
            f"sizes go from a smaller to a larger one, got {smallest} B to {largest} B"
        )
    if factor < 2:
        raise ValueError(f"the factor between sizes is at least 2, got {factor}")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def readable_bytes(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
        if count >= 10 * factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def readable_seconds(seconds: float) -> str:
    """Write a time with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor or unit == "µs":
            value = seconds / factor
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def readable_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"
