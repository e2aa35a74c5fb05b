"""Which cores the ranks of a job run on, and how many threads each of them may use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from phalanx.machine import Core, Machine, spell_cpus

THREADS_VARIABLE = "OMP_NUM_THREADS"
PINS = ("auto", "cores", "numa", "none")


@dataclass(frozen=True)
class Placement:
    """Where ranks run: for each its CPUs (None: wherever this process may), and its threads."""

    cpus: list[list[int] | None]
    threads: int | None  # None: the user has decided
    why: str  # a few words on pinning

    def describe(self, environment: Mapping[str, str]) -> str:
        """Say in one line what was chosen."""
        threads = self.threads if self.threads is not None else environment[THREADS_VARIABLE]
        origin = "" if self.threads is not None else " (as set)"
        return f"{THREADS_VARIABLE}={threads}{origin}, {self.why}"


def usable_cores(machine: Machine) -> int:
    """Return how many ranks can run at once: physical cores, or fewer if there is a quota."""
    quota = machine.cpu_quota()
    cores = len(machine.cores())
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def place(size: int, machine: Machine, environment: Mapping[str, str], pin: str) -> Placement:
    """Share the cores of this machine between `size` ranks.

    Each gets neighbouring cores, as many as any other, and all of them are given out. Nobody is
    pinned where that would do harm: with more ranks than cores, or where a quota of CPU time lets
    the job use only a part of the cores it may run on, which the scheduler shares out better.
    """
    cores = machine.cores()
    usable = usable_cores(machine)
    threads = None if environment.get(THREADS_VARIABLE) else max(1, usable // size)
    free: list[list[int] | None] = [None] * size
    if pin == "none":
        return Placement(free, threads, "not pinned (as asked)")
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    if pin == "numa" or (pin == "auto" and len(nodes) > 1 and (size > usable or size < len(nodes))):
        if size < len(nodes):
            return Placement(free, threads, f"not pinned ({len(nodes)} memory nodes)")
        return _on_nodes(size, list(nodes.values()), threads)
    if size > len(cores):
        return Placement(free, threads, f"not pinned (more ranks than cores: {len(cores)})")
    if pin == "auto" and usable < len(cores):
        return Placement(free, threads, f"not pinned (a quota of {usable} of {len(cores)} cores)")
    return _on_cores(size, cores, threads)


def _on_cores(size: int, cores: list[Core], threads: int | None) -> Placement:
    bounds = [len(cores) * rank // size for rank in range(size + 1)]
    shares = [
        [cpu for core in cores[first:last] for cpu in core.cpus] for first, last in pairwise(bounds)
    ]
    return Placement([*shares], threads, "pinned to cpus " + _spell(shares))


def _on_nodes(size: int, nodes: list[list[Core]], threads: int | None) -> Placement:
    shares = []
    for rank in range(size):
        node = nodes[rank * len(nodes) // size]
        shares.append([cpu for core in node for cpu in core.cpus])
    return Placement([*shares], threads, "pinned to memory nodes: cpus " + _spell(shares))


def _spell(shares: list[list[int]]) -> str:
    shown = [spell_cpus(share) for share in shares]
    if len(shown) > 8:
        shown = [*shown[:4], "...", shown[-1]]
    return " | ".join(shown)
