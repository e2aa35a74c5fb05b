"""How a rank gets to the store of rank 0, and what it says when it does not get there.

A store that is not there yet is waited for, as long as the caller likes. What cannot become better
by waiting is an error within seconds: a name that nobody knows, an address that means another host
to each, a host that does not answer at all. What may is a warning.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from typing import NamedTuple

from phalanx import logs
from phalanx.errors import DistNetworkError
from phalanx.stores.addresses import is_address, is_loopback, way_to
from phalanx.stores.tcp import TCPStore

_log = logs.area("store")

_PATIENCE = 5.0  # seconds until something is said, and from then on between two looks
_NAMELESS = 10.0  # seconds for a name to get an address
ASTRAY = 20.0  # for somebody to listen on this host, if rank 0 is said to be on another
_SILENT = 60.0  # for a host to answer anything at all
_KNOCK = 2.0  # for one answer


def arrive(
    host: str, port: int, rank: int, timeout: float, hosts: bool, secret: str | None = None
) -> TCPStore:
    """Return the store at an address, which rank 0 runs; `hosts`: ranks are on several hosts."""
    if rank == 0:
        return _serve(host, port, timeout, hosts)
    search = Search(rank, timeout)
    while True:
        try:
            limit = min(_PATIENCE, search.left)
            store = TCPStore(host, port, timeout=max(limit, 0.0), secret=secret)
        except DistNetworkError:
            trouble = describe(host, port, hosts)
            if trouble is None:  # somebody is there who is not a store, or keeps another secret
                raise
            search.meet(trouble)
        else:
            store.set_timeout(timeout)
            return store


class Search:
    """A rank's search for rank 0: what it says of troubles on its way, and when it gives up."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._me = f"rank {rank} on host '{socket.gethostname()}'"
        self._timeout = timeout
        self._start = time.monotonic()
        self._said: Trouble | None = None

    @property
    def left(self) -> float:
        """The seconds that it may still take."""
        return self._timeout - (time.monotonic() - self._start)

    def meet(self, trouble: Trouble) -> None:
        """Raise what has been in the way for too long; warn of it, once, if it is new."""
        spent = self._timeout - self.left
        most = min(trouble.patience, self._timeout)
        if spent >= most - 0.5:
            raise DistNetworkError(
                f"{self._me} has not reached rank 0 in {spent:.0f} s: {trouble.fact}; "
                f"{trouble.advice}"
            ) from None
        if spent >= min(_PATIENCE, most) and trouble != self._said:
            self._said = trouble
            _log.warning(
                "%s does not reach rank 0: %s; %s; it goes on trying for up to %g s",
                self._me,
                *trouble[:2],
                most,
            )


def _serve(host: str, port: int, timeout: float, hosts: bool) -> TCPStore:
    listener = -1
    if hosts and not is_address(host) and host != "localhost" and _leads_here(host, port):
        # Here the name means this host alone; to others it is an address of another interface.
        listener = socket.create_server(("", port), reuse_port=False).detach()
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=None if listener < 0 else listener,
    )


def _leads_here(host: str, port: int) -> bool:
    """Say whether a host is, for this one, the loopback."""
    way = way_to(host, port)
    return bool(way) and is_loopback(way)


class Trouble(NamedTuple):
    """Why nobody is reached at an address."""

    fact: str
    advice: str
    patience: float  # for how many seconds it may be so before it is an error


def describe(host: str, port: int, hosts: bool) -> Trouble | None:
    """Say why nobody is reached at an address; None if somebody is."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return Trouble(
            f"the host '{host}' has no address here ({error.strerror})",
            f"give an address in its place (MASTER_ADDR), or see to the name: getent hosts {host}",
            _NAMELESS,
        )
    if address != host:
        where += f" ({address})"
    try:
        socket.create_connection((host, port), timeout=_KNOCK).close()
    except OSError as error:
        if error.errno != errno.ECONNREFUSED:
            return Trouble(
                f"{where} does not answer ({error.strerror or error}): the host is down, or "
                f"something between the two drops what is sent to port {port}",
                "open it in the firewall, or choose another (MASTER_PORT); phalanx doctor --hosts "
                "tells which hosts reach each other",
                _SILENT,
            )
        if _leads_here(host, port):
            advice = (
                "set MASTER_ADDR on all hosts to an address of rank 0's host that the others can "
                "reach"
            )
            return Trouble(
                f"{where} is this host itself, where nobody listens",
                advice if hosts else f"see whether rank 0 has begun; if on another host, {advice}",
                ASTRAY if hosts else math.inf,
            )
        return Trouble(
            f"nobody listens at {where}",
            "see whether rank 0 has begun, and runs on that host; its host may know its own name "
            "as a loopback address (/etc/hosts)",
            math.inf,
        )
    return None
