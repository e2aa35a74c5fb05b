"""Checks of the memory: how much there is, and whether ranks can share it."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phalanx.debug.text import amount
from phalanx.doctor import cgroups
from phalanx.doctor.findings import Host, Said, good, problem, warning

_GIB = 1 << 30


def memory(host: Host) -> Iterator[Said]:
    """See how much memory is left, to this process' cgroup as well."""
    facts = _meminfo(host)
    available, total = facts.get("MemAvailable", 0), facts.get("MemTotal", 0)
    if total and available < max(total // 10, _GIB // 2):
        yield warning(
            f"{amount(available, 'B')} of {amount(total, 'B')} are available",
            "see who has it: ps -eo pid,user,rss,args --sort=-rss | head",
        )
    else:
        yield good(f"{amount(available, 'B')} of {amount(total, 'B')} are available")
    limit, used = host.machine.memory_limit(), cgroups.memory_used(host)
    if limit is None or limit >= total > 0:
        yield good("no control group limits it")
    elif limit - used < _GIB:
        yield warning(
            f"the container may use {amount(limit, 'B')} and uses {amount(used, 'B')} (cached "
            "files count); beyond that the system kills a rank",
            "raise it: docker run --memory 8g",
        )
    else:
        yield good(f"the container may use {amount(limit, 'B')} and uses {amount(used, 'B')}")


def swap(host: Host) -> Iterator[Said]:
    """See whether memory is being swapped out."""
    facts = _meminfo(host)
    total = facts.get("SwapTotal", 0)
    used = total - facts.get("SwapFree", 0)
    if used > max(total // 10, 64 << 20):
        yield warning(
            f"{amount(used, 'B')} are swapped out: a rank that needs them holds up all others",
            "free memory, then: sudo swapoff -a && sudo swapon -a",
        )
    else:
        yield good(f"{amount(used, 'B')} of {amount(total, 'B')} used" if total else "none")


def shared_files(host: Host) -> Iterator[Said]:
    """See how large /dev/shm is. Phalanx does without it; workers of DataLoader do not."""
    path = host.root / "dev/shm"
    try:
        size = os.statvfs(path)
    except OSError:
        yield warning(
            "there is no /dev/shm: workers of torch's DataLoader cannot hand over batches",
            "sudo mount -t tmpfs -o size=2g tmpfs /dev/shm",
        )
        return
    yield judge_shared_files(size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize)


def judge_shared_files(total: int, free: int) -> Said:
    fact = f"{amount(free, 'B')} of {amount(total, 'B')} free"
    if free < _GIB // 4:
        return warning(
            f"{fact}: workers of torch's DataLoader die there of SIGBUS (Phalanx does not use it)",
            "docker run --shm-size 2g, or: sudo mount -o remount,size=2g /dev/shm",
        )
    return good(fact)


def memfd(host: Host) -> Iterator[Said]:
    """Make shared memory as a rank does, and reach it as another rank does."""
    advice = "let the sandbox allow memfd_create and /proc/PID/fd; see also: sysctl vm.memfd_noexec"
    try:
        descriptor = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        yield problem(f"memfd_create failed: {error.strerror}; ranks share nothing", advice)
        return
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as mine:
            mine[:1] = b"x"
            again = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR)
            with os.fdopen(again, "r+b") as other:
                shared = other.read(1) == b"x"
    except OSError as error:
        yield problem(f"shared memory cannot be used: {error}", advice)
        return
    finally:
        os.close(descriptor)
    if shared:
        yield good("shared memory can be made, and opened by another rank")
    else:
        yield problem("what is written to shared memory is not read there", advice)


def huge_pages(host: Host) -> Iterator[Said]:
    """See whether large tensors get large pages."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    private = _chosen(host.text(f"{folder}/enabled"))
    shared = _chosen(host.text(f"{folder}/shmem_enabled"))
    if private is None:
        yield good("the system has none")
        return
    fact = f"transparent huge pages: {private}; for shared memory: {shared}"
    if private == "never":
        yield warning(
            f"{fact}; large tensors cost more page faults",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif shared in ("never", "deny"):
        yield good(f"{fact}; to try: echo advise | sudo tee {folder}/shmem_enabled")
    else:
        yield good(fact)


def limits(host: Host) -> Iterator[Said]:
    """See what a process may have: files, processes, addresses."""
    files, most = host.limit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024:
        allowed = "unlimited" if most == resource.RLIM_INFINITY else most
        yield warning(
            f"{files} open files per process; each rank keeps some open for each of its peers",
            f"ulimit -n {allowed if allowed == 'unlimited' or most > files else 4096}",
        )
    else:
        yield good(f"{_spell(files)} open files per process")
    tasks = cgroups.processes(host)
    of_user, _ = host.limit(resource.RLIMIT_NPROC)
    if tasks is not None and tasks[0] - tasks[1] < 256:
        yield warning(
            f"the container may have {tasks[0]} processes and threads, and has {tasks[1]}",
            "docker run --pids-limit 4096",
        )
    elif 0 <= of_user < 512 and not host.is_root:
        yield warning(f"{of_user} processes and threads per user", "ulimit -u 4096")
    else:
        yield good(f"{_spell(of_user)} processes and threads per user")
    addresses, _ = host.limit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        yield warning(
            f"{amount(addresses, 'B')} of addresses per process; each rank maps the memory of the "
            "others, which takes addresses though no memory: so there is less room for shared "
            "tensors, and for many ranks too little",
            "ulimit -v unlimited",
        )
    locked, _ = host.limit(resource.RLIMIT_MEMLOCK)
    locked_text = "unlimited" if locked == resource.RLIM_INFINITY else amount(locked, "B")
    yield good(f"{locked_text} of locked memory (Phalanx locks none)")


def scratch(host: Host) -> Iterator[Said]:
    """See whether temporary files can be written: ranks meet in one."""
    try:
        folder = Path(tempfile.gettempdir())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free = os.statvfs(folder)
    except OSError as error:
        yield problem(f"no temporary file can be written: {error}", "export TMPDIR=/some/folder")
        return
    left = free.f_bavail * free.f_frsize
    if left < 64 << 20:
        yield warning(f"{amount(left, 'B')} left in {folder}", "export TMPDIR=/some/larger/folder")
    else:
        yield good(f"{amount(left, 'B')} left in {folder}")


def _meminfo(host: Host) -> dict[str, int]:
    """Return what /proc/meminfo says, in bytes."""
    facts = {}
    for line in (host.text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) * 1024
    return facts


def _chosen(text: str | None) -> str | None:
    """Return the setting in brackets: "always [madvise] never"."""
    return None if text is None else text.partition("[")[2].partition("]")[0]


def _spell(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
