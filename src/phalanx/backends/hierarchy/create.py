"""How a group of the backend "phalanx" is made: local if its ranks share a host, or over hosts."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from phalanx import _native
from phalanx.backends import local
from phalanx.backends.base import GroupBackend
from phalanx.backends.hierarchy import hosts
from phalanx.backends.hierarchy.hosts import Host
from phalanx.backends.hierarchy.warden import Warden
from phalanx.backends.registry import BackendConfig, BackendOptions
from phalanx.errors import DistBackendError

ENGINE = "PHALANX_ENGINE"  # which engine works between hosts
_DEFAULT_ENGINE = "gloo"


def create(options: BackendOptions, pg_options: object = None) -> GroupBackend:
    """Make one rank's end of a group; all its members must do so."""
    found = _hosts(options)
    if not found:
        return local.create(options, pg_options)
    where = [found[rank].id for rank in options.global_ranks]
    if len(set(where)) == 1:
        return local.create(options, pg_options)
    return _over_hosts(options, where)


def _hosts(options: BackendOptions) -> list[Host]:
    """Return where the ranks of the world are; nothing if they all share a host."""
    if "hosts" not in options.shared:
        if options.group_size != options.world_size:
            return []  # of a world that has none on this transport
        found = hosts.meet(options)
        if len({host.id for host in found}) == 1:
            if not options.threads:
                options.shared["pids"] = [host.pid for host in found]
            found = []
        options.shared["hosts"] = found
        if found:
            roster = options.shared["roster"] = _roster(options, found)
            rank = options.group_rank
            options.shared["warden"] = Warden(options.store, roster, found, rank)
    told: list[Host] = options.shared["hosts"]
    return told


def _roster(options: BackendOptions, found: list[Host]) -> _native.Roster:
    """Make the roster of this host, or open it: its ranks join, and of the others it is told."""
    rank = options.group_rank
    mine = [each for each, host in enumerate(found) if host.id == found[rank].id]
    key = f"roster/{mine[0]}"
    if rank == mine[0]:
        roster = _native.Roster.create(len(found), threads=options.threads, near=len(mine))
        for each, host in enumerate(found):
            if host.id != found[rank].id:
                roster.place(each, host.name, host.pid)
        options.store.set(key, roster.ticket)
    else:
        options.await_key(key)
        ticket = options.store.get(key).decode()
        try:
            roster = _native.Roster.open(ticket)
        except DistBackendError as error:
            raise DistBackendError(
                f"ranks {mine[0]} and {rank} seem to share the host {found[rank].name}, but rank "
                f"{rank} cannot map the memory of rank {mine[0]}: {error}; if they run in "
                f"containers that do not share memory, set {hosts.VARIABLE} to another word in "
                "each container"
            ) from None
    pids = [host.pid if host.id == found[rank].id else 0 for host in found]
    roster.join(rank, options.timeout, [] if options.threads else pids)
    return roster


def _over_hosts(options: BackendOptions, where: list[str]) -> GroupBackend:
    # Engines take time to import, which a group of one host has no need of.
    from phalanx.backends.engines.messages import MessageEngine
    from phalanx.backends.hierarchy.group import Hierarchy
    from phalanx.stores import PrefixStore

    rank = options.group_rank
    mine = [each for each, label in enumerate(where) if label == where[rank]]
    near = replace(
        options,
        store=PrefixStore(f"near{mine[0]}", options.store),
        group_rank=mine.index(rank),
        group_size=len(mine),
        global_ranks=[options.global_ranks[each] for each in mine],
    )
    engine = BackendConfig(os.environ.get(ENGINE, _DEFAULT_ENGINE)).create(
        replace(options, store=PrefixStore("engine", options.store), shared=_own_shared(options))
    )
    if not isinstance(engine, MessageEngine):
        raise DistBackendError(
            f"the engine {engine.name!r} ({ENGINE}) cannot work between hosts: use gloo or mpi"
        )
    return Hierarchy(
        local.create(near),
        engine,
        where,
        rank,
        options.timeout,
        options.group_id,
        options.global_ranks,
        options.shared["warden"],
    )


def _own_shared(options: BackendOptions) -> dict[str, Any]:
    """Return what the engines of one rank's groups have in common."""
    shared: dict[str, Any] = options.shared.setdefault("engine", {})
    return shared
