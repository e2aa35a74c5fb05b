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
from phalanx.errors import DistError, DistNetworkError, DistTimeout, PeerFailed, StoreTimeout
from phalanx.stores import TCPStore
from phalanx.stores.addresses import (
    address_of,
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
_READ_SECONDS = 3.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOK = 0.3  # seconds between looks at whether a rank that is waited for has failed


class Place(NamedTuple):
    """Where a rank is; ``port`` is a socket there that takes connections and does nothing else.

    Ranks that see the same network reach it at ``near``, and all others at ``address``.
    """

    network: str
    host: str
    near: str
    address: str
    port: int


def own_address(store: Any) -> str:
    """Return the address of the interface that reaches the store's server, if it has one.

    ``GLOO_SOCKET_IFNAME`` names another interface.
    """
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
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
        near = own_address(store)
        # A host may know the store's by its loopback, and be reached by others all the same.
        chosen = os.environ.get(_INTERFACE, "")
        address = host_address() if is_loopback(near) and not chosen else near
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.create_server((address, 0), family=family, backlog=len(global_ranks))
    except (DistNetworkError, OSError) as error:
        store.set(f"address/{rank}", f"{_NONE}{error}")
        _let_read(options)
        raise
    with door:
        own = Place(network(), socket.gethostname(), near, address, door.getsockname()[1])
        store.set(f"address/{rank}", "\n".join(map(str, own)))
        values = gathered(options, "address")
        try:
            places = _places(values, rank, global_ranks)
        except DistNetworkError:
            _let_read(options)
            raise
        far = {i: place for i, place in enumerate(places) if place.network != own.network}
        failures = unreachable(far, _PROBE_SECONDS)
        lines = [
            f"\n  rank {global_ranks[rank]} on host {own.host!r} cannot reach rank "
            f"{global_ranks[peer]} on host {places[peer].host!r} at {places[peer].address}: {why}"
            for peer, why in failures.items()
        ]
        store.set(f"unreachable/{rank}", "".join(lines))
        if len({place.network for place in places}) == 1:
            # Who has the same network is reached where no other host can come in.
            address = near if chosen else address_of("lo") or near
        try:
            yield address
        except RuntimeError as error:
            text = complaint(store, len(global_ranks), group)
            if not text:
                raise
            store.set(UNCONNECTED, text)  # others may wait much longer for the same
            _let_read(options)
            raise DistNetworkError(text) from error


def of_members(options: BackendOptions) -> set[str]:
    """Return the addresses that the members of a group have told each other."""
    keys = [f"address/{rank}" for rank in range(options.group_size)]
    places = [value.decode().split("\n") for value in options.store.multi_get(keys)]
    return {address for place in places for address in place[2:4]}


def _let_read(options: BackendOptions) -> None:
    """Give the others time to read what is wrong: the store may end with this rank."""
    with suppress(DistError):
        options.store.barrier("address/read", len(options.global_ranks), _READ_SECONDS)


def has_probed(options: BackendOptions) -> bool:
    """Say whether this rank has tried whom it can reach."""
    return bool(options.store.check([f"unreachable/{options.group_rank}"]))


def given_up(options: BackendOptions, is_slow: bool) -> str:
    """Say why connections do not come about, if some rank has given up.

    What probes have found need not keep a group from being made: it takes one of two directions.
    If ``is_slow``, it does, and this rank gives up.
    """
    store = options.store
    if not store.check([UNCONNECTED]):
        text = complaint(store, options.group_size, options.group_id) if is_slow else ""
        if not text:
            return ""
        store.set(UNCONNECTED, text)
    told: str = store.get(UNCONNECTED).decode()
    _let_read(options)
    return told


def complaint(store: Any, size: int, group: str) -> str:
    """Say which ranks have found that they cannot reach others; nothing if none has."""
    keys = [f"unreachable/{rank}" for rank in range(size)]
    known = "".join(store.get(key).decode() for key in keys if store.check([key]))
    if not known:
        return ""
    return (
        f"the ranks of group {group!r} cannot connect; look for a firewall (phalanx doctor "
        f"--hosts), or set GLOO_SOCKET_IFNAME to the interface between the hosts{known}"
    )


def _places(values: Sequence[str], rank: int, global_ranks: Sequence[int]) -> list[Place]:
    """Read what the ranks have told; raise if that is of no use to a rank on another host."""
    places = []
    for other, value in enumerate(values):
        if value.startswith(_NONE):
            why = value.removeprefix(_NONE)
            raise DistNetworkError(f"rank {global_ranks[other]} cannot be reached: {why}")
        where, host, near, address, port = value.split("\n")
        places.append(Place(where, host, near, address, int(port)))
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
