"""At which addresses the ranks of a group reach each other, and who cannot reach whom."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistNetworkError, DistTimeout, PeerFailed, StoreTimeout
from phalanx.stores import TCPStore
from phalanx.stores.addresses import (
    host_address,
    interface_address,
    is_loopback,
    network,
    way_to,
)
from phalanx.types import Deadline

UNCONNECTED = "unconnected"  # the key of what a rank has said that gave up
_NONE = "!"  # in place of an address: why there is none
_PROBE_SECONDS = 3.0
_LOOK = 0.3  # seconds between looks at whether a rank that is waited for has failed


class Place(NamedTuple):
    """Where a rank is; ``port`` is a socket there that takes connections and does nothing else."""

    network: str
    host: str
    address: str
    port: int


def own_address(store: Any) -> str:
    """Return the address of the interface that reaches the store's server, if it has one.

    ``GLOO_SOCKET_IFNAME`` names another interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return interface_address(interface)
    store = getattr(store, "_underlying_non_prefix_store", store)
    reached = way_to(store.host, store.port) if isinstance(store, TCPStore) else ""
    return reached or host_address()


@contextmanager
def exchanged(options: BackendOptions) -> Iterator[str]:
    """Tell the others one's address, and have it for the length of a block that connects to them.

    Raise if a rank has no address that others can use, or does not come. If the block fails, the
    error says which ranks cannot reach each other.
    """
    store, rank, group = options.store, options.group_rank, options.group_id
    global_ranks = options.global_ranks
    try:
        address = own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.create_server((address, 0), family=family, backlog=len(global_ranks))
    except (DistNetworkError, OSError) as error:
        store.set(f"address/{rank}", f"{_NONE}{error}")
        raise
    with door:
        own = Place(network(), socket.gethostname(), address, door.getsockname()[1])
        store.set(f"address/{rank}", "\n".join(map(str, own)))
        values = gathered(options, "address")
        places = _places(values, rank, global_ranks)
        far = {i: place for i, place in enumerate(places) if place.network != own.network}
        failures = unreachable(far, _PROBE_SECONDS)
        lines = [
            f"\n  rank {global_ranks[rank]} on host {own.host!r} cannot reach rank "
            f"{global_ranks[peer]} on host {places[peer].host!r} at {places[peer].address}: {why}"
            for peer, why in failures.items()
        ]
        store.set(f"unreachable/{rank}", "".join(lines))
        try:
            yield address
        except RuntimeError as error:
            text = complaint(store, len(global_ranks), group)
            if not text:
                raise
            store.set(UNCONNECTED, text)  # others may wait much longer for the same
            raise DistNetworkError(text) from error


def complaint(store: Any, size: int, group: str) -> str:
    """Say which ranks have found that they cannot reach others; nothing if none has."""
    keys = [f"unreachable/{rank}" for rank in range(size)]
    known = "".join(store.get(key).decode() for key in keys if store.check([key]))
    if not known:
        return ""
    return (
        f"the ranks of group {group!r} cannot connect; look for a firewall, or set "
        f"GLOO_SOCKET_IFNAME to the interface between the hosts{known}"
    )


def _places(values: Sequence[str], rank: int, global_ranks: Sequence[int]) -> list[Place]:
    """Read what the ranks have told; raise if that is of no use to a rank on another host."""
    places = []
    for other, value in enumerate(values):
        if value.startswith(_NONE):
            why = value.removeprefix(_NONE)
            raise DistNetworkError(f"rank {global_ranks[other]} cannot be reached: {why}")
        where, host, address, port = value.split("\n")
        places.append(Place(where, host, address, int(port)))
    for other, place in enumerate(places):
        if place.network == places[rank].network:
            continue
        for who, whom in ((other, rank), (rank, other)):
            if is_loopback(places[who].address):
                raise DistNetworkError(
                    f"rank {global_ranks[whom]} cannot reach rank {global_ranks[who]} on host "
                    f"{places[who].host!r}, which gives its address as {places[who].address}: that "
                    "is every host's own; set GLOO_SOCKET_IFNAME to the interface between them on "
                    "that host, or have MASTER_ADDR be an address that other hosts can reach"
                )
    return places


def unreachable(places: Mapping[int, Place], seconds: float) -> dict[int, str]:
    """Try to connect to all places at once; return why that failed, by key."""
    failures: dict[int, str] = {}
    deadline = Deadline(seconds)
    with selectors.DefaultSelector() as selector:
        for key, place in places.items():
            family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
            probe = socket.socket(family, socket.SOCK_STREAM)
            probe.setblocking(False)
            code = probe.connect_ex((place.address, place.port))
            if code in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, key)
            else:
                failures[key] = os.strerror(code)
                probe.close()
        while selector.get_map() and deadline.left() > 0:
            for selected, _ in selector.select(deadline.left()):
                made: Any = selected.fileobj
                code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    failures[selected.data] = os.strerror(code)
                selector.unregister(made)
                made.close()
        for selected in list(selector.get_map().values()):
            failures[selected.data] = f"no answer within {seconds:g} s"
            left: Any = selected.fileobj
            left.close()
    return failures


def failures(options: BackendOptions) -> dict[int, str]:
    """Return how ranks of the world have failed, as far as groups on engines have learnt of it."""
    known: dict[int, str] = options.shared.setdefault("engine failures", {})
    return known


def gathered(options: BackendOptions, name: str) -> list[str]:
    """Return what each member of a group has set as ``name/<group rank>``; raise who has not."""
    store, ranks, failed = options.store, options.global_ranks, failures(options)
    keys = [f"{name}/{rank}" for rank in range(len(ranks))]
    deadline = Deadline(options.timeout)
    what = f"the making of group {options.group_id!r} on rank {ranks[options.group_rank]}"
    for rank, key in zip(ranks, keys, strict=True):
        while not store.check([key]):
            if rank in failed:
                raise PeerFailed(f"{what}: {failed[rank]}")
            with suppress(StoreTimeout):
                store.wait([key], min(deadline.left(), _LOOK))
                break
            if deadline.left() > 0:
                continue
            missing = [str(ranks[i]) for i, key in enumerate(keys) if not store.check([key])]
            raise DistTimeout(
                f"{what}: rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not call for it "
                f"within {options.timeout:g} s"
            )
    return [value.decode() for value in store.multi_get(keys)]
