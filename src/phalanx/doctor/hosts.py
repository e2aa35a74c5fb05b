"""Checks between hosts: each runs the same command, they meet on the first, and try each other."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.commands import CommandError
from phalanx.doctor import probes
from phalanx.doctor.findings import Finding, Host
from phalanx.doctor.verdicts import judge
from phalanx.errors import DistError
from phalanx.stores import PrefixStore, Store, TCPStore, secret
from phalanx.stores.addresses import (
    host_address,
    interfaces,
    is_address,
    is_loopback,
    network,
    own_address,
    way_to,
)
from phalanx.stores.arrival import describe
from phalanx.stores.slurm import expand

PORT = 29400
JOB = "job"
_ROUNDS = 8  # of streams, each host to another at the same time
_STEP = 30.0  # seconds for all hosts to take one step


@dataclass
class Meeting:
    """This host among those that are examined."""

    store: Store
    names: list[str]
    me: int
    address: str
    closes_last: bool = False


def consult(asked: str, host: str | None, port: int, wait: float) -> Iterator[Finding]:
    """Examine the hosts of a list, or of the job that this process is a rank of.

    The first host's findings are about all; each other's about itself.
    """
    if asked == JOB:
        meeting = _in_job(wait)
        if meeting is None:  # another rank speaks for this host
            return
    else:
        try:
            names = expand(asked)
        except ValueError as error:
            raise CommandError(f"--hosts: {error}") from None
        me = _which(names, host)
        try:
            meeting = _at_first(names, me, port, wait)
        except DistError:
            yield _alone(names, me, port, wait)
            return
    with closing(probes.Listener(meeting.address)) as listener:
        reports = _reports(meeting, listener, wait)
        yield from judge(meeting.names, reports, None if meeting.me == 0 else meeting.me)


def _which(names: Sequence[str], host: str | None) -> int:
    """Return which of the hosts this one is."""
    if host is not None:
        if host not in names:
            raise CommandError(f"--host {host} is none of --hosts {','.join(names)}")
        return names.index(host)
    own = socket.gethostname()
    local = set(interfaces().values()) - {"127.0.0.1"}
    tests: list[Callable[[str], bool]] = [
        lambda name: name == own,
        lambda name: name.split(".")[0] == own.split(".")[0] and not is_address(name),
        lambda name: bool(local & set(_resolved(name))),
        lambda name: any(map(is_loopback, _resolved(name))),
    ]
    for fits in tests:
        for number, name in enumerate(names):
            if fits(name):
                return number
    raise CommandError(
        f"this host, '{own}' ({', '.join(sorted(local)) or 'no address'}), is none of "
        f"{', '.join(names)}; say which of them it is: --host NAME"
    )


def _resolved(name: str) -> list[str]:
    try:
        return Host().resolve(name)
    except OSError:
        return []


def _at_first(names: list[str], me: int, port: int, wait: float) -> Meeting:
    if me:
        store = TCPStore(names[0], port, timeout=wait)
        return Meeting(store, names, me, own_address(names[0], port))
    # On all addresses: to others this host's name may mean another than to itself.
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise CommandError(
            f"the hosts are to meet at port {port} here, which cannot be opened: {error.strerror}; "
            "choose another on all of them: --port"
        ) from None
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        master_listen_fd=listener.detach(),
        secret=secret.own(),  # open if there is none: for a moment, and for nothing but reports
    )
    return Meeting(store, names, me, own_address(names[0], port), closes_last=True)


def _alone(names: Sequence[str], me: int, port: int, wait: float) -> Finding:
    """Say why this host has not come to the meeting."""
    trouble = describe(names[0], port, hosts=True)
    strange = "what listens there is not a store of the same version and secret"
    advice = (
        f"run the same command on {names[0]}, at the same time; port {port} must be open there, "
        "or another: --port"
    )
    if is_loopback(way_to(names[0], port) or "0.0.0.0"):
        advice = "name the first host, in all commands, as the others know it: --hosts"
    return Finding(
        "meeting",
        "problem",
        f"{names[me]} has not reached {names[0]}, where the hosts meet, within {wait:g} s: "
        f"{trouble.fact if trouble else strange}",
        advice,
    )


def _in_job(wait: float) -> Meeting | None:
    """Meet as the ranks of a job do; one rank per host takes part."""
    from phalanx.stores.attendance import check_in
    from phalanx.stores.rendezvous import from_environment

    try:
        store, rank, size = from_environment(os.environ, {}, wait)
        check_in(store, rank, size, wait)
    except (ValueError, DistError) as error:
        raise CommandError(f"--hosts {JOB}: {error}") from None
    server = getattr(store, "_underlying_non_prefix_store", store)
    own = own_address(server.host, server.port) if isinstance(server, TCPStore) else host_address()
    store = PrefixStore("doctor", store)
    store.set(f"rank/{rank}", json.dumps([network(), socket.gethostname()]))
    told = [json.loads(store.get(f"rank/{each}")) for each in range(size)]
    first: dict[str, int] = {}
    for each, (where, _) in enumerate(told):
        first.setdefault(where, each)
    if first[network()] != rank:
        return None
    names = [told[each][1] for each in first.values()]
    return Meeting(store, names, list(first.values()).index(rank), own, closes_last=rank == 0)


def _reports(meeting: Meeting, listener: probes.Listener, wait: float) -> list[dict[str, Any]]:
    """Return what each host says of itself and has found out; nothing of those that did not come.

    All that came try each other at the same time, in rounds.
    """
    store, me, size = meeting.store, meeting.me, len(meeting.names)
    report = _self(meeting, listener.port)
    store.set(f"self/{me}", json.dumps(report))
    there = _arrived(store, "self", range(size), wait)
    if me == 0:  # all go by what the first host has seen
        store.set("there", json.dumps(there))
    store.wait(["there"], wait + _STEP)
    there = json.loads(store.get("there"))
    if me not in there:
        raise CommandError("this host came when the others had begun; run it on all hosts at once")
    seen = {each: json.loads(store.get(f"self/{each}")) for each in there}
    report["ways"] = {}
    order = there[there.index(me) + 1 :] + there[: there.index(me)]
    _together(store, "begin", there, me)
    for other in order:
        report["ways"][str(other)] = _ping(seen[other])
    for turn, other in enumerate(order[:_ROUNDS]):
        _together(store, f"turn{turn}", there, me)  # streams would be in the way of pings
        _stream(seen[other], report["ways"][str(other)])
    store.set(f"report/{me}", json.dumps(report))
    told = _arrived(store, "report", there, _STEP + 20.0 * len(there))
    found: list[dict[str, Any]] = [{} for _ in range(size)]
    for each in told:
        found[each] = json.loads(store.get(f"report/{each}"))
    with suppress(DistError):
        store.set(f"end/{me}", b"")
        if meeting.closes_last:
            _arrived(store, "end", there, 5.0)
    return found


def _ping(other: dict[str, Any]) -> dict[str, Any]:
    """Find out whether another host answers, and how quickly."""
    try:
        return probes.ping(other["address"], other["port"])._asdict()
    except OSError as error:
        return {"error": probes.reason(error)}


def _stream(other: dict[str, Any], way: dict[str, Any]) -> None:
    """Find out how much another host takes, if it answers at all."""
    if "error" not in way:
        try:
            way["rate"] = probes.stream(other["address"], other["port"])
        except OSError as error:
            way["stalled"] = probes.reason(error)


def _self(meeting: Meeting, port: int) -> dict[str, Any]:
    """Describe this host."""
    found = Host()
    device = next((name for name, at in interfaces().items() if at == meeting.address), "")
    versions = {"python": platform.python_version()}
    for package in ("phalanx", "torch"):
        if (version := found.version(package)) is not None:
            versions[package] = version.partition("+")[0]
    return {
        "host": found.hostname,
        "address": meeting.address,
        "port": port,
        "network": network(),
        "interface": device,
        "mtu": int(Path(f"/sys/class/net/{device}/mtu").read_text()) if device else None,
        "versions": versions,
        "names": {name: _resolved(name) for name in meeting.names},
    }


def _arrived(store: Store, what: str, whom: Sequence[int], seconds: float) -> list[int]:
    """Return who has set a key within some seconds."""
    limit = time.monotonic() + seconds
    found = []
    for each in whom:
        with suppress(DistError):
            store.wait([f"{what}/{each}"], max(limit - time.monotonic(), 0.01))
            found.append(each)
    return found


def _together(store: Store, what: str, whom: Sequence[int], me: int) -> None:
    store.set(f"{what}/{me}", b"")
    _arrived(store, what, whom, _STEP)
