"""At which addresses the ranks of a group reach each other."""

from __future__ import annotations

import socket
from typing import Any

from phalanx.errors import DistNetworkError, DistTimeout, StoreTimeout
from phalanx.stores import TCPStore
from phalanx.stores.addresses import host_address, is_loopback, network, way_to
from phalanx.types import Deadline


def own_address(store: Any) -> str:
    """Return the address of the interface that reaches the store's server, if it has one."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    reached = way_to(store.host, store.port) if isinstance(store, TCPStore) else ""
    return reached or host_address()


def exchange(
    store: Any, rank: int, global_ranks: list[int], address: str, group: str, timeout: float
) -> None:
    """Tell the others one's address; raise if some rank cannot reach another, or does not come."""
    store.set(f"address/{rank}", "\n".join([network(), socket.gethostname(), address]))
    told = [value.split("\n") for value in gathered(store, "address", global_ranks, group, timeout)]
    for other, (their_network, *_) in enumerate(told):
        if their_network == told[rank][0]:
            continue
        for who, whom in ((other, rank), (rank, other)):
            _, host, where = told[who]
            if where and is_loopback(where):
                raise DistNetworkError(
                    f"rank {global_ranks[whom]} cannot reach rank {global_ranks[who]} on host "
                    f"{host!r}, which gives its address as {where}: that is every host's own; set "
                    "GLOO_SOCKET_IFNAME to the interface between them on that host, or have "
                    "MASTER_ADDR be an address that other hosts can reach"
                )


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
