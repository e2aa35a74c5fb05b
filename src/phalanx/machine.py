"""What this machine gives to a job: cores, where they are, and the limits of its control group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Core:
    """A physical core, and those of its hardware threads that this process may run on."""

    node: int  # of memory (NUMA)
    package: int
    number: int
    cpus: tuple[int, ...]


class Machine:
    """Read-only facts about a machine, read from /proc and /sys below `root` when asked for."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._root = Path(root)

    def cores(self, allowed: set[int] | None = None) -> list[Core]:
        """Return the cores of the CPUs `allowed` (by default this process'), near ones together."""
        if allowed is None:
            allowed = os.sched_getaffinity(0)
        nodes = {cpu: node for node, cpus in self.nodes().items() for cpu in cpus}
        places: dict[tuple[int, int, int], list[int]] = {}
        for cpu in sorted(allowed):
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            package = self._number(f"{topology}/physical_package_id", 0)
            core = self._number(f"{topology}/core_id", cpu)
            places.setdefault((nodes.get(cpu, 0), package, core), []).append(cpu)
        return [Core(*place, tuple(cpus)) for place, cpus in sorted(places.items())]

    def nodes(self) -> dict[int, list[int]]:
        """Return the CPUs of each memory node."""
        found = {}
        with contextlib.suppress(OSError):
            for path in (self._root / "sys/devices/system/node").glob("node[0-9]*"):
                found[int(path.name[4:])] = parse_cpus(self._text(path / "cpulist"))
        return found

    def cpu_quota(self) -> float | None:
        """Return how many CPUs' worth of time the control group may use; None if it is free."""
        quotas = []
        for directory in self.groups("cpu"):
            quota, period = (*self._text(directory / "cpu.max").split(), "", "")[:2]
            if not quota:
                quota = self._text(directory / "cpu.cfs_quota_us")
                period = self._text(directory / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)

    def memory_limit(self) -> int | None:
        """Return how many bytes the control group may use; None if there is no limit."""
        limits = []
        for directory in self.groups("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = self._text(directory / name)
                # Without a limit, version 1 says the largest number of pages that it can.
                if text.isdigit() and int(text) < 1 << 60:
                    limits.append(int(text))
        return min(limits, default=None)

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed for want of memory.

        Counted in this process' control group, or on the whole machine if that is not told.
        """
        for directory in self.groups("memory"):
            for name in ("memory.events", "memory.oom_control"):
                count = _field(self._text(directory / name), "oom_kill")
                if count is not None:
                    return count
        return _field(self._text(self._root / "proc/vmstat"), "oom_kill") or 0

    def groups(self, controller: str) -> Iterator[Path]:
        """Yield the directories of this process' control group for a controller, innermost first.

        In a container the path of the group may be the host's: then the root of the mount is ours.
        """
        mount = self._root / "sys/fs/cgroup"
        for line in self._text(self._root / "proc/self/cgroup").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                base = mount
            elif controller in controllers.split(","):
                base = mount / controllers if (mount / controllers).is_dir() else mount / controller
            else:
                continue
            inner = base / path.lstrip("/")
            while inner != base:
                if inner.is_dir():
                    yield inner
                inner = inner.parent
            yield base

    def _number(self, name: str, default: int) -> int:
        text = self._text(self._root / name)
        return int(text) if text.lstrip("-").isdigit() else default

    @staticmethod
    def _text(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ""


def parse_cpus(text: str) -> list[int]:
    """Read a list such as "0-3,8"."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def spell_cpus(cpus: list[int]) -> str:
    """Write a list such as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None
