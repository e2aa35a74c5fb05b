"""Checks of names, interfaces and ports: how processes find each other at the start."""

from __future__ import annotations

import time
from collections.abc import Iterator

from phalanx.doctor.findings import Host, Said, good, problem, warning

_SLOW = 0.5  # seconds for a name
_UP = 1  # IFF_UP


def hostname(host: Host) -> Iterator[Said]:
    """Look this machine's own name up, as launchers do."""
    name = host.hostname
    mend = f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"
    start = time.monotonic()
    try:
        addresses = host.resolve(name)
    except OSError as error:
        yield warning(
            f"'{name}' has no address ({error.strerror or error}): torchrun and Gloo look it up",
            mend,
        )
        return
    seconds = time.monotonic() - start
    where = ", ".join(addresses)
    if seconds > _SLOW:
        yield warning(f"'{name}' is {where}; the answer took {seconds:.1f} s", mend)
    elif all(_is_loopback(address) for address in addresses):
        yield good(f"'{name}' is {where}: reached from this machine only")
    else:
        yield good(f"'{name}' is {where}")


def localhost(host: Host) -> Iterator[Said]:
    """Look up the name under which ranks of one machine meet by default."""
    mend = "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts"
    try:
        addresses = host.resolve("localhost")
    except OSError as error:
        yield problem(f"'localhost' has no address ({error.strerror or error})", mend)
        return
    if not all(_is_loopback(address) for address in addresses):
        yield problem(f"'localhost' is {', '.join(addresses)}", mend)
    else:
        yield good(f"'localhost' is {', '.join(addresses)}")


def interfaces(host: Host) -> Iterator[Said]:
    """List the interfaces that are up; without the loopback no rank meets another by TCP."""
    found = {}
    for folder in host.glob("/sys/class/net/*"):
        flags = host.text(f"/sys/class/net/{folder.name}/flags")
        if flags is not None:
            found[folder.name] = bool(int(flags, 16) & _UP)
    if "lo" not in found:
        yield good("unknown: the system lists no loopback")
    elif not found["lo"]:
        yield problem("the loopback is down", "sudo ip link set lo up")
    else:
        yield good(", ".join(name for name, up in found.items() if up) + " up")
    wanted = host.environment.get("GLOO_SOCKET_IFNAME")
    if wanted and not found.get(wanted):
        yield warning(
            f"GLOO_SOCKET_IFNAME={wanted}, which is not an interface that is up",
            "unset GLOO_SOCKET_IFNAME",
        )


def ports(host: Host) -> Iterator[Said]:
    """Open ports and connect to them, on the loopback and on each interface with an address."""
    from phalanx.stores import addresses  # which brings torch

    try:
        host.connect("127.0.0.1")
        yield good("ports can be opened on 127.0.0.1 and reached")
    except OSError as error:
        yield problem(
            f"no port on 127.0.0.1 can be used: {error}",
            "see that the loopback is up (sudo ip link set lo up) and that no firewall forbids it "
            "(sudo iptables -I INPUT -i lo -j ACCEPT)",
        )
    for folder in host.glob("/sys/class/net/*"):
        address = None if folder.name == "lo" else addresses.address_of(folder.name)
        if address is None:
            continue
        try:
            host.connect(address)
            yield good(f"ports can be opened on {address} ({folder.name}) and reached")
        except OSError as error:
            yield warning(
                f"no port on {address} ({folder.name}) can be used: {error}",
                "export MASTER_ADDR=127.0.0.1, or let the firewall allow it",
            )
    span = (host.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(span) == 2 and int(span[1]) - int(span[0]) < 1000:
        yield warning(
            f"only {int(span[1]) - int(span[0]) + 1} ports are free to choose from",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )


def leftovers(host: Host) -> Iterator[Said]:
    """Find variables of another job that would lead a program astray."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    found = [name for name in names if name in host.environment]
    if found:
        values = " ".join(f"{name}={host.environment[name]}" for name in found)
        yield warning(
            f"{values}: a program started by hand takes itself for a rank and waits for others",
            f"unset {' '.join(found)}",
        )
    if host.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: every operation is checked on all ranks first",
            "unset TORCH_DISTRIBUTED_DEBUG, once the bug is found",
        )
    if not found:
        yield good("no rank, size or address of another job is set")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
