"""Checks of the cores: how many there are for a job, and what takes them away."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor import cgroups
from phalanx.doctor.findings import Host, Said, good, warning

_CPU = "/sys/devices/system/cpu"
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PINS = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Drivers under which "powersave" is the usual setting, and fast.
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate", "amd-pstate-epp")


def usable(host: Host) -> float:
    """Return how many hardware threads a job can keep busy here."""
    quota = host.machine.cpu_quota()
    return min(len(host.cpus), quota or float("inf"))


def cores(host: Host) -> Iterator[Said]:
    """Count the cores that this process may use."""
    present = len(host.glob(f"{_CPU}/cpu[0-9]*")) or len(host.cpus)
    count = len(host.machine.cores(set(host.cpus)))
    fact = _plural(count)
    if len(host.cpus) > count:
        fact += f" with {len(host.cpus)} hardware threads"
    if len(host.cpus) < present:
        fact += f" (this process may use {len(host.cpus)} of {present} processors)"
    if count == 1:
        yield warning(
            f"{fact}: ranks take turns, and every wait costs a switch",
            "use more cores, see: taskset -cp $$; nproc --all",
        )
    else:
        yield good(f"{fact}; phalanx run -n auto starts a rank on each")


def quota(host: Host) -> Iterator[Said]:
    """See whether a cgroup takes processor time away."""
    limit = host.machine.cpu_quota()
    if limit is None:
        yield good("no limit of processor time")
    elif limit >= len(host.cpus):
        yield good(f"limit of {limit:g} cores, at least as many as may be used")
    else:
        yield warning(
            f"the container may use {limit:g} of {_plural(len(host.cpus))}: ranks that wait "
            "use up what the others need, and all are stopped until the next period",
            f"phalanx run -n {max(int(limit), 1)}, or raise the limit: docker run --cpus "
            f"{len(host.cpus)}",
        )
    throttled = cgroups.throttled(host)
    if throttled and throttled > 0.01:
        yield warning(
            f"it was stopped for lack of processor time in {throttled:.0%} of all periods",
            "raise the limit of processor time, or start fewer ranks and threads",
        )


def load(host: Host) -> Iterator[Said]:
    """See how much others use the cores."""
    text = host.text("/proc/loadavg")
    if text is None:
        yield good("unknown: there is no /proc/loadavg")
        return
    busy, count = float(text.split()[0]), usable(host)
    if busy > count / 2:
        yield warning(
            f"{busy:g} processes want to run, on {_plural(count)}: a rank that waits for a core "
            "holds up all others",
            "see who: ps -eo pid,user,pcpu,args --sort=-pcpu | head",
        )
    else:
        yield good(f"{busy:g} of {_plural(count)} busy")


def governor(host: Host) -> Iterator[Said]:
    """See whether the cores are clocked down."""
    slow = []
    files = host.glob(f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor")
    for file in files:
        setting = file.read_text().strip()
        driver = file.with_name("scaling_driver")
        clever = driver.exists() and driver.read_text().strip() in _CLEVER_DRIVERS
        if setting in ("powersave", "conservative") and not clever:
            slow.append(setting)
    if slow:
        yield warning(
            f"{len(slow)} cores are clocked down (governor {slow[0]})",
            "sudo cpupower frequency-set -g performance",
        )
    elif files:
        yield good(f"governor {files[0].read_text().strip()}")
    else:
        yield good("the system does not control the clock (a virtual machine?)")


def clock(host: Host) -> Iterator[Said]:
    """See whether asking the time is fast: whoever waits does it all the time."""
    source = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield warning(
            f"the clock is {source}, and asking it takes a microsecond or more",
            "boot with clocksource=tsc if the machine has a steady one (dmesg | grep -i tsc)",
        )
    else:
        yield good(source or "unknown")


def numa(host: Host) -> Iterator[Said]:
    """Count the memory nodes that the usable cores belong to."""
    nodes = {node: host.cpus & set(cpus) for node, cpus in sorted(host.machine.nodes().items())}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus}
    if len(nodes) < 2:
        yield good("one memory node")
        return
    shares = ", ".join(f"node {node}: {len(cpus)}" for node, cpus in nodes.items())
    yield good(f"{len(nodes)} memory nodes, processors of {shares}; phalanx run pins ranks")
    if host.text("/proc/sys/kernel/numa_balancing") == "1":
        yield warning(
            "the system moves memory between nodes while it is used (numa_balancing)",
            "sudo sysctl kernel.numa_balancing=0",
        )


def threads(host: Host) -> Iterator[Said]:
    """Find variables that give each rank more threads than it has cores, or the same cores."""
    count = len(host.cpus)
    told = False
    for name in _POOLS:
        value = host.environment.get(name, "")
        number = int(value.split(",")[0]) if value.split(",")[0].isdigit() else None
        if number is None or number <= 1 or number <= count // 2:
            continue
        told = True
        yield warning(
            f"{name}={value}: every rank starts {number} threads, on {_plural(count)} in all",
            f"unset {name} (phalanx run chooses it), or export {name}=1",
        )
    for name in _PINS:
        if name in host.environment:
            told = True
            yield warning(
                f"{name}={host.environment[name]}: all ranks may be bound to the same cores",
                f"unset {name}",
            )
    if not told:
        chosen = host.environment.get("OMP_NUM_THREADS")
        yield good(
            f"OMP_NUM_THREADS={chosen}"
            if chosen
            else "OMP_NUM_THREADS is not set; phalanx run sets it to the cores of a rank"
        )


def _plural(count: float) -> str:
    return f"{count:g} core" if count == 1 else f"{count:g} cores"
