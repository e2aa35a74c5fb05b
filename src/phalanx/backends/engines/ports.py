"""The port at which Gloo listens, as far as its owner can see to it from outside.

Gloo takes every connection that comes, for as long as the group lives. One that is not of the group
costs a descriptor until the end, and the process ends when there are none left.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress

from phalanx import logs

_log = logs.area("engines")

_SO_ATTACH_FILTER = 26  # of linux/socket.h
# A program of one instruction for the kernel's packet filter (linux/filter.h): drop everything.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
_SPARE = 512  # descriptors beside those of the group, for who connects by mistake meanwhile


def raise_limit(need: int) -> None:
    """Let the process have this many descriptors more than it has open, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = len(os.listdir("/proc/self/fd")) + need + _SPARE
    if soft != resource.RLIM_INFINITY and soft < want:
        most = want if hard == resource.RLIM_INFINITY else min(want, hard)
        if most > soft:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Door:
    """The listening socket of a Gloo device at an address. Its port is in what Gloo tells peers."""

    def __init__(self, address: str) -> None:
        self._host = address.partition("%")[0]
        is_v6 = ":" in address
        self._family = socket.AF_INET6 if is_v6 else socket.AF_INET
        packed = socket.inet_pton(self._family, self._host)
        between = b".{4}" if is_v6 else b""  # the flow, in a sockaddr_in6
        start = re.escape(struct.pack("H", self._family))
        self._pattern = re.compile(start + b"(..)" + between + re.escape(packed), re.DOTALL)
        self._port = 0

    def read(self, told: bytes) -> None:
        """Learn the port from what Gloo tells the group's other ranks."""
        if found := self._pattern.search(told):
            self._port = int.from_bytes(found[1], "big")

    def hang_up(self, members: set[str]) -> str:
        """End all connections that came in here; say from where, unless members are there too."""
        found = set()
        for each in self._sockets():
            with suppress(OSError):  # of a socket that listens, and has no peer
                found.add(each.getpeername()[0])
                each.shutdown(socket.SHUT_RDWR)
        strange = sorted(found - members - {self._host})
        return f" (connected from {', '.join(strange)})" if strange else ""

    def shut(self) -> None:
        """Let nobody connect any more; connections that are there remain."""
        program = ctypes.create_string_buffer(_DROP, len(_DROP))
        filtered = struct.pack("HP", 1, ctypes.addressof(program))
        why = "not found"
        for each in self._sockets():
            try:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)
                    return
            except OSError as error:
                why = str(error)
        _log.info("Gloo's port %d at %s stays open to all: %s", self._port, self._host, why)

    def _sockets(self) -> Iterator[socket.socket]:
        """Yield the sockets of this process at the port, as long as the caller looks at them."""
        for number in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):  # latest first
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                # A copy: other threads may close theirs meanwhile.
                with socket.socket(fileno=os.dup(number)) as each:
                    if each.family == self._family and each.getsockname()[:2] == (
                        self._host,
                        self._port,
                    ):
                        yield each
