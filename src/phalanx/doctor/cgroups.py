"""What the control groups of this process leave to a job, besides what phalanx.machine tells."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.findings import Host


def throttled(host: Host) -> float | None:
    """Return in which part of all periods this process' group was stopped."""
    for text in _texts(host, "cpu", "cpu.stat"):
        counts = dict(line.split() for line in text.splitlines())
        if periods := int(counts.get("nr_periods", 0)):
            return int(counts["nr_throttled"]) / periods
    return None


def memory_used(host: Host) -> int:
    """Return how many bytes this process' group uses, cached files among them."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        for text in _texts(host, "memory", name):
            return int(text)
    return 0


def processes(host: Host) -> tuple[int, int] | None:
    """Return how many processes and threads are allowed, and how many there are."""
    limits = _texts(host, "pids", "pids.max")
    counts = _texts(host, "pids", "pids.current")
    pairs = [(int(a), int(b)) for a, b in zip(limits, counts, strict=False) if a != "max"]
    return min(pairs, default=None, key=lambda pair: pair[0] - pair[1])


def _texts(host: Host, controller: str, name: str) -> Iterator[str]:
    """Yield what stands in a file of each group that limits this process, innermost first."""
    for folder in host.machine.groups(controller):
        file = folder / name
        if file.exists():
            yield file.read_text().strip()
