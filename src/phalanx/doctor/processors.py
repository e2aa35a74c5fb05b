"""Checks of the cores: how many there are for a job, and what takes them away."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor import cgroups
from phalanx.doctor.findings import Machine, Said, good, warning

_CPU = "/sys/devices/system/cpu"
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PINS = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Drivers under which "powersave" is the usual setting, and fast.
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate", "amd-pstate-epp")


def usable(machine: Machine) -> float:
    """Return how many cores a job can keep busy here."""
    quota = cgroups.cpu_quota(machine)
    return min(len(machine.cores), quota or float("inf"))


def cores(machine: Machine) -> Iterator[Said]:
    """Count the cores that this process may use."""
    count = len(machine.cores)
    present = len(machine.glob(f"{_CPU}/cpu[0-9]*")) or count
    siblings = {
        machine.text(f"{_CPU}/cpu{cpu}/topology/thread_siblings_list") for cpu in machine.cores
    }
    physical = count if None in siblings else len(siblings)
    fact = f"{count} of {present} processors may be used" if count < present else _plural(count)
    if physical < count:
        fact += f" on {_plural(physical, 'physical core')} (hyper-threads)"
    if count == 1:
        yield warning(
            f"{fact}: ranks take turns, and every wait costs a switch",
            "use more cores, see: taskset -cp $$; nproc --all",
        )
    elif physical < count:
        advice = f"start one rank per core: phalanx run -n {physical}"
        yield warning(f"{fact}; two ranks on one core share it", advice)
    else:
        yield good(f"{fact}; phalanx run -n auto starts a rank on each")


def quota(machine: Machine) -> Iterator[Said]:
    """See whether a cgroup takes processor time away."""
    limit = cgroups.cpu_quota(machine)
    if limit is None:
        yield good("no limit of processor time")
    elif limit >= len(machine.cores):
        yield good(f"limit of {limit:g} cores, at least as many as may be used")
    else:
        yield warning(
            f"the container may use {limit:g} of {_plural(len(machine.cores))}: ranks that wait "
            "use up what the others need, and all are stopped until the next period",
            f"start at most {max(int(limit), 1)} ranks, or raise the limit: docker run --cpus "
            f"{len(machine.cores)}",
        )
    throttled = cgroups.throttled(machine)
    if throttled and throttled > 0.01:
        yield warning(
            f"it was stopped for lack of processor time in {throttled:.0%} of all periods",
            "raise the limit of processor time, or start fewer ranks and threads",
        )


def load(machine: Machine) -> Iterator[Said]:
    """See how much others use the cores."""
    text = machine.text("/proc/loadavg")
    if text is None:
        yield good("unknown: there is no /proc/loadavg")
        return
    busy, count = float(text.split()[0]), usable(machine)
    if busy > count / 2:
        yield warning(
            f"{busy:g} processes want to run, on {count:g} cores: a rank that must wait for a core "
            "holds up all others",
            "see who: ps -eo pid,user,pcpu,args --sort=-pcpu | head",
        )
    else:
        yield good(f"{busy:g} of {count:g} cores busy")


def governor(machine: Machine) -> Iterator[Said]:
    """See whether the cores are clocked down."""
    slow = []
    files = machine.glob(f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor")
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


def clock(machine: Machine) -> Iterator[Said]:
    """See whether asking the time is fast: whoever waits does it all the time."""
    source = machine.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield warning(
            f"the clock is {source}, and asking it takes a microsecond or more",
            "boot with clocksource=tsc if the machine has a steady one (dmesg | grep -i tsc)",
        )
    else:
        yield good(source or "unknown")


def numa(machine: Machine) -> Iterator[Said]:
    """Count the memory nodes that the usable cores belong to."""
    nodes = {}
    for node in machine.glob("/sys/devices/system/node/node[0-9]*"):
        mine = _cpus((node / "cpulist").read_text()) & machine.cores
        if mine:
            nodes[int(node.name[4:])] = mine
    if len(nodes) < 2:
        yield good("one memory node")
        return
    shares = ", ".join(f"node {number}: {_plural(len(cpus))}" for number, cpus in nodes.items())
    yield good(f"{len(nodes)} memory nodes ({shares}); phalanx run pins each rank to one")
    if machine.text("/proc/sys/kernel/numa_balancing") == "1":
        yield warning(
            "the system moves memory between nodes while it is used (numa_balancing)",
            "sudo sysctl kernel.numa_balancing=0",
        )


def threads(machine: Machine) -> Iterator[Said]:
    """Find variables that give each rank more threads than it has cores, or the same cores."""
    count = len(machine.cores)
    told = False
    for name in _POOLS:
        value = machine.environment.get(name, "")
        number = int(value.split(",")[0]) if value.split(",")[0].isdigit() else None
        if number is None or number <= 1 or number <= count // 2:
            continue
        told = True
        yield warning(
            f"{name}={value}: every rank starts {number} threads, on {_plural(count)} in all",
            f"unset {name} (phalanx run chooses it), or export {name}=1",
        )
    for name in _PINS:
        if name in machine.environment:
            told = True
            yield warning(
                f"{name}={machine.environment[name]}: all ranks may be bound to the same cores",
                f"unset {name}",
            )
    if not told:
        chosen = machine.environment.get("OMP_NUM_THREADS")
        yield good(
            f"OMP_NUM_THREADS={chosen}"
            if chosen
            else "OMP_NUM_THREADS is not set; phalanx run sets it to the cores of a rank"
        )


def _plural(count: int, noun: str = "core") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _cpus(text: str) -> set[int]:
    """Read a list of processors: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
