"""How ranks of torchrun on several hosts meet: the one module here that uses torch.distributed.

torchrun's agent runs a store of torch's, which all its ranks can reach. Rank 0 runs one of ours
beside it and writes there where. The agent may start its ranks again, with the same store: what it
holds then is of ranks that have ended, and nobody answers there who knows the secret.

Torch's store is open to all who can connect. So what rank 0 writes there is not the secret of its
store, unless the job has none: both are made of it.
"""

from __future__ import annotations

import json
import math
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed

from phalanx.errors import DistNetworkError
from phalanx.stores import secret
from phalanx.stores.addresses import is_loopback, network, own_address
from phalanx.stores.arrival import ASTRAY, Search, Trouble, describe
from phalanx.stores.tcp import TCPStore

_KEY = "phalanx/store"
_CONNECT_SECONDS = 1.0  # for one try; a server that is there answers at once
_LOOK = 0.05  # seconds between two looks at what rank 0 has written
_UNWRITTEN = Trouble("it has not written where it is", "look at its output first", math.inf)
_ENDED = Trouble("another process is where it was", "look at its output first", math.inf)

_td: Any = torch.distributed


def meet_over_torch(host: str, port: int, rank: int, timeout: float) -> TCPStore:
    """Return a store that all ranks share whose agents run torch's at this address."""
    board = _td.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    if rank == 0:
        return _serve(board, host, port, timeout)
    return _find(board, rank, timeout)


def _serve(board: Any, host: str, port: int, timeout: float) -> TCPStore:
    address, token = own_address(host, port), secret.token()
    secret.warn_without(address, "what guards this job's store is in torchrun's, open to all")
    mixed = secret.mixed(token)
    store = TCPStore(address, 0, is_master=True, timeout=timeout, secret=mixed)
    place = {
        "address": address,
        "port": store.port,
        "token": token,
        "network": network(),
        "host": socket.gethostname(),
    }
    board.set(_KEY, json.dumps(place))
    return store


def _find(board: Any, rank: int, timeout: float) -> TCPStore:
    search = Search(rank, timeout)
    while True:
        if not board.check([_KEY]):
            search.meet(_UNWRITTEN)
            time.sleep(_LOOK)
            continue
        place = json.loads(bytes(board.get(_KEY)))
        host, port = place["address"], place["port"]
        if is_loopback(host) and place["network"] != network():
            search.meet(
                Trouble(
                    f"it is at {host}:{port} on host '{place['host']}', which is every host's own",
                    "give that host another name or address (--master-addr, --local-addr, "
                    "/etc/hosts)",
                    ASTRAY,
                )
            )
            time.sleep(_LOOK)
            continue
        try:
            limit = max(min(search.left, _CONNECT_SECONDS), 0.0)
            store = TCPStore(host, port, timeout=limit, secret=secret.mixed(place["token"]))
        except DistNetworkError as error:
            # Unless this is of ranks that have ended, and rank 0 is about to write anew.
            refused = Trouble(str(error), "look at the environment of both ranks", ASTRAY)
            ended = refused if secret.is_about_secrets(error) else _ENDED
            search.meet(describe(host, port, False) or ended)
            time.sleep(_LOOK)
            continue
        store.set_timeout(timeout)
        return store
