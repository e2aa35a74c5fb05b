"""What the findings of several hosts about each other come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from phalanx.doctor.findings import Finding, Said, good, problem, warning
from phalanx.stores.addresses import is_loopback

_FAR = 0.001  # seconds there and back that are no longer those of a cluster
_SLOW = 0.5  # of the usual rate
_APART = 1.0  # seconds between clocks

Report = dict[str, Any]


def judge(names: Sequence[str], reports: Sequence[Report], only: int | None) -> Iterator[Finding]:
    """Say what is good and bad between hosts, by what each reports: {} if it did not come.

    With `only`, what is not good and concerns this host.
    """
    for check, ask in _CHECKS.items():
        for whom, said in ask(names, reports):
            if only is None or (only in whom and (said.grade != "good" or check == "meeting")):
                yield Finding(check, *said)


Verdicts = Iterator[tuple[set[int], Said]]


def _present(reports: Sequence[Report]) -> list[int]:
    return [each for each, report in enumerate(reports) if report]


def _meeting(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    there = _present(reports)
    missing = [names[each] for each in range(len(names)) if each not in there]
    if missing:
        yield (
            set(there),
            problem(
                f"{', '.join(missing)} did not come to {names[0]} in time",
                "run the same command there at the same time (--wait), and see what it says",
            ),
        )
    else:
        yield set(there), good(f"all {len(names)} hosts have met on {names[0]}")


def _same(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    by_network: dict[str, list[int]] = {}
    for each in _present(reports):
        by_network.setdefault(reports[each]["network"], []).append(each)
    for same in by_network.values():
        if len(same) > 1:
            yield (
                set(same),
                warning(
                    f"{' and '.join(names[each] for each in same)} are the same host",
                    "name each host once",
                ),
            )


def _names(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    there = _present(reports)
    fine = True
    for about, name in enumerate(names):
        seen: dict[tuple[str, ...], list[int]] = {}
        for each in there:
            found = tuple(reports[each]["names"][name])
            own = about == each
            if not found:
                fine = False
                yield (
                    {each, about},
                    problem(
                        f"{names[each]} finds no address for '{name}'",
                        f"add it to /etc/hosts there or to the name service, or use addresses: "
                        f"getent hosts {name}",
                    ),
                )
            elif own and all(map(is_loopback, found)):
                fine = False
                yield (
                    {each},
                    warning(
                        f"{name} knows itself as {found[0]}: a program that listens there is "
                        "reached by this host alone",
                        f"give it its address in /etc/hosts on {name}, or use addresses",
                    ),
                )
            elif not own and any(map(is_loopback, found)):
                fine = False
                yield (
                    {each, about},
                    problem(
                        f"{names[each]} takes '{name}' for itself ({found[0]})",
                        f"mend /etc/hosts on {names[each]}",
                    ),
                )
            elif not own:
                seen.setdefault(found, []).append(each)
        if len(seen) > 1:
            fine = False
            told = "; ".join(f"{', '.join(a)} on {names[each[0]]}" for a, each in seen.items())
            whom = {each for group in seen.values() for each in group}
            yield whom, warning(f"'{name}' has several addresses: {told}", "use addresses")
    if fine:
        yield set(there), good(f"{', '.join(names)}: all know all by name")


def _versions(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    there = _present(reports)
    for package in ("phalanx", "torch", "python"):
        seen: dict[str, list[int]] = {}
        for each in there:
            version = reports[each]["versions"].get(package, "a source tree")
            seen.setdefault(version, []).append(each)
        told = "; ".join(
            f"{version} on {', '.join(names[each] for each in hosts)}"
            for version, hosts in seen.items()
        )
        if len(seen) == 1:
            yield set(there), good(f"{package}: {next(iter(seen))} on all hosts")
        elif package == "python":
            yield set(there), warning(f"python: {told}", "objects may not travel: use one version")
        else:
            yield set(there), problem(f"{package}: {told}", "install the same on all hosts")


def _all_ways(reports: Sequence[Report]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for one in _present(reports):
        for other, way in reports[one]["ways"].items():
            yield one, int(other), way


def _ways(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    ways = list(_all_ways(reports))
    blocked = {(one, other): way["error"] for one, other, way in ways if "error" in way}
    for (one, other), why in blocked.items():
        if (other, one) not in blocked:
            back = "the other way it works"
        elif one < other:
            back = f"nor the other way ({blocked[other, one]})"
        else:
            continue  # told already
        here, there = _at(names, reports, one), _at(names, reports, other)
        yield (
            {one, other},
            problem(
                f"{here} cannot connect to {there}: {why}; {back}",
                "ports that programs choose themselves must be open between hosts, in both "
                "directions: see to the firewall; GLOO_SOCKET_IFNAME chooses another interface",
            ),
        )
    for one, other, way in ways:
        if "stalled" in way:
            yield (
                {one, other},
                problem(
                    f"from {names[one]} to {names[other]} small messages get through and large "
                    f"ones do not: {way['stalled']}",
                    "something between them drops large packets: give the interfaces a smaller MTU "
                    "(sudo ip link set DEVICE mtu 1400)",
                ),
            )
    if ways and not blocked:
        yield (
            set(_present(reports)),
            good(f"all {len(ways)} ways between {len(_present(reports))} hosts are open"),
        )


def _at(names: Sequence[str], reports: Sequence[Report], each: int) -> str:
    address = reports[each]["address"]
    return names[each] if names[each] == address else f"{names[each]} ({address})"


def _latency(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    times = {(a, b): way["seconds"] for a, b, way in _all_ways(reports) if "seconds" in way}
    if not times:
        return
    (one, other), worst = max(times.items(), key=lambda item: item[1])
    fact = f"{_span(median(times.values()))} there and back"
    if worst > _FAR:
        fact += f"; {_span(worst)} from {names[one]} to {names[other]}"
        advice = "small operations take as long: make them fewer; or use hosts that are closer"
        yield {one, other}, warning(fact, advice)
    else:
        yield {each for way in times for each in way}, good(fact)


def _bandwidth(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    rates = {(a, b): way["rate"] for a, b, way in _all_ways(reports) if "rate" in way}
    if not rates:
        return
    usual = median(rates.values())
    fact = f"about {_rate(usual)} in each direction, all hosts at once"
    slow = {way: rate for way, rate in rates.items() if rate < _SLOW * usual}
    if not slow:
        yield {each for way in rates for each in way}, good(fact)
    for (one, other), rate in slow.items():
        yield (
            {one, other},
            warning(
                f"from {names[one]} to {names[other]} about {_rate(rate)}; usual is {_rate(usual)}",
                "all hosts wait for the slowest: look at its link (ethtool), or leave it out",
            ),
        )


def _span(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def _mtu(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    seen: dict[int, list[int]] = {}
    for each in _present(reports):
        if reports[each]["mtu"] is not None:
            seen.setdefault(reports[each]["mtu"], []).append(each)
    whom = {each for hosts in seen.values() for each in hosts}
    told = "; ".join(
        f"{mtu} on {', '.join(names[each] for each in hosts)}" for mtu, hosts in seen.items()
    )
    if len(seen) > 1:
        yield whom, warning(f"the MTUs differ: {told}", "sudo ip link set DEVICE mtu, to one value")
    elif seen:
        yield whom, good(f"{next(iter(seen))} on all hosts")


def _clocks(names: Sequence[str], reports: Sequence[Report]) -> Verdicts:
    ahead = {(a, b): way["ahead"] for a, b, way in _all_ways(reports) if "ahead" in way}
    if not ahead:
        return
    (one, other), most = max(ahead.items(), key=lambda item: abs(item[1]))
    if abs(most) > _APART:
        yield (
            {one, other},
            warning(
                f"the clock of {names[other]} is {most:+.1f} s from that of {names[one]}: their "
                "logs cannot be compared",
                "let a time service set them: sudo chronyc makestep",
            ),
        )
    else:
        yield {each for way in ahead for each in way}, good(f"within {_span(abs(most))}")


_CHECKS = {
    "meeting": _meeting,
    "same host": _same,
    "names": _names,
    "versions": _versions,
    "ways": _ways,
    "latency": _latency,
    "bandwidth": _bandwidth,
    "mtu": _mtu,
    "clocks": _clocks,
}
NAMES = list(_CHECKS)
