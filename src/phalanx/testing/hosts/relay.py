"""The switch between hosts as a program: it can delay, lose and refuse what it forwards.

This file runs as a script in the switch's network namespace, where the ports are out of the bridge,
and needs nothing of the kernel but packet sockets. Its orders come as lines of JSON on stdin.
Segments that the sender's kernel leaves to the network card stay whole.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import sys
import time
from typing import Any

_ALL_PROTOCOLS = 3
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_HEADER = 10  # what the kernel says of checksums and segments, before each frame
_BUFFER = 64 << 20
_LARGEST = _HEADER + 14 + 65536
_AT_ONCE = 64  # frames taken from one port before the others have their turn
_SYN, _ACK = 2, 16


class Relay:
    """Forwards frames between the ports of a switch."""

    def __init__(self, ports: list[str]) -> None:
        self.ports = [_open(name) for name in ports]
        self.where: dict[bytes, socket.socket] = {}  # by address of the sender
        self.on_their_way: list[tuple[float, int, socket.socket, bytes]] = []
        self.count = itertools.count()
        self.orders: dict[str, Any] = {"delay": 0.0, "loss": 0.0, "open_ports": None}
        self.random = random.Random(0)  # the same losses in every run, as far as packets are

    def obey(self, orders: dict[str, Any]) -> None:
        self.orders = orders

    def take(self, port: socket.socket) -> None:
        """Take what has arrived at a port, and decide what becomes of it."""
        for _ in range(_AT_ONCE):
            try:
                frame = port.recv(_LARGEST)
            except (BlockingIOError, OSError):  # nothing more, or the port is down
                return
            self.where[frame[_HEADER + 6 : _HEADER + 12]] = port
            if self.random.random() < self.orders["loss"] or self.refuses(frame):
                continue
            there = self.where.get(frame[_HEADER : _HEADER + 6])
            due = time.monotonic() + self.orders["delay"]
            for out in [there] if there else self.ports:
                if out is not port:
                    heapq.heappush(self.on_their_way, (due, next(self.count), out, frame))

    def refuses(self, frame: bytes) -> bool:
        """Tell whether a frame asks for a TCP connection to a port that is not open."""
        if self.orders["open_ports"] is None:
            return False
        packet = frame[_HEADER + 14 :]
        if frame[_HEADER + 12 : _HEADER + 14] != b"\x08\x00" or packet[9] != socket.IPPROTO_TCP:
            return False
        segment = packet[4 * (packet[0] & 15) :]
        if segment[13] & (_SYN | _ACK) != _SYN:
            return False
        return struct.unpack("!H", segment[2:4])[0] not in self.orders["open_ports"]

    def forward(self) -> float | None:
        """Send what is due, and return the seconds until more is."""
        while self.on_their_way:
            left = self.on_their_way[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, out, frame = heapq.heappop(self.on_their_way)
            try:
                out.send(frame)
            except OSError:  # its queue is full or its link is down: a switch drops it
                continue
        return None


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for kind, beyond_limits in ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32)):
        port.setsockopt(socket.SOL_SOCKET, kind, _BUFFER)
        with contextlib.suppress(PermissionError):  # root of a user namespace has what it has
            port.setsockopt(socket.SOL_SOCKET, beyond_limits, _BUFFER)
    port.setblocking(False)
    port.bind((name, _ALL_PROTOCOLS))
    return port


def main(keeper: int, ports: list[str]) -> None:
    """Forward until the keeper of the switch has ended, or stdin is closed."""
    relay, ended, orders = Relay(ports), os.pidfd_open(keeper), sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([ended, orders, *relay.ports], [], [], relay.forward())
        for one in ready:
            if isinstance(one, socket.socket):
                relay.take(one)
            elif one == ended:
                return
            elif line := sys.stdin.readline():
                relay.obey(json.loads(line))
                print("done", flush=True)
            else:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
