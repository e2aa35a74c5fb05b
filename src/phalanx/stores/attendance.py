"""Who has come to a world, and whether all mean the same one."""

from __future__ import annotations

import json
import os
import socket
import time

from phalanx import logs
from phalanx.errors import DistError, PeerFailed, StoreTimeout
from phalanx.leftovers import place
from phalanx.process import Stat
from phalanx.stores.base import Store, Timeout, seconds

_log = logs.area("store")

_PATIENCE = 10.0  # seconds until rank 0 says for whom it waits
_LOOK = 1.0  # seconds between two looks at whether those who have come still live


class Muster:
    """Who has come to a world, so that nobody waits for one who came and died.

    Ranks of one host see whether the processes of the others live, and say so to all. `store` is
    what the world meets in.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._look_every = max(_LOOK, world_size / 100)  # all ask one store
        self._read = 0  # cards
        self._here: dict[int, tuple[int, int]] = {}  # pid and start time of ranks on this host
        self._place = place()
        number = store.add("cards", 1)
        pid = os.getpid()
        card = [rank, self._place, pid, Stat(f"/proc/{pid}").start_time]
        store.set(f"card/{number}", json.dumps(card))

    def wait(self, store: Store, key: str, timeout: float) -> None:
        """Wait for a key of a store; raise PeerFailed if a rank that had come has died."""
        limit = time.monotonic() + timeout
        while True:
            left = limit - time.monotonic()
            try:
                store.wait([key], max(min(left, self._look_every), 0))
                return
            except StoreTimeout:
                if left <= self._look_every:
                    raise
            end = self._find_end()
            if end and not store.check([key]):  # all may have joined, and one have ended after that
                raise PeerFailed(f"init_process_group on rank {self._rank}: {end}")

    def _find_end(self) -> str:
        """Say which rank has died, as far as anybody knows."""
        self._read_cards()
        for rank, (pid, start) in self._here.items():
            now = Stat(f"/proc/{pid}")
            if not now.alive or now.start_time != start:
                self._store.compare_set(
                    "ended",
                    "",
                    f"rank {rank} (pid {pid} on host {socket.gethostname()}) has ended before all "
                    "ranks had joined; look at its output first",
                )
        return self._store.get("ended").decode() if self._store.check(["ended"]) else ""

    def _read_cards(self) -> None:
        newest = self._store.add("cards", 0)
        keys = [f"card/{number}" for number in range(self._read + 1, newest + 1)]
        if not keys or not self._store.check(keys):  # the last one is just being written
            return
        self._read = newest
        for card in self._store.multi_get(keys):
            rank, place, pid, start = json.loads(card)
            if place == self._place and rank != self._rank:
                self._here[rank] = pid, start


def check_in(store: Store, rank: int, world_size: int, timeout: Timeout) -> Muster:
    """Wait until all ranks of a world are there, and agree on what it is.

    Every rank calls it once with a store (or a `PrefixStore`) that no other world uses. If ranks
    disagree on the world size, or two claim one rank, or a rank is out of range, every rank raises
    the same `DistError`. While all come soon, a rank does a fixed number of store operations,
    however large the world. Return who looks after the ranks that have come, for the waits that
    follow until all have joined.
    """
    muster = Muster(store, rank, world_size)
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
        if rank == 0 and limit > _PATIENCE and not _comes(muster, store, _PATIENCE):
            _log.warning(
                "rank 0 has waited %g s for %s; it goes on for up to %g s",
                _PATIENCE,
                _missing(store, world_size),
                limit,
            )
            limit -= _PATIENCE
        muster.wait(store, "verdict", limit)
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
    return muster


def _comes(muster: Muster, store: Store, timeout: float) -> bool:
    try:
        muster.wait(store, "verdict", timeout)
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
