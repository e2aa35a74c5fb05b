"""At which address other hosts reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from phalanx.errors import DistNetworkError

_SIOCGIFADDR = 0x8915  # of linux/sockios.h


def way_to(host: str, port: int) -> str:
    """Return the own address of the interface that leads to a host; "" if none does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(place)  # sends nothing, but chooses the interface
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def host_address() -> str:
    """Return the address of this host's name, or else of the interface to everywhere.

    The loopback's if there is no other.
    """
    for host in (socket.gethostname(), "192.0.2.1", "2001:db8::1"):
        address = way_to(host, 9)
        if address and not is_loopback(address):
            return address
    return "127.0.0.1"


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
            raise DistNetworkError(
                f"host {socket.gethostname()!r} has no interface {name!r} with an IPv4 address "
                f"(interfaces: {known}): {error.strerror}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def is_loopback(address: str) -> bool:
    """Say whether an address means, on every host, that host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network() -> str:
    """Name the network that this process sees: whoever has another has another loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
