"""Which cores ranks get, on machines made of files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.environment import HeldPort
from phalanx.launch.placement import place, usable_cores
from phalanx.machine import Core, Machine, parse_cpus, spell_cpus


class Pretended(Machine):
    """A machine with so many cores per memory node, each with so many hardware threads."""

    def __init__(self, nodes: list[int], threads: int = 1, quota: float | None = None) -> None:
        super().__init__()
        total = sum(nodes)
        self._cores = []
        for node, count in enumerate(nodes):
            for _ in range(count):
                number = len(self._cores)
                cpus = tuple(number + total * thread for thread in range(threads))
                self._cores.append(Core(node, node, number, cpus))
        self._quota = quota

    def cores(self, allowed: set[int] | None = None) -> list[Core]:
        return self._cores

    def cpu_quota(self) -> float | None:
        return self._quota


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(1, 2), st.integers(1, 64))
def test_shares_are_fair_and_leave_nothing(nodes: list[int], threads: int, size: int) -> None:
    machine = Pretended(nodes, threads)
    placed = place(size, machine, {}, "cores")
    total = sum(nodes)
    if size > total:
        assert placed.cpus == [None] * size
        assert placed.threads == 1
        return
    shares = [share or [] for share in placed.cpus]
    assert sorted(cpu for share in shares for cpu in share) == list(range(total * threads))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= threads
    assert placed.threads == total // size


def test_a_rank_keeps_both_threads_of_a_core() -> None:
    assert place(2, Pretended([4], threads=2), {}, "auto").cpus == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_nodes_of_memory() -> None:
    machine = Pretended([2, 2])
    assert place(4, machine, {}, "auto").cpus == [[0], [1], [2], [3]]
    assert place(6, machine, {}, "auto").cpus == [[0, 1]] * 3 + [[2, 3]] * 3
    assert place(2, machine, {}, "numa").cpus == [[0, 1], [2, 3]]
    assert place(1, machine, {}, "auto").cpus == [None]


def test_a_quota_limits_threads_and_forbids_pinning() -> None:
    machine = Pretended([8], quota=4.5)
    placed = place(2, machine, {}, "auto")
    assert placed.cpus == [None, None]
    assert placed.threads == 2
    assert usable_cores(machine) == 4
    assert usable_cores(Pretended([8], quota=0.5)) == 1
    assert "quota" in placed.describe({})


def test_the_user_decides() -> None:
    placed = place(2, Pretended([4]), {"OMP_NUM_THREADS": "3"}, "none")
    assert placed.threads is None
    assert placed.cpus == [None, None]
    assert "OMP_NUM_THREADS=3" in placed.describe({"OMP_NUM_THREADS": "3"})


def write(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Machine(root)


def test_facts_of_a_machine_with_control_groups_of_version_2(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/{}"
    files = {topology.format(cpu, "core_id"): str(cpu % 2) for cpu in range(4)}
    files |= {topology.format(cpu, "physical_package_id"): "0" for cpu in range(4)}
    files |= {
        "sys/devices/system/node/node0/cpulist": "0,2",
        "sys/devices/system/node/node1/cpulist": "1,3",
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000",
        "sys/fs/cgroup/outer/inner/memory.max": "1048576",
        "sys/fs/cgroup/outer/memory.max": "max",
        "sys/fs/cgroup/outer/inner/memory.events": "low 0\noom 2\noom_kill 3",
    }
    machine = write(tmp_path, files)
    assert machine.cores({0, 1, 2}) == [Core(0, 0, 0, (0, 2)), Core(1, 0, 1, (1,))]
    assert machine.cpu_quota() == 1.5
    assert machine.memory_limit() == 1 << 20
    assert machine.oom_kills() == 3


def test_facts_of_a_machine_with_control_groups_of_version_1(tmp_path: Path) -> None:
    machine = write(
        tmp_path,
        {
            # The path is the host's: in the container the group is the root of the mount.
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 7",
            "proc/vmstat": "oom_kill 9",
        },
    )
    assert machine.cpu_quota() is None
    assert machine.memory_limit() is None
    assert machine.oom_kills() == 7
    (tmp_path / "sys/fs/cgroup/memory/memory.oom_control").unlink()
    assert machine.oom_kills() == 9


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_there_and_back(cpus: set[int]) -> None:
    assert parse_cpus(spell_cpus(list(cpus))) == sorted(cpus)


def test_a_held_port_is_given_to_nobody_but_who_asks_for_it() -> None:
    port = HeldPort()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port.number))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port.number))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port.number)):
            pass
    port.close()
