"""The cases of a series, each made from the seed of the series and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from trials.faults import Fault, inject
from trials.programs import Program, right_program, wild_program
from trials.verdicts import Trial, try_program


@dataclass(frozen=True)
class Case:
    """One program, on one kind of ranks, perhaps with a fault."""

    program: Program
    ranks: str
    injected: Fault | None = None

    @property
    def fault(self) -> str:
        return "none" if self.injected is None else self.injected.kind

    @property
    def title(self) -> str:
        where = f"{self.program.size} {self.ranks}"
        return where if self.injected is None else f"{self.injected}, of {where}"

    def run(self) -> Trial:
        culprit = None if self.injected is None else self.injected.rank
        return try_program(self.program, self.ranks, culprit, self.fault == "kill_later")


def _ranks(rng: random.Random, ranks: str) -> str:
    draw = rng.random()  # always drawn, so that the program does not depend on the choice
    return ranks if ranks != "both" else ("processes" if draw < 0.2 else "threads")


def fault_case(seed: int, number: int, ranks: str) -> Case:
    """Return a right program with one fault in it."""
    rng = random.Random(f"fault {seed} {number}")
    kind = _ranks(rng, ranks)
    program, fault = inject(rng, right_program(rng), kind == "processes")
    return Case(program, kind, fault)


def right_case(seed: int, number: int, ranks: str) -> Case:
    """Return a right program."""
    rng = random.Random(f"right {seed} {number}")
    kind = _ranks(rng, ranks)
    return Case(right_program(rng), kind)


def deadlock_case(seed: int, number: int, ranks: str) -> Case:
    """Return a program that may get stuck."""
    rng = random.Random(f"deadlock {seed} {number}")
    kind = _ranks(rng, ranks)
    return Case(wild_program(rng), kind)
