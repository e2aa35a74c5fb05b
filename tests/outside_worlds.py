"""Worlds for the tests that look at them from outside: programs that hang, or move.

``python outside_worlds.py NAME DIRECTORY`` forks the ranks of a world and waits for them.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import phalanx as dist
from phalanx.debug import outside, verdict
from phalanx.debug.outside import Job, Rank

FOREVER = 300.0
PROGRAMS = Path(__file__)


def hang() -> None:
    """Rank 2 sleeps; 0 and 3 wait in a collective for 1 and 2, and 1 for a message of 2."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        time.sleep(FOREVER)
    if rank == 1:
        dist.recv(torch.ones(3), 2)
    dist.all_reduce(torch.ones(8))


def crossed() -> None:
    """Wait for each other, but not without an end."""
    group = dist.new_group([0, 1])
    dist.barrier(group if dist.get_rank() else None, timeout=FOREVER)


def first_is_killed() -> None:
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def move() -> None:
    while True:
        dist.all_reduce(torch.ones(250))
        time.sleep(0.002)


def threads() -> None:
    def live() -> None:
        if dist.get_rank() == 1:
            time.sleep(FOREVER)
        dist.barrier()

    dist.run_threads(live, 3)


SIZES = {hang: 4, crossed: 2, first_is_killed: 2, move: 2}


@contextlib.contextmanager
def running(name: str, directory: Path) -> Iterator[int]:
    """Run one of the programs; its ranks end with it, whatever state they are in."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAMS), name, str(directory)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def look_until(pid: int, holds: Callable[[Job], bool]) -> Job:
    """Look at the job that a process has started until something can be seen."""
    limit = time.monotonic() + 60
    while True:
        with contextlib.suppress(outside.JobNotFound):
            job = outside.find(str(pid))
            if holds(job):
                return job
        assert time.monotonic() < limit, "it was not seen"
        time.sleep(0.05)


def ranks_of_this_world() -> list[Rank]:
    """Look, as one of them, at the ranks of a world, the youngest of this process."""
    return outside.look([os.getpid()]).jobs[-1].ranks


def once_waiting(needs: dict[int, int]) -> None:
    """Return when each of these ranks is seen to wait for another, from where it will not move.

    Whoever closes a cycle calls this first where the deadlock is to be told to others as well.
    """

    def waits(rank: Rank, needed: int) -> bool:
        return any(wait.blocked and needed in wait.needs for wait in rank.waits)

    while True:
        ranks = ranks_of_this_world()
        if all(waits(ranks[rank], needed) for rank, needed in needs.items()):
            return
        time.sleep(0.01)


def waits_long(job: Job) -> bool:
    return sum(verdict.wait_of(job, rank) is not None for rank in job.ranks) == 3 and (
        verdict.longest_wait(job) > verdict.LONG
    )


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(name: str, directory: str) -> None:
    die_with_parent()
    program = globals()[name]
    if program is threads:
        threads()
        return
    size = SIZES[program]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            die_with_parent()
            store = dist.FileStore(os.path.join(directory, "store"), size)
            dist.init_process_group(store=store, rank=rank, world_size=size, timeout=FOREVER)
            program()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
