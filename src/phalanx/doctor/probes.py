"""What one host finds out about another by connecting to it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import NamedTuple

_TRY = 3.0  # seconds for a connection, and for one answer
_PINGS = 20
_STREAM = 0.3  # seconds of sending
_CHUNK = bytes(1 << 18)
_BUFFER = 1 << 20  # bytes that may be under way: on a slow link they take their time
_DRAIN = 15.0  # seconds for those

_PING, _FLOW = b"p", b"s"
_TIME, _FLOWN = struct.Struct("!d"), struct.Struct("!Qd")


class Ping(NamedTuple):
    """How far away another host is."""

    seconds: float  # there and back
    ahead: float  # by how much its clock is ahead of ours


class Listener:
    """Answers the probes of other hosts on a port that the system chooses."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="phalanx-doctor", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(peer,), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _answer(peer: socket.socket) -> None:
    with peer, suppress(OSError):
        peer.settimeout(_DRAIN)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while command := peer.recv(1):
            if command == _PING:
                peer.sendall(_TIME.pack(time.time()))
                continue
            total, start = 0, time.monotonic()
            while taken := len(peer.recv(1 << 20)):
                total += taken
            peer.sendall(_FLOWN.pack(total, time.monotonic() - start))


def ping(address: str, port: int) -> Ping:
    """Send a byte there and back some times; return the best of it. OSError if nobody answers."""
    best = Ping(float("inf"), 0.0)
    with socket.create_connection((address, port), timeout=_TRY) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            start, clock = time.perf_counter(), time.time()
            peer.sendall(_PING)
            (theirs,) = _TIME.unpack(_receive(peer, _TIME.size))
            seconds = time.perf_counter() - start
            if seconds < best.seconds:
                best = Ping(seconds, theirs - clock - seconds / 2)
    return best


def stream(address: str, port: int) -> float:
    """Send as much as goes through in a while; return bytes per second. OSError if it stalls."""
    with socket.create_connection((address, port), timeout=_TRY) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        peer.sendall(_FLOW)
        end = time.monotonic() + _STREAM
        while time.monotonic() < end:
            peer.sendall(_CHUNK)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(_DRAIN)
        total, seconds = _FLOWN.unpack(_receive(peer, _FLOWN.size))
    return float(total / max(seconds, 1e-9))


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def reason(error: OSError) -> str:
    """Say in a few words why a probe failed."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_TRY:g} s"
    return error.strerror or str(error)
