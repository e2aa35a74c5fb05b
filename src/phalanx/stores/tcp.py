"""A store in a server process, reached over TCP."""

from __future__ import annotations

import sys
import threading
import time
import weakref

from phalanx import _native, forks, logs
from phalanx.errors import StoreTimeout
from phalanx.stores import secret as job_secret
from phalanx.stores.base import DEFAULT_TIMEOUT, Timeout, seconds
from phalanx.stores.core import CoreStore

_log = logs.area("store")

# Servers that further masters of this process may share (`multi_tenant`), by address.
_tenancies: weakref.WeakValueDictionary[tuple[str, int], _native.StoreServer] = (
    weakref.WeakValueDictionary()
)
_tenancies_lock = threading.Lock()
forks.renew(sys.modules[__name__], "_tenancies_lock", threading.Lock)
forks.after_fork_in_child(_tenancies.clear)  # the servers are the parent's


class TCPStore(CoreStore):
    """Keep keys in a server that the master process runs, in a native thread of its own.

    The server listens on `host_name` and nothing else. Port 0 picks a free one, to be read from
    `port`. If there is a `secret` (by default the environment variable PHALANX_SECRET), server and
    clients prove to each other that they know it before anything else is said; it proves identity
    and does not encrypt. A master without one warns if other hosts can reach it; `secret=""` says
    that this is meant.

    `set` returns when it is on its way: whatever is asked through this store next, in any thread,
    comes after it. All other operations return when they are done.

    A client keeps trying to connect for `timeout`. With `world_size` given and `wait_for_workers`,
    the master's constructor returns once that many processes, itself included, have connected.
    `multi_tenant` lets several masters of one process share the server of a port.
    Every thread of a client that waits has a connection of its own; where the master's descriptors
    do not suffice for all, it raises their soft limit (``ulimit -n``) up to the hard one.
    `master_listen_fd` is a listening socket to take over. `use_libuv` is accepted and changes
    nothing. The server ends with the last TCPStore of the master that uses it.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: str | None = None,
    ) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"TCPStore: port must be from 0 to 65535, not {port}")
        if port == 0 and not is_master:
            raise ValueError("TCPStore: port 0 is for the master; a client needs the port it chose")
        is_told = secret is not None
        if secret is None:
            secret = job_secret.own()
        self._host = host_name
        self._server: _native.StoreServer | None = None
        if is_master:
            fd = -1 if master_listen_fd is None else master_listen_fd
            is_open = not secret and not is_told
            where = job_secret.listening_address(host_name, master_listen_fd) if is_open else ""
            self._server = _serve(host_name, port, secret, fd, multi_tenant)
            port = self._server.port
            if is_open:
                job_secret.warn_without(where, f"the store at {host_name}:{port} has no secret")
            _log.info("serving a store at %s:%d", host_name, port)
        self._port = port
        _log.debug("connecting to the store at %s:%d", host_name, port)
        super().__init__(_native.StoreClient(host_name, port, secret, seconds(timeout)))
        self._seconds = seconds(timeout)
        _log.info("connected to the store at %s:%d", host_name, port)
        if wait_for_workers and world_size is not None and world_size > 0:
            self._gather(world_size, is_master)

    def _gather(self, world_size: int, is_master: bool) -> None:
        """Count this process in; as the master, wait until all have come."""
        start = time.monotonic()
        if self.add("init/", 1) == world_size:
            self.queue_push("init/", b"")  # a queue: not one more key for users to see
        if not is_master:
            return
        try:
            self.queue_pop("init/")
        except StoreTimeout:
            arrived = self.add("init/", 0)
            raise StoreTimeout(
                f"TCPStore on {self._host}:{self._port}: {arrived} of {world_size} processes came "
                f"within {time.monotonic() - start:.3g} s; look at those that did not start"
            ) from None

    @property
    def host(self) -> str:
        """The host name that the server listens on."""
        return self._host

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._port

    @property
    def libuvBackend(self) -> bool:
        """Whether the server is built on libuv: never."""
        return False

    def clone(self) -> TCPStore:
        twin = TCPStore.__new__(TCPStore)
        CoreStore.__init__(twin, self._core)
        twin._host, twin._port, twin._server = self._host, self._port, self._server
        twin._seconds = self._seconds
        return twin

    def __repr__(self) -> str:
        role = "master" if self._server else "client"
        return f"TCPStore({self._host!r}, {self._port}, {role})"


def _serve(
    host: str, port: int, secret: str, listen_fd: int, multi_tenant: bool
) -> _native.StoreServer:
    if not multi_tenant:
        return _native.StoreServer(host, port, secret, listen_fd)
    with _tenancies_lock:
        server = _tenancies.get((host, port))
        if server is None:
            server = _native.StoreServer(host, port, secret, listen_fd)
            _tenancies[host, server.port] = server
        return server
