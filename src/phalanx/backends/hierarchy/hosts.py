"""Who shares a host with whom.

Ranks share a host if they can map each other's memory. Which may try is told by an id that each
computes: the machine's boot, and the namespaces in which processes see each other. That they can is
proved when they open the memory of the first rank of their host.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import NamedTuple

from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistTimeout, StoreTimeout

VARIABLE = "PHALANX_HOST_ID"  # keeps ranks apart that seem to share a host, and do not

_NAMESPACES = ("mnt", "ipc", "pid")


class Host(NamedTuple):
    """Where a rank is, as it says itself."""

    id: str
    name: str
    pid: int


def this_host() -> Host:
    """Describe the host of this process."""
    name, pid = socket.gethostname(), os.getpid()
    if VARIABLE in os.environ:
        return Host(os.environ[VARIABLE], name, pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in _NAMESPACES]
    return Host("-".join([boot, *map(str, seen)]), name, pid)


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
        store.wait(["hosts"], options.timeout)
    except StoreTimeout:
        missing = [str(each) for each in range(size) if not store.check([keys[each]])]
        raise DistTimeout(
            f"init_process_group on rank {rank} timed out: these ranks have not joined: "
            f"{', '.join(missing)}"
        ) from None
    return [Host(*host) for host in json.loads(store.get("hosts"))]
