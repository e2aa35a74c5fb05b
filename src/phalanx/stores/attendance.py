"""Who has come to a world, and whether all mean the same one."""

from __future__ import annotations

from phalanx import logs
from phalanx.errors import DistError, StoreTimeout
from phalanx.stores.base import Store, Timeout, seconds

_log = logs.area("store")

_PATIENCE = 10.0  # seconds until rank 0 says for whom it waits


def check_in(store: Store, rank: int, world_size: int, timeout: Timeout) -> None:
    """Wait until all ranks of a world are there, and agree on what it is.

    Every rank calls it once with a store (or a `PrefixStore`) that no other world uses. If ranks
    disagree on the world size, or two claim one rank, or a rank is out of range, every rank raises
    the same `DistError`. While all come soon, a rank does a fixed number of store operations,
    however large the world.
    """

    complaint = ""
    if world_size < 1 or not 0 <= rank < world_size:
        complaint = (
            f"a process says that it is rank {rank} of {world_size}; ranks are 0 to size - 1"
        )
    elif store.add(f"rank/{rank}", 1) > 1:
        complaint = f"two processes claim to be rank {rank} of {world_size}; each must be another"
    else:
        size, witness = store.compare_set("size", "", f"{world_size} {rank}").decode().split()
        if size != str(world_size):
            complaint = (
                f"ranks disagree on the world size: rank {witness} says {size}, "
                f"rank {rank} says {world_size}; start all with the same"
            )
    # A rank complains before it is counted, so a world is not complete with one that did.
    if complaint:
        store.compare_set("verdict", "", complaint)
    elif store.add("arrived", 1) == world_size:
        store.compare_set("verdict", "", "complete")
    limit = seconds(timeout)
    try:
        if rank == 0 and limit > _PATIENCE and not _comes(store, "verdict", _PATIENCE):
            _log.warning(
                "rank 0 has waited %g s for %s; it goes on for up to %g s",
                _PATIENCE,
                _missing(store, world_size),
                limit,
            )
            limit -= _PATIENCE
        store.wait(["verdict"], limit)
    except StoreTimeout:
        raise StoreTimeout(
            f"rank {rank} waited {seconds(timeout):g} s for {_missing(store, world_size)}"
        ) from None
    verdict = store.get("verdict").decode()
    # One that comes when the world is complete without it is alone with its complaint.
    if complaint and verdict == "complete":
        verdict = complaint
    if verdict != "complete":
        raise DistError(f"rank {rank} of {world_size}: {verdict}")


def _comes(store: Store, key: str, timeout: float) -> bool:
    try:
        store.wait([key], timeout)
    except StoreTimeout:
        return False
    return True


def _missing(store: Store, world_size: int) -> str:
    """Name the ranks that have not checked in, at the cost of an operation for each."""
    missing = [str(other) for other in range(world_size) if not store.check([f"rank/{other}"])]
    named = ", ".join(missing[:16]) + (", ..." if len(missing) > 16 else "")
    return (
        f"{len(missing)} of {world_size} ranks that did not come: {named}; "
        "look at their output first"
    )
