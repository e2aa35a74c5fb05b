"""Who shares a host with whom.

Ranks share a host if they can map each other's memory. Which may try is told by an id that each
computes: the machine's boot, and the namespaces in which processes see each other. That they can is
proved when they open the memory of the first rank of their host.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx import _native
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistError, DistTimeout, StoreTimeout

VARIABLE = "PHALANX_HOST_ID"  # keeps ranks apart that seem to share a host, and do not

_READ = 3.0  # seconds for all to read what is wrong
_NAMESPACES = ("mnt", "ipc", "pid")


class Host(NamedTuple):
    """Where a rank is, as it says itself."""

    id: str
    name: str
    pid: int
    versions: Mapping[str, str] = {}  # of what all ranks must have the same of


def this_host() -> Host:
    """Describe the host of this process."""
    name, pid = socket.gethostname(), os.getpid()
    if VARIABLE in os.environ:
        return Host(os.environ[VARIABLE], name, pid, _versions())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in _NAMESPACES]
    return Host("-".join([boot, *map(str, seen)]), name, pid, _versions())


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__.partition("+")[0]}
    with suppress(metadata.PackageNotFoundError):  # a source tree, which has no version
        found["phalanx"] = metadata.version("phalanx")
    return found


def disagreement(hosts: Sequence[Host]) -> str:
    """Say of what ranks have different versions; "" if there is nothing of the kind."""
    told = []
    for package in ("phalanx", "torch"):
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            if package in host.versions:
                ranks.setdefault(host.versions[package], []).append(rank)
        if len(ranks) > 1:
            usual = max(ranks, key=lambda version: len(ranks[version]))
            others = [
                f"{package} {version} on {_spell(each)} ({hosts[each[0]].name})"
                for version, each in ranks.items()
                if version != usual
            ]
            told.append(f"{', '.join(others)}, but {usual} on {_spell(ranks[usual])}")
    return "; ".join(told)


def _spell(ranks: list[int]) -> str:
    return _native.rank_list(ranks)


def meet(options: BackendOptions) -> list[Host]:
    """Tell the ranks of a world where each of them is; return that by rank.

    Every rank does the same few operations of the store, however large the world.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    if options.threads or size == 1:
        return [this_host()] * size
    keys = [f"host/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(this_host()))
    if store.add("hosts/arrived", 1) == size:
        store.set("hosts", b"[%s]" % b",".join(store.multi_get(keys)))
    try:
        options.await_key("hosts")
    except StoreTimeout:
        missing = [str(each) for each in range(size) if not store.check([keys[each]])]
        raise DistTimeout(
            f"init_process_group on rank {rank} timed out: these ranks have not joined: "
            f"{', '.join(missing)}"
        ) from None
    found = [Host(*host) for host in json.loads(store.get("hosts"))]
    if told := disagreement(found):
        # Rank 0 may have the store in its hands: it does not leave before the others have read.
        with suppress(DistError):
            store.barrier("hosts/read", size, _READ)
        raise DistError(
            f"rank {rank} of {size}: ranks have different versions: {told}; install the same on "
            "all hosts"
        )
    return found
