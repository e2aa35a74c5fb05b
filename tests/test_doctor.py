"""phalanx doctor: what each check makes of a machine, and that no check hides another."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from phalanx import cli
from phalanx.doctor import command, memory, network, processors, proof, software
from phalanx.doctor.findings import Check, Host, Said, examine, good
from phalanx.stores import addresses

GIB = 1 << 30


class Made:
    """Makes machines of files, below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, files: dict[str, str] | None = None, **parts: Any) -> Host:
        for name, text in (files or {}).items():
            path = self._root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        parts.setdefault("environment", {})
        parts.setdefault("cpus", frozenset(range(4)))
        return Host(root=self._root, **parts)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def only(said: Any) -> Said:
    (one,) = said
    assert (one.grade == "good") == (one.advice == "")
    return one


def topology(*cores: int) -> dict[str, str]:
    """Say to which core each processor belongs."""
    folder = "/sys/devices/system/cpu/cpu{}/topology/core_id"
    return {folder.format(i): str(core) for i, core in enumerate(cores)}


def test_cores(made: Made) -> None:
    assert only(processors.cores(made(topology(0, 1, 2, 3)))).fact.startswith("4 cores;")


def test_hyper_threads(made: Made) -> None:
    said = only(processors.cores(made(topology(0, 1, 0, 1))))
    assert (said.grade, "2 cores with 4 hardware threads" in said.fact) == ("good", True)


def test_one_core_of_many(made: Made) -> None:
    said = only(processors.cores(made(topology(0, 1, 2, 3), cpus=frozenset({2}))))
    assert said.grade == "warning"
    assert "1 of 4 processors" in said.fact


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/job/a", "/sys/fs/cgroup/job/cpu.max": "150000 100000"},
        {  # version 1, the path as the host knows it
            "/proc/self/cgroup": "3:memory:/docker/f00\n2:cpu,cpuacct:/docker/f00",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        {
            "/proc/self/cgroup": "2:cpu:/a",
            "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
            "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_quota(made: Made, files: dict[str, str]) -> None:
    said = only(processors.quota(made(files)))
    assert said.grade == "warning"
    assert "1.5 of 4 cores" in said.fact
    assert processors.usable(made(files)) == 1.5


def test_no_quota(made: Made) -> None:
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000"}
    assert only(processors.quota(made(files))).grade == "good"
    assert processors.usable(made(files)) == 4


def test_throttling(made: Made) -> None:
    files = {
        "/proc/self/cgroup": "0::/",
        "/sys/fs/cgroup/cpu.max": "400000 100000",
        "/sys/fs/cgroup/cpu.stat": "usage_usec 9\nnr_periods 200\nnr_throttled 50",
    }
    _, said = processors.quota(made(files))
    assert said.grade == "warning"
    assert "25%" in said.fact


@pytest.mark.parametrize(("load", "grade"), [("0.50", "good"), ("3.20", "warning")])
def test_load(made: Made, load: str, grade: str) -> None:
    assert only(processors.load(made({"/proc/loadavg": f"{load} 1 1 1/99 7"}))).grade == grade


@pytest.mark.parametrize(
    ("governor", "driver", "grade"),
    [
        ("powersave", "acpi-cpufreq", "warning"),
        ("powersave", "intel_pstate", "good"),
        ("performance", "acpi-cpufreq", "good"),
    ],
)
def test_governor(made: Made, governor: str, driver: str, grade: str) -> None:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    files = {f"{folder}/scaling_governor": governor, f"{folder}/scaling_driver": driver}
    assert only(processors.governor(made(files))).grade == grade


def test_a_machine_that_says_nothing_is_not_ill(made: Made) -> None:
    silent = made(limit=lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for check in (processors.governor, processors.clock, processors.numa, processors.load):
        assert only(check(silent)).grade == "good"
    for ask in (memory.memory, memory.swap, memory.huge_pages, memory.limits, network.interfaces):
        assert {said.grade for said in ask(silent)} == {"good"}


@pytest.mark.parametrize(("source", "grade"), [("tsc", "good"), ("hpet", "warning")])
def test_clock(made: Made, source: str, grade: str) -> None:
    path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert only(processors.clock(made({path: source}))).grade == grade


def test_numa(made: Made) -> None:
    nodes = {
        "/sys/devices/system/node/node0/cpulist": "0-1,8-9",
        "/sys/devices/system/node/node1/cpulist": "2-7",
        "/sys/devices/system/node/node2/cpulist": "",
    }
    said = only(processors.numa(made(nodes)))
    assert "node 0: 2, node 1: 2" in said.fact
    balancing = {**nodes, "/proc/sys/kernel/numa_balancing": "1"}
    assert [said.grade for said in processors.numa(made(balancing))] == ["good", "warning"]


def test_too_many_threads(made: Made) -> None:
    said = only(processors.threads(made(environment={"OMP_NUM_THREADS": "4"})))
    assert said.grade == "warning"
    assert "unset OMP_NUM_THREADS" in said.advice
    for fine in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, {}):
        assert only(processors.threads(made(environment=fine))).grade == "good"
    pinned = only(processors.threads(made(environment={"KMP_AFFINITY": "compact"})))
    assert pinned.grade == "warning"


def meminfo(**kilobytes: int) -> dict[str, str]:
    return {"/proc/meminfo": "\n".join(f"{name}: {n} kB" for name, n in kilobytes.items())}


def test_memory(made: Made) -> None:
    host = made(meminfo(MemTotal=16 << 20, MemAvailable=12 << 20))
    assert [said.grade for said in memory.memory(host)] == ["good", "good"]
    host = made(meminfo(MemTotal=16 << 20, MemAvailable=1 << 20))
    assert next(iter(memory.memory(host))).grade == "warning"


@pytest.mark.parametrize(
    "files",
    [
        {
            "/proc/self/cgroup": "0::/job",
            "/sys/fs/cgroup/job/memory.max": str(2 * GIB),
            "/sys/fs/cgroup/job/memory.current": str(3 * GIB // 2),
            "/sys/fs/cgroup/memory.max": "max",
        },
        {
            "/proc/self/cgroup": "4:memory:/job",
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
            "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB // 2),
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    ],
)
def test_memory_of_a_container(made: Made, files: dict[str, str]) -> None:
    host = made({**meminfo(MemTotal=16 << 20, MemAvailable=12 << 20), **files})
    _, said = memory.memory(host)
    assert said.grade == "warning"
    assert "2.1 GB" in said.fact
    assert "--memory" in said.advice


def test_swap(made: Made) -> None:
    used = meminfo(SwapTotal=4 << 20, SwapFree=1 << 20)
    assert only(memory.swap(made(used))).grade == "warning"
    assert only(memory.swap(made(meminfo(SwapTotal=0, SwapFree=0)))).grade == "good"


def test_shared_files(made: Made) -> None:
    assert only(memory.shared_files(made())).grade == "warning"  # there are none
    assert memory.judge_shared_files(64 << 20, 60 << 20).grade == "warning"
    assert memory.judge_shared_files(8 * GIB, 7 * GIB).grade == "good"


def test_memfd(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    open_files = set(os.listdir("/proc/self/fd"))
    assert only(memory.memfd(made())).grade == "good"
    assert len(os.listdir("/proc/self/fd")) == len(open_files)

    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    said = only(memory.memfd(made()))
    assert said.grade == "problem"
    assert "Permission denied" in said.fact


@pytest.mark.parametrize(
    ("private", "shared", "grade"),
    [
        ("always madvise [never]", "[never]", "warning"),
        ("always [madvise] never", "always advise [never] deny", "good"),
        ("[always] madvise never", "[advise] never", "good"),
    ],
)
def test_huge_pages(made: Made, private: str, shared: str, grade: str) -> None:
    folder = "/sys/kernel/mm/transparent_hugepage"
    files = {f"{folder}/enabled": private, f"{folder}/shmem_enabled": shared}
    assert only(memory.huge_pages(made(files))).grade == grade


def test_limits(made: Made) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    given = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_AS: (GIB, GIB)}
    host = made(limit=lambda what: given.get(what, unlimited))
    files, tasks, addresses, locked = memory.limits(host)
    assert (files.grade, files.advice) == ("warning", "ulimit -n 4096")
    assert tasks.grade == locked.grade == "good"
    assert (addresses.grade, addresses.advice) == ("warning", "ulimit -v unlimited")


def test_limit_of_processes(made: Made) -> None:
    files = {
        "/proc/self/cgroup": "0::/",
        "/sys/fs/cgroup/pids.max": "100",
        "/sys/fs/cgroup/pids.current": "90",
    }
    _, tasks, *_ = memory.limits(made(files))
    assert tasks.grade == "warning"
    assert "--pids-limit" in tasks.advice


def test_scratch(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert only(memory.scratch(made())).grade == "problem"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert only(memory.scratch(made())).grade in ("good", "warning")  # as the disk is


def unknown(name: str) -> list[str]:
    raise OSError(-2, "Name or service not known")


def test_hostname(made: Made) -> None:
    said = only(network.hostname(made(hostname="box", resolve=unknown)))
    assert said.grade == "warning"
    assert "Name or service not known" in said.fact
    assert "127.0.1.1 box" in said.advice
    local = only(network.hostname(made(hostname="box", resolve=lambda name: ["127.0.1.1"])))
    assert (local.grade, "this machine only" in local.fact) == ("good", True)
    real = only(network.hostname(made(hostname="box", resolve=lambda name: ["10.0.0.7"])))
    assert real.fact == "'box' is 10.0.0.7"


def test_a_slow_hostname(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def resolve(name: str) -> list[str]:
        now[0] += 2
        return ["10.0.0.7"]

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = only(network.hostname(made(hostname="box", resolve=resolve)))
    assert said.grade == "warning"
    assert "2.0 s" in said.fact


def test_localhost(made: Made) -> None:
    assert only(network.localhost(made(resolve=unknown))).grade == "problem"
    assert only(network.localhost(made(resolve=lambda name: ["10.1.1.1"]))).grade == "problem"
    assert only(network.localhost(made(resolve=lambda name: ["::1", "127.0.0.1"]))).grade == "good"


def test_interfaces(made: Made) -> None:
    up = {"/sys/class/net/lo/flags": "0x9", "/sys/class/net/eth9/flags": "0x1002"}
    said = only(network.interfaces(made(up)))
    assert (said.grade, said.fact) == ("good", "lo up")
    gloo = made(up, environment={"GLOO_SOCKET_IFNAME": "eth9"})
    assert [said.grade for said in network.interfaces(gloo)] == ["good", "warning"]
    down = only(network.interfaces(made({"/sys/class/net/lo/flags": "0x8"})))
    assert (down.grade, down.advice) == ("problem", "sudo ip link set lo up")


def test_ports(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(network.ports(made())).grade == "good"  # real ones
    monkeypatch.setattr(addresses, "address_of", lambda name: "10.0.0.7")

    def connect(address: str) -> None:
        raise OSError(f"{address} is closed")

    files = {
        "/sys/class/net/eth9/flags": "0x3",
        "/proc/sys/net/ipv4/ip_local_port_range": "40000\t40099",
    }
    loopback, interface, few = network.ports(made(files, connect=connect))
    assert (loopback.grade, "127.0.0.1 is closed" in loopback.fact) == ("problem", True)
    assert (interface.grade, "10.0.0.7 is closed" in interface.fact) == ("warning", True)
    assert (few.grade, "100 ports" in few.fact) == ("warning", True)


def test_variables_of_another_job(made: Made) -> None:
    said = only(network.leftovers(made(environment={"RANK": "1", "WORLD_SIZE": "2"})))
    assert (said.grade, said.advice) == ("warning", "unset RANK WORLD_SIZE")
    assert only(network.leftovers(made())).grade == "good"


@pytest.mark.parametrize(
    ("version", "grade"),
    [
        (None, "problem"),
        ("2.9.1+cpu", "problem"),
        ("2.10.0", "good"),
        ("2.13.0+cpu", "good"),
        ("2.14.0a0+git1", "warning"),
        ("3.0.0", "warning"),
    ],
)
def test_torch(made: Made, version: str | None, grade: str) -> None:
    assert only(software.torch(made(version=lambda name: version))).grade == grade


def test_the_range_of_torch_is_the_one_declared() -> None:
    project = Path(__file__).parents[1]
    oldest, newest = (".".join(map(str, v)) for v in (software.OLDEST_TORCH, software.NEWEST_TORCH))
    assert f'"torch>={oldest}"' in (project / "pyproject.toml").read_text()
    assert f"torch=={newest}." in (project / "constraints.txt").read_text()


def test_core(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx import _native

    monkeypatch.setattr(_native, "instructions", lambda: "baseline")
    assert only(software.core(made())).grade == "warning"
    monkeypatch.undo()
    assert _native.instructions() in ("avx512", "avx2", "baseline")
    monkeypatch.setitem(sys.modules, "phalanx._native", None)
    monkeypatch.delattr(sys.modules["phalanx"], "_native")
    assert only(software.core(made())).grade == "problem"


def test_backend(made: Made) -> None:
    assert only(software.backend(made(entry_points=lambda group: []))).grade == "warning"
    entry = EntryPoint("phalanx", "phalanx_autoload:register", "torch.backends")
    assert only(software.backend(made(entry_points=lambda group: [entry]))).grade == "good"
    broken = EntryPoint("phalanx", "phalanx_autoload:nothing", "torch.backends")
    assert only(software.backend(made(entry_points=lambda group: [broken]))).grade == "warning"
    off = made(environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert only(software.backend(off)).grade == "warning"


@pytest.mark.parametrize(
    ("scope", "is_root", "grade"),
    [("1", False, "warning"), ("1", True, "good"), ("3", True, "warning")],
)
def test_stacks(made: Made, scope: str, is_root: bool, grade: str) -> None:
    files = {"/proc/sys/kernel/yama/ptrace_scope": scope}
    host = made(files, is_root=is_root, version=lambda name: "1")
    assert only(software.stacks(host)).grade == grade


def test_checks_do_not_hide_each_other(made: Made) -> None:
    forever = threading.Event()

    def hangs(host: Host) -> Any:
        forever.wait()
        return []

    def fails(host: Host) -> Any:
        yield good("so far")
        raise ZeroDivisionError("oh")

    checks = [
        Check("hangs", hangs, deadline=0.05),
        Check("fails", fails),
        Check("fine", lambda host: [good("yes")]),
    ]
    hung, failed, fine = examine(made(), checks)
    forever.set()
    assert (hung.check, hung.grade, "0.05 s" in hung.fact) == ("hangs", "problem", True)
    assert (failed.check, failed.grade) == ("fails", "warning")
    assert "ZeroDivisionError: oh" in failed.fact
    assert (fine.check, fine.fact) == ("fine", "yes")


def test_proof_of_threads(made: Made) -> None:
    said = only(proof.threads(made()))
    assert (said.grade, "right" in said.fact) == ("good", True)


def test_a_proof_that_fails_says_why(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        said = only(proof.processes(made()))
        assert (said.grade, "exit code 1" in said.fact) == ("problem", True)
    monkeypatch.setenv("PHALANX_DEBUG", "nonsense")
    said = only(proof.threads(made()))
    assert said.grade == "problem"
    assert "PHALANX_DEBUG" in said.fact


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check("a", lambda host: [good("fine")]),
        Check("b", lambda host: [Said("warning", "so-so", "do this")]),
    ]
    monkeypatch.setattr(command, "CHECKS", checks)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "good      a            fine" in text
    assert "-> do this" in text
    assert text.splitlines()[-1] == "1 warning, 1 good"
    assert cli.main(["doctor", "--brief"]) == 0
    assert "fine" not in capsys.readouterr().out
    checks.append(Check("c", lambda host: [Said("problem", "bad", "mend it")]))
    assert cli.main(["doctor", "--json"]) == 1
    seen = json.loads(capsys.readouterr().out)
    assert (seen["problems"], seen["warnings"]) == (1, 1)
    assert seen["findings"][2] == {
        "check": "c",
        "grade": "problem",
        "fact": "bad",
        "advice": "mend it",
    }


def test_all_of_it_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    seen = json.loads(done.stdout)
    assert done.returncode == (1 if seen["problems"] else 0)
    assert {finding["check"] for finding in seen["findings"]} == {c.name for c in command.CHECKS}
    assert not [f for f in seen["findings"] if "could not be found out" in f["fact"]]
    proofs = [f for f in seen["findings"] if f["check"] in ("2 threads", "2 processes")]
    assert [proven["grade"] for proven in proofs] == ["good", "good"]
