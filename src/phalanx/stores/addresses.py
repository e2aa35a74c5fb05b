"""At which address other hosts reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
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


def own_address(host: str, port: int) -> str:
    """Return at which address those reach this host who reach a server at another address.

    A name may lead to the server's host itself by its loopback, and to everybody else by another
    way.
    """
    reached = way_to(host, port)
    if reached and (is_address(host) or host == "localhost" or not is_loopback(reached)):
        return reached
    return host_address()


def host_address() -> str:
    """Return the address of this host's name, or of the interface to everywhere, or of any.

    The loopback's if there is no other.
    """
    for host in (socket.gethostname(), "192.0.2.1", "2001:db8::1"):
        address = way_to(host, 9)
        if address and not is_loopback(address):
            return address
    return next((each for each in interfaces().values() if not is_loopback(each)), "127.0.0.1")


def interfaces() -> dict[str, str]:
    """Return the interfaces of this host that have an IPv4 address, with it."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface that the user has chosen."""
    address = address_of(name)
    if address is None:
        known = ", ".join(f"{other} {where}" for other, where in interfaces().items())
        raise DistNetworkError(
            f"host {socket.gethostname()!r} has no interface {name!r} with an IPv4 address "
            f"(interfaces: {known})"
        )
    return address


def address_of(name: str) -> str | None:
    """Return the IPv4 address of an interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def is_address(host: str) -> bool:
    """Say whether a host is given as an address rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Say whether an address means, on every host, that host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network() -> str:
    """Name the network that this process sees: whoever has another has another loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
