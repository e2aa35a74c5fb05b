"""The ranks' side: join a world, then obey the coordinating process until it says stop.

Between commands a rank blocks in a read, so that whoever is being measured has the machine for
itself. Ranks are started by the package's launcher (`be_rank`), those of MPI by mpirun as
`python -m phalanx.bench.ranks DIRECTORY SIZE PINNED`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phalanx.bench.cells import Cell, StartLine, process_start_line
from phalanx.bench.libraries import Bare, Library, Mpi, TorchLike
from phalanx.bench.operations import OPERATIONS, Conditions
from phalanx.launch import placement
from phalanx.launch.placement import Placement
from phalanx.machine import Machine

TIMEOUT = timedelta(seconds=60)

MakeLibrary = Callable[[Conditions], Library]


class Place(NamedTuple):
    """Where a world comes together, how large it is, and whether its ranks keep to their cores."""

    directory: Path
    size: int
    pinned: bool


def place_ranks(size: int) -> Placement:
    """Share the cores out, as ``phalanx run`` does; every rank comes to the same result."""
    return placement.place(size, Machine(), os.environ, "cores")


def serve(place: Place, rank: int, make: MakeLibrary, line: StartLine) -> None:
    """Answer the coordinator's commands on behalf of one rank."""
    if place.pinned and (cpus := place_ranks(place.size).cpus[rank]):
        os.sched_setaffinity(0, cpus)
    cell: Cell | None = None
    with Client(str(place.directory / "socket"), family="AF_UNIX") as connection:
        connection.send((rank, os.getpid()))
        while True:
            command, *arguments = _receive(connection)
            answer: object = None
            try:
                if command == "prepare":
                    cell = None
                    name, num_bytes, conditions = arguments
                    library = make(conditions)
                    cell = Cell(library, OPERATIONS[name], num_bytes)
                    answer = library.messages(name, num_bytes)
                elif command == "time" and cell:
                    answer = cell.time(line, *arguments)
                elif command == "release":
                    cell = None
                    gc.collect()
                else:
                    return
            except Exception as error:
                traceback.print_exc()
                connection.send((False, f"{type(error).__name__}: {error}"))
            else:
                connection.send((True, answer))


def _receive(connection: Connection) -> tuple[Any, ...]:
    try:
        command: tuple[Any, ...] = connection.recv()
    except (EOFError, ConnectionResetError):
        return ("stop",)
    return command


def be_rank(world: str, directory: str, size: int, pinned: bool) -> None:
    """Be one process of the world of an implementation, started by the package's launcher."""
    keep_quiet(Path(directory))
    WORLDS[world](Place(Path(directory), size, pinned))


def keep_quiet(directory: Path) -> None:
    """Have this process print to the team's log, and disturb no measurement."""
    # The coordinator tells when it is over: Ctrl-C in a terminal reaches this process as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    gc.disable()


def serve_process(place: Place, rank: int, make: MakeLibrary) -> None:
    """Answer the coordinator's commands as a process of its own."""
    torch.set_num_threads(1)  # as torchrun does
    serve(place, rank, make, process_start_line(place.directory, rank, place.size))


def _phalanx(place: Place, shared: bool = False) -> None:
    import phalanx

    rank = phalanx.get_rank()
    serve_process(place, rank, partial(TorchLike, phalanx, rank, place.size, shared=shared))


def _gloo(place: Place) -> None:
    import phalanx
    from phalanx.bench import torch_peer

    rank = phalanx.get_rank()
    with torch_peer.gloo(place.directory, rank, place.size, TIMEOUT) as dist:
        serve_process(place, rank, partial(TorchLike, dist, rank, place.size))


def _phalanx_threads(place: Place, shared: bool = False) -> None:
    import phalanx
    from phalanx.launch.threads import run_threads

    line = threading.Barrier(place.size).wait

    def live() -> None:
        rank = phalanx.get_rank()
        serve(place, rank, partial(TorchLike, phalanx, rank, place.size, shared=shared), line)

    run_threads(live, place.size)


def _torch_threads(place: Place) -> None:
    from phalanx.bench.torch_peer import ThreadedWorld

    world = ThreadedWorld(place.size)

    def live(rank: int) -> None:
        with world.rank(rank) as dist:
            serve(place, rank, partial(TorchLike, dist, rank, place.size), world.line)

    _run_in_threads(live, place.size)


def _bare(place: Place) -> None:
    torch.set_num_threads(1)
    line = threading.Barrier(place.size).wait
    _run_in_threads(
        lambda rank: serve(place, rank, partial(Bare, rank, place.size), line), place.size
    )


def _run_in_threads(live: Callable[[int], None], size: int) -> None:
    """Run a thread per rank; an error in one ends the process, as it would end a rank process."""

    def guarded(rank: int) -> None:
        try:
            live(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WORLDS: dict[str, Callable[[Place], None]] = {
    "phalanx": _phalanx,
    "phalanx-shared": partial(_phalanx, shared=True),
    "gloo": _gloo,
    "phalanx-threads": _phalanx_threads,
    "phalanx-shared-threads": partial(_phalanx_threads, shared=True),
    "threadedpg": _torch_threads,
    "bare": _bare,
}


def be_mpi_rank(place: Place) -> None:
    """Be one rank of what mpirun started."""
    mpi = importlib.import_module("mpi4py.MPI")
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if size != place.size:
        raise RuntimeError(
            f"mpirun started {place.size} ranks, but mpi4py sees a world of {size}: "
            "they belong to different MPIs"
        )
    if rank == 0:  # the only one to get mpirun's standard input
        _end_with_coordinator()
    gc.disable()
    serve_process(place, rank, partial(Mpi, mpi))


def _end_with_coordinator() -> None:
    """End this process when the coordinator is gone, even in the middle of a collective."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _directory, _size, _pinned = sys.argv[1:]
    be_mpi_rank(Place(Path(_directory), int(_size), _pinned == "True"))
