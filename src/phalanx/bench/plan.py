"""What a run of ``phalanx bench`` measures, in which order. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.bench.operations import USUAL, Conditions, Operation


class Cell(NamedTuple):
    """What is measured at a time: an operation, a size, and the conditions."""

    operation: Operation
    num_bytes: int
    conditions: Conditions = USUAL


@dataclass(frozen=True)
class Effort:
    """How much is measured of each cell on each peer: for so many seconds, or so many calls."""

    seconds: float = 0.6  # over all rounds
    rounds: int = 3
    iterations: int | None = None  # over all rounds; rounded up to whole batches
    warmup: int | None = None


class Section(NamedTuple):
    """A table of its own: the sizes of one operation on so many ranks."""

    ranks: int
    operation: Operation
    conditions: Conditions
    sizes: list[int]

    def title(self, kind: str) -> str:
        words = [self.operation.name, f"{self.ranks} {kind if self.ranks != 1 else kind[:-1]}"]
        words += [self.conditions.dtype] if self.operation.sized else []
        words += [self.conditions.reduce_op] if self.operation.reduces else []
        words += ["async"] if self.conditions.asynchronous else []
        return ", ".join(words)

    def cells(self) -> Iterator[Cell]:
        for num_bytes in self.sizes:
            yield Cell(self.operation, num_bytes, self.conditions)


class Plan(NamedTuple):
    """The sections of a run, and why some of what was asked for is not among them."""

    sections: list[Section]
    notes: list[str]


def make(
    operations: list[Operation],
    sizes: list[int],
    ranks: list[int],
    dtypes: list[str],
    reduce_ops: list[str],
    *,
    asynchronous: bool = False,
    checked: bool = True,
) -> Plan:
    """Combine all that was asked for; what does not go together becomes a note."""
    sections: list[Section] = []
    left_out: dict[str, dict[str, None]] = {}
    for size in ranks:
        for operation in operations:
            if operation.pairwise and size != 2:
                left_out.setdefault(f"{operation.name} is between 2 ranks", {})[str(size)] = None
                continue
            for dtype in dtypes if operation.sized else dtypes[:1]:
                for reduce_op in reduce_ops if operation.reduces else ["sum"]:
                    if reduce_op == "avg" and "int" in dtype:
                        left_out.setdefault("avg needs floating-point elements", {})[dtype] = None
                        continue
                    conditions = Conditions(dtype, reduce_op, asynchronous, checked)
                    whole = _whole_elements(operation, sizes, size, conditions.item_bytes)
                    sections.append(Section(size, operation, conditions, whole))
    notes = [f"{why}: not measured with {', '.join(what)}" for why, what in left_out.items()]
    return Plan(sections, notes)


def _whole_elements(operation: Operation, sizes: list[int], ranks: int, item: int) -> list[int]:
    """Return the sizes that are really used: as many whole elements for each rank."""
    if not operation.sized:
        return [0]
    return list(dict.fromkeys(operation.count(size, ranks, item) * item for size in sizes))
