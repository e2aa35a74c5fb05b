"""The cases of a series, each made from the seed of the series and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from trials.faults import Fault, inject
from trials.programs import Program, frosty, right_program, wild_program
from trials.verdicts import Trial, try_program


@dataclass(frozen=True)
class Case:
    """One program, on one kind of ranks, perhaps with a fault."""

    program: Program
    ranks: str
    replay: str  # the command that runs it alone
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


def _ranks(number: int, ranks: str) -> str:
    return ranks if ranks != "both" else ("processes" if number % 5 == 4 else "threads")


def _replay(seed: int, number: int, ranks: str, series: str = "") -> str:
    words = ["scripts/fuzz_faults", series, f"--seed {seed} --ranks {ranks} --only {number}"]
    return " ".join(word for word in words if word)


def fault_case(seed: int, number: int, ranks: str) -> Case:
    """Return a right program with one fault in it."""
    rng = random.Random(f"fault {seed} {number}")
    kind = _ranks(number, ranks)
    program, fault = inject(rng, right_program(rng), kind == "processes")
    return Case(program, kind, _replay(seed, number, ranks), fault)


def right_case(seed: int, number: int, ranks: str) -> Case:
    """Return a right program."""
    rng = random.Random(f"right {seed} {number}")
    kind = _ranks(number, ranks)
    program = right_program(rng)
    if kind == "processes":
        program = frosty(rng, program)
    return Case(program, kind, _replay(seed, number, ranks, "--right"))


def deadlock_case(seed: int, number: int, ranks: str) -> Case:
    """Return a program that may get stuck."""
    rng = random.Random(f"deadlock {seed} {number}")
    kind = _ranks(number, ranks)
    program = wild_program(rng)
    if kind == "processes":
        program = frosty(rng, program)
    return Case(program, kind, _replay(seed, number, ranks, "--deadlocks"))
