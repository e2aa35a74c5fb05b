"""Who cannot reach whom, found out when connections between hosts do not come about.

The ranks that are stuck listen on ports of their own, tell where in the store, and try each other.
Nobody does so while all is well.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from phalanx import bystanders
from phalanx.errors import DistError

_TRY = 3.0  # seconds for one connection
_COME = 4.0  # for the others to find out that they are stuck as well
_READ = 3.0  # for the others to read what was found
_YES = "yes"
_GREETING = b"phalanx reach\n"


class Site(NamedTuple):
    """Where a rank is reached."""

    host: str
    address: str


def diagnose(store: Any, rank: int, sites: Sequence[Site], global_ranks: Sequence[int]) -> str:
    """Say which ranks cannot reach which, as far as it concerns this rank; "" if all is well.

    All ranks that are stuck should call it at about the same time. The first of each host tries
    those of the others: what keeps hosts apart is the same for all.
    """
    own = sites[rank]
    first: dict[Site, int] = {}
    for each, site in enumerate(sites):
        first.setdefault(site, each)
    me = first.pop(own)
    with _listening(own.address) if rank == me else nullcontext(0) as port:
        if rank == me:
            store.set(f"reach/{me}", str(port))
            limit = time.monotonic() + _COME
            for site, each in first.items():
                if _came(store, f"reach/{each}", limit - time.monotonic()):
                    result = _try(site.address, int(store.get(f"reach/{each}")))
                    store.set(f"reached/{me}/{each}", result or _YES)
        found = _compare(store, own, me, first, global_ranks)
    if found:
        # Rank 0 may have the store in its hands: it does not leave before the others have read.
        store.set(f"reach/read/{rank}", b"")
        concerned = [each for each, site in enumerate(sites) if site == own or site in found]
        with suppress(DistError):
            store.wait([f"reach/read/{each}" for each in concerned], _READ)
    return "; ".join(found.values())


def _compare(
    store: Any, own: Site, me: int, others: Mapping[Site, int], global_ranks: Sequence[int]
) -> dict[Site, str]:
    """Say with which hosts the first rank of this one has trouble, in either direction."""
    found = {}
    limit = time.monotonic() + _COME + _TRY * len(others)
    for site, each in others.items():
        forth, back = [
            store.get(key).decode() if _came(store, key, limit - time.monotonic()) else _YES
            for key in (f"reached/{me}/{each}", f"reached/{each}/{me}")
        ]
        if forth != _YES or back != _YES:
            ranks = global_ranks[me], global_ranks[each]
            found[site] = _sentence(own, site, *ranks, forth, back)
    return found


def _sentence(own: Site, other: Site, me: int, peer: int, forth: str, back: str) -> str:
    here = f"rank {me} on host '{own.host}' ({own.address})"
    there = f"rank {peer} on host '{other.host}' ({other.address})"
    if forth == _YES:
        here, there, forth, back = there, here, back, forth
    ways = "the other way it works" if back == _YES else f"nor the other way ({back})"
    return (
        f"{here} cannot connect to {there}: {forth}, {ways}; ports that programs choose "
        "themselves must be open between the hosts, in both directions: see to the firewall, or "
        "choose another interface (GLOO_SOCKET_IFNAME); phalanx doctor --hosts checks it"
    )


@contextmanager
def _listening(address: str) -> Iterator[int]:
    """Answer whoever comes, meanwhile."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:

        def answer() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(_TRY)
                    try:
                        peer.sendall(_GREETING)
                    except OSError:
                        continue

        thread = threading.Thread(target=answer, name="phalanx-reach", daemon=True)
        bystanders.mark(thread).start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)  # which ends the wait for the next
            thread.join()


def _try(address: str, port: int) -> str:
    """Return why a port cannot be reached; "" if it can."""
    try:
        with socket.create_connection((address, port), timeout=_TRY) as near:
            return "" if near.recv(64) == _GREETING else "somebody else answers there"
    except TimeoutError:
        return f"no answer within {_TRY:g} s"
    except OSError as error:
        return error.strerror or str(error)


def _came(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], max(seconds, 0.01))
    except DistError:
        return False
    return True
