"""How ranks of torchrun on several hosts meet: the one module here that uses torch.distributed.

torchrun's agent runs a store of torch's, which all its ranks can reach. Rank 0 runs one of ours
beside it and writes there where. The agent may start its ranks again, with the same store: what it
holds then is of ranks that have ended, and nobody answers there who knows the secret.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed

from phalanx.errors import DistNetworkError, StoreTimeout
from phalanx.stores.addresses import is_loopback, network, own_address
from phalanx.stores.tcp import TCPStore

_KEY = "phalanx/store"
_CONNECT_SECONDS = 5.0  # for one try; a server that is there answers at once
_LOOK = 0.05  # seconds between two looks at what rank 0 has written

_td: Any = torch.distributed


def meet_over_torch(host: str, port: int, rank: int, timeout: float) -> TCPStore:
    """Return a store that all ranks share whose agents run torch's at this address."""
    board = _td.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    if rank == 0:
        return _serve(board, host, port, timeout)
    return _find(board, rank, timeout)


def _serve(board: Any, host: str, port: int, timeout: float) -> TCPStore:
    address, secret = own_address(host, port), secrets.token_hex(32)
    store = TCPStore(address, 0, is_master=True, timeout=timeout, secret=secret)
    place = {
        "address": address,
        "port": store.port,
        "secret": secret,
        "network": network(),
        "host": socket.gethostname(),
    }
    board.set(_KEY, json.dumps(place))
    return store


def _find(board: Any, rank: int, timeout: float) -> TCPStore:
    deadline = time.monotonic() + timeout
    tried, last = b"", "rank 0 has not written where it is"
    while (left := deadline - time.monotonic()) > 0:
        if not board.check([_KEY]) or (told := bytes(board.get(_KEY))) == tried:
            time.sleep(min(_LOOK, left))
            continue
        tried = told
        place = json.loads(told)
        where = f"{place['address']}:{place['port']} on host '{place['host']}'"
        if is_loopback(place["address"]) and place["network"] != network():
            last = (
                f"rank 0 is at {where}: that is every host's own address; give that host another "
                "name or address (--master-addr, --local-addr, /etc/hosts)"
            )
            continue
        try:
            limit = min(left, _CONNECT_SECONDS)
            store = TCPStore(place["address"], place["port"], timeout=limit, secret=place["secret"])
        except DistNetworkError as error:
            last = f"rank 0 is at {where}, and: {error}"
            continue
        store.set_timeout(timeout)
        return store
    raise StoreTimeout(f"rank {rank} did not reach rank 0 within {timeout:g} s: {last}")
