"""What the cgroups of this process allow, in either version of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from phalanx.doctor.findings import Machine

_MOUNT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63


def cpu_quota(machine: Machine) -> float | None:
    """Return how many cores' time the strictest cgroup allows; None: all there is."""
    quotas = []
    for folder in _folders(machine, "cpu"):
        quota: str | int | None
        period: str | int | None
        text = machine.text(f"{folder}/cpu.max")
        if text is not None:
            quota, period = text.split()
        else:
            quota = machine.number(f"{folder}/cpu.cfs_quota_us")
            period = machine.number(f"{folder}/cpu.cfs_period_us")
        if quota not in (None, "max", -1) and period:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def throttled(machine: Machine) -> float | None:
    """Return in which part of all periods this process' cgroup was stopped."""
    for folder in _folders(machine, "cpu"):
        text = machine.text(f"{folder}/cpu.stat")
        counts = dict(line.split() for line in text.splitlines()) if text else {}
        if periods := int(counts.get("nr_periods", 0)):
            return int(counts["nr_throttled"]) / periods
    return None


def memory(machine: Machine) -> tuple[int, int] | None:
    """Return how many bytes the strictest cgroup allows, and how many of them are used."""
    limits = []
    for folder in _folders(machine, "memory"):
        limit = machine.number(f"{folder}/memory.max")  # "max" is none
        used = machine.number(f"{folder}/memory.current")
        if limit is None:
            limit = machine.number(f"{folder}/memory.limit_in_bytes")
            used = machine.number(f"{folder}/memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED:
            limits.append((limit, used or 0))
    return min(limits, default=None, key=lambda pair: pair[0] - pair[1])


def processes(machine: Machine) -> tuple[int, int] | None:
    """Return how many processes and threads are allowed, and how many there are."""
    limits = [
        (limit, machine.number(f"{folder}/pids.current") or 0)
        for folder in _folders(machine, "pids")
        if (limit := machine.number(f"{folder}/pids.max")) is not None
    ]
    return min(limits, default=None, key=lambda pair: pair[0] - pair[1])


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """Yield the folders that limit this process, from its own cgroup up to the root."""
    for line in (machine.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = _MOUNT
        elif controller in controllers.split(","):
            mount = f"{_MOUNT}/{controllers}"
            if not (machine.root / mount.lstrip("/")).is_dir():
                mount = f"{_MOUNT}/{controller}"
        else:
            continue
        # In a container the path may be the host's: then its own cgroup is the mounted root.
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield str(PurePosixPath(mount, folder))
