"""The ranks' side: join a world, then obey the coordinating process until it says stop.

Between commands a rank blocks in a read, so that whoever is being measured has the machine for
itself. Run by the coordinator as `python -m benchmarks.ranks WORLD SIZE DIRECTORY [RANK]`.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from .operations import OPERATIONS, Bare, Library, Mpi, Operation, TorchLike, contribution

TIMEOUT = timedelta(seconds=60)
CACHE_LINE_WORDS = 8

StartLine = Callable[[], None]


def start_line_file(directory: Path, size: int) -> None:
    """Make the page that the start line of `size` processes needs."""
    (directory / "start-line").write_bytes(bytes(size * CACHE_LINE_WORDS * 8))


def process_start_line(directory: Path, rank: int, size: int) -> StartLine:
    """Return a function that lets processes go at the same moment, whatever library they measure.

    Each counts its arrivals in a cache line of its own in a shared page. A library's own barrier
    would add its own skew: several messages for one over sockets.
    """
    with (directory / "start-line").open("r+b") as page:
        seats = memoryview(mmap.mmap(page.fileno(), 0)).cast("Q")
    arrivals = 0

    def line() -> None:
        nonlocal arrivals
        arrivals += 1
        seats[rank * CACHE_LINE_WORDS] = arrivals
        for seat in range(0, size * CACHE_LINE_WORDS, CACHE_LINE_WORDS):
            while seats[seat] < arrivals:
                os.sched_yield()

    return line


class Cell:
    """One operation at one size, bound to buffers and ready to be timed."""

    def __init__(self, library: Library, operation: Operation, num_bytes: int) -> None:
        count = operation.count(num_bytes, library.size)
        lengths = {"whole": count, "chunk": count // library.size}
        source = library.allocate(lengths[operation.source])
        target = library.allocate(lengths[operation.target]) if operation.target else source
        source.copy_(contribution(library.rank, source.numel()))
        self.call = library.bind(operation.name, source, target)
        returned = self.call()
        found = returned if isinstance(returned, torch.Tensor) else target
        if library.checked and operation.expected:
            wanted = operation.expected(library.rank, library.size, count)
            if wanted is not None and not torch.equal(found, wanted):
                at = int((found != wanted).nonzero()[0])
                raise AssertionError(
                    f"{operation.name} of {num_bytes} bytes is wrong on rank {library.rank}: "
                    f"element {at} is {found[at]}, expected {wanted[at]}"
                )
        # Zeros stay zeros however often they are summed; written, so that the pages are real.
        source.zero_()
        target.zero_()

    def time(self, line: StartLine, num_batches: int, num_calls: int) -> np.ndarray:
        """Return the seconds that every call took, a row per batch.

        The ranks start each batch together; inside it calls follow each other directly.
        """
        call, rows = self.call, []
        for _ in range(num_batches):
            line()
            stamps = [perf_counter()]
            for _ in range(num_calls):
                call()
                stamps.append(perf_counter())
            rows.append(stamps)
        return np.diff(np.array(rows))


def serve(directory: Path, library: Library, line: StartLine) -> None:
    """Answer the coordinator's commands on behalf of one rank."""
    cell: Cell | None = None
    with Client(str(directory / "socket"), family="AF_UNIX") as connection:
        connection.send(library.rank)
        while True:
            command, *arguments = receive(connection)
            try:
                if command == "prepare":
                    cell = None
                    name, num_bytes = arguments
                    cell = Cell(library, OPERATIONS[name], num_bytes)
                    answer = library.messages(name, num_bytes)
                elif command == "time":
                    answer = cell.time(line, *arguments)
                elif command == "release":
                    cell = None
                    gc.collect()
                    answer = None
                else:
                    return
            except Exception as error:
                traceback.print_exc()
                connection.send((False, f"{type(error).__name__}: {error}"))
            else:
                connection.send((True, answer))


def receive(connection: Connection) -> tuple:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return ("stop",)


def run_processes(
    module: str, directory: Path, size: int, rank: int, *, shared: bool = False
) -> None:
    """Be one rank of a world of processes that speaks torch.distributed's vocabulary."""
    end_with_coordinator()
    dist = importlib.import_module(module)
    dist.init_process_group(
        "gloo" if module == "torch.distributed" else module,
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    library = TorchLike(dist, rank, size, shared=shared)
    serve(directory, library, process_start_line(directory, rank, size))
    dist.destroy_process_group()


def run_mpi(directory: Path, size: int, _: int) -> None:
    """Be one rank of what mpirun started."""
    from mpi4py import MPI

    library = Mpi(MPI.COMM_WORLD, MPI.IN_PLACE)
    if library.rank == 0:  # the only one to get mpirun's standard input
        end_with_coordinator()
    serve(directory, library, process_start_line(directory, library.rank, size))


def run_phalanx_threads(directory: Path, size: int, _: int) -> None:
    """Be a whole Phalanx world of threads."""
    import phalanx as dist

    end_with_coordinator()
    line = threading.Barrier(size).wait
    dist.run_threads(lambda: serve(directory, TorchLike(dist, dist.get_rank(), size), line), size)


def run_torch_threads(directory: Path, size: int, _: int) -> None:
    """Be a whole world of torch's ThreadedPG, set up as torch's own tests do."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg

    end_with_coordinator()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, line = dist.HashStore(), threading.Barrier(size).wait

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        serve(directory, TorchLike(dist, rank, size), line)
        dist.destroy_process_group()

    run_in_threads(rank_main, size)


def run_bare(directory: Path, size: int, _: int) -> None:
    """Be threads that only use memory, one core each."""
    end_with_coordinator()
    torch.set_num_threads(1)
    line = threading.Barrier(size).wait
    run_in_threads(lambda rank: serve(directory, Bare(rank, size), line), size)


def run_in_threads(rank_main: Callable[[int], None], size: int) -> None:
    """Run a thread per rank; an error in one ends the process, as it would end a rank process."""

    def guarded(rank: int) -> None:
        try:
            rank_main(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end_with_coordinator() -> None:
    """End this process when the coordinator is gone, even in the middle of a collective."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


WORLDS: dict[str, Callable[[Path, int, int], None]] = {
    "phalanx": partial(run_processes, "phalanx"),
    "phalanx-shared": partial(run_processes, "phalanx", shared=True),
    "gloo": partial(run_processes, "torch.distributed"),
    "mpi": run_mpi,
    "phalanx-threads": run_phalanx_threads,
    "threadedpg": run_torch_threads,
    "bare": run_bare,
}


def main(world: str, size: str, directory: str, rank: str = "0") -> None:
    gc.disable()
    WORLDS[world](Path(directory), int(size), int(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
