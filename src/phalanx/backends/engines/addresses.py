"""At which addresses the ranks of a group reach each other."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx.backends.engines.reach import Site
from phalanx.errors import DistError, DistNetworkError, DistTimeout, StoreTimeout
from phalanx.stores import TCPStore
from phalanx.stores.addresses import (
    host_address,
    interface_address,
    interfaces,
    is_loopback,
    network,
    way_to,
)
from phalanx.types import Deadline

INTERFACE = "GLOO_SOCKET_IFNAME"
_READ = 3.0  # seconds for all to read what is wrong with one


class Place(NamedTuple):
    """Where a rank says that it can be reached."""

    network: str  # see `network`
    host: str
    near: str  # its address for ranks that see the same network
    far: str  # its address for all others
    interface: str = ""  # that the user has chosen
    complaint: str = ""  # why there is no address


def own_place(store: Any) -> Place:
    """Say where this rank can be reached: by the way that leads to the store, if it has a server.

    GLOO_SOCKET_IFNAME names another interface.
    """
    host, interface = socket.gethostname(), os.environ.get(INTERFACE, "").split(",")[0]
    if interface:
        address = interface_address(interface) or ""
        complaint = ""
        if not address:
            found = ", ".join(f"{name} ({where})" for name, where in interfaces().items())
            complaint = f"{INTERFACE}={interface} has no address there; it has {found}"
        return Place(network(), host, address, address, interface, complaint)
    near = far = own_address(store)
    if is_loopback(near):
        far = host_address()
    return Place(network(), host, near, far)


def own_address(store: Any) -> str:
    """Return the address of the interface that reaches the store's server, if it has one."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    reached = way_to(store.host, store.port) if isinstance(store, TCPStore) else ""
    return reached or host_address()


def exchange(
    store: Any, rank: int, global_ranks: list[int], own: Place, group: str, timeout: float
) -> list[Site]:
    """Tell the others where one is; return where each rank is reached.

    Raise, on all ranks, if some cannot be reached by another, or if one does not come.
    """
    store.set(f"address/{rank}", json.dumps(own))
    told = gathered(store, "address", global_ranks, group, timeout)
    places = [Place(*json.loads(value)) for value in told]
    if trouble := _trouble(places, global_ranks):
        # Rank 0 may have the store in its hands: it does not leave before the others have read.
        with suppress(DistError):
            store.barrier("address/read", len(places), _READ)
        raise DistNetworkError(f"the making of group {group!r}: {trouble}")
    is_one = len({place.network for place in places}) == 1
    return [Site(place.host, place.near if is_one else place.far) for place in places]


def _trouble(places: list[Place], global_ranks: list[int]) -> str:
    """Say who cannot be reached by whom, by what they say themselves."""
    for each, place in enumerate(places):
        if place.complaint:
            return (
                f"rank {global_ranks[each]} on host '{place.host}' cannot be reached by the other "
                f"ranks: {place.complaint}; set it to the interface between the hosts, or unset it"
            )
        other = next((i for i, peer in enumerate(places) if peer.network != place.network), None)
        if other is not None and is_loopback(place.far):
            chosen = f" ({INTERFACE}={place.interface} there)" if place.interface else ""
            return (
                f"rank {global_ranks[other]} on host '{places[other].host}' cannot reach rank "
                f"{global_ranks[each]} on host '{place.host}', which gives its address as "
                f"{place.far}{chosen}: that is every host's own; set {INTERFACE} to the interface "
                "between them on that host, or have MASTER_ADDR be an address that other hosts can "
                "reach"
            )
    return ""


def gathered(
    store: Any, name: str, global_ranks: list[int], group: str, timeout: float
) -> list[str]:
    """Return what each member of a group has set as ``name/<group rank>``; raise who has not."""
    keys = [f"{name}/{rank}" for rank in range(len(global_ranks))]
    deadline = Deadline(timeout)
    try:
        for key in keys:
            store.wait([key], deadline.left())
    except StoreTimeout:
        missing = [str(global_ranks[i]) for i, key in enumerate(keys) if not store.check([key])]
        raise DistTimeout(
            f"the making of group {group!r}: rank{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"did not call for it within {timeout:g} s"
        ) from None
    return [value.decode() for value in store.multi_get(keys)]
