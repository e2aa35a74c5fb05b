"""Predict what all_reduce and a training step cost on more hosts than there are here.

A model of messages, bytes and additions is fitted to this package's own times on one machine. Link
and latency are those of the network that is planned for. What the model leaves out, and how far it
is off where it can be checked, is in docs/scale.md.
"""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.backends.hierarchy.choices import SMALL
from phalanx.bench.command import PICTURES
from phalanx.bench.results import parse_bytes, readable_bytes, readable_seconds
from phalanx.commands import CommandError
from phalanx.debug.text import table
from phalanx.plan.model import ALGORITHMS, MEASURED, Layout, Link, Machine, Model, best

EXAMPLES = [
    ("phalanx plan --hosts 100 --ranks-per-host 8", "all_reduce of 64 MiB on 800 ranks"),
    ("phalanx plan --hosts 16 --link 100gbit --latency 5us", "another network"),
    ("phalanx plan --hosts 16 --bytes 500M --compute 0.2", "a step of DDP: 0.2 s without network"),
    ("phalanx plan --measure machine.json", "measure this machine (takes a minute; Linux, root)"),
    ("phalanx plan --hosts 16 --machine machine.json", "and plan with what was measured"),
    ("phalanx plan --hosts 16 --plot plan.png", "draw time over bytes, and over hosts"),
]

MOST_HOSTS, MOST_RANKS = 100_000, 1024
SCAN = [4**power for power in range(1, 16)]  # bytes: 4 B to 1 GiB
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=_count(2, MOST_HOSTS), default=2, metavar="N", help="hosts (default 2)")
    told = "ranks on each host (default 8)"
    add("--ranks-per-host", type=_count(1, MOST_RANKS), default=8, metavar="M", help=told)
    told = "of the tensor, or of all gradients (default 64M)"
    add("--bytes", type=_bytes, default=64 << 20, metavar="SIZE", help=told)
    told = "what each host's link carries each way (default 10gbit)"
    add("--link", type=_rate, default=10e9 / 8, metavar="RATE", help=told)
    told = "from host to host, one way (default 50us)"
    add("--latency", type=_time, default=50e-6, metavar="TIME", help=told)
    told = "forward, backward and optimizer of one rank: predict a step of DDP"
    add("--compute", type=_time, metavar="TIME", help=told)
    told = "what --measure wrote (default: the machine of docs/scale.md)"
    add("--machine", type=Path, metavar="FILE", help=told)
    told = "measure this machine into a file, and do nothing else"
    add("--measure", type=Path, metavar="FILE", help=told)
    add("--plot", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf")
    told = "write every number (default to stdout)"
    add("--json", nargs="?", const="-", metavar="FILE", help=told)


def run(arguments: Namespace) -> int:
    _check_outputs(arguments)
    if arguments.measure:
        return _measure(arguments)
    machine = _machine(arguments)
    layout = Layout(arguments.hosts, arguments.ranks_per_host)
    model = Model(machine, Link(arguments.link, arguments.latency), layout)
    found = predictions(model, arguments.bytes, arguments.compute)
    if arguments.json == "-":
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_describe(model, found)))
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plot:
        from phalanx.plan.plots import draw

        draw(arguments.plot, model, arguments.bytes)
    return 0


def _check_outputs(arguments: Namespace) -> None:
    """Find out before a measurement that it cannot be kept."""
    if arguments.plot and arguments.plot.suffix.lower() not in PICTURES:
        raise CommandError(
            f"cannot draw into {str(arguments.plot)!r}: end it with .png, .svg or .pdf"
        )
    for path in (arguments.measure, arguments.plot, arguments.json):
        if path not in (None, "-"):
            try:
                open(path, "a").close()
            except OSError as error:
                raise CommandError(f"cannot write to {str(path)!r}: {error.strerror}") from None


def _machine(arguments: Namespace) -> Machine:
    if arguments.machine is None:
        return MEASURED
    from phalanx.plan.fitting import read

    return read(arguments.machine)


def _measure(arguments: Namespace) -> int:
    from phalanx.plan import fitting
    from phalanx.testing.hosts import Hosts

    if reason := Hosts.unavailable():
        raise CommandError(f"hosts to measure cannot be made on this machine: {reason}")

    def say(text: str) -> None:
        print(f"measuring {text}", file=sys.stderr)

    machine, samples = fitting.measure_machine(min(arguments.ranks_per_host, 8), say)
    fitting.write(machine, samples, arguments.measure)
    print(f"wrote {arguments.measure}")
    return 0


def predictions(model: Model, num_bytes: int, compute: float | None) -> dict[str, Any]:
    """Return all numbers of a plan; times in seconds, by algorithm."""
    times = {name: call(model, num_bytes) for name, call in ALGORITHMS.items()}
    found: dict[str, Any] = {
        "hosts": model.layout.hosts,
        "ranks_per_host": model.layout.ranks_per_host,
        "bytes": num_bytes,
        "link_bytes_per_second": model.link.rate,
        "latency": model.link.latency,
        "all_reduce": times | {"phalanx": model.phalanx(num_bytes)},
        "limit": model.limit(num_bytes),
        "fastest": best(model, num_bytes),
        "fastest_up_to": winners(model),
    }
    if compute is not None:
        found["compute"] = compute
        found["training_step"] = {
            "phalanx": model.training_step(num_bytes, compute, model.phalanx),
            "flat ring": model.training_step(num_bytes, compute, model.flat_ring),
        }
    return found


def winners(model: Model) -> list[tuple[int, str]]:
    """Return which algorithm is the fastest up to which size, of those in SCAN."""
    found: list[tuple[int, str]] = []
    for num_bytes in SCAN:
        name = best(model, num_bytes)
        if found and found[-1][1] == name:
            found.pop()
        found.append((num_bytes, name))
    return found


def _describe(model: Model, found: dict[str, Any]) -> list[str]:
    layout, times = model.layout, found["all_reduce"]
    chosen = "one rank per host" if found["bytes"] <= SMALL else "a slice per rank"
    rows = [["all_reduce of " + readable_bytes(found["bytes"]), "time", "of what is possible", ""]]
    for name in ALGORITHMS:
        notes = ["fastest"] if name == found["fastest"] else []
        if name == chosen:
            notes.append("what Phalanx does")
        share = f"{found['limit'] / times[name]:.0%}"
        rows.append([name, readable_seconds(times[name]), share, ", ".join(notes)])
    rows.append(["the network's limit", readable_seconds(found["limit"]), "", ""])
    lines = [
        f"{layout.hosts} hosts x {layout.ranks_per_host} ranks = {layout.size} ranks; links of "
        f"{model.link.rate * 8 / 1e9:g} Gbit/s, {readable_seconds(model.link.latency)}",
        "",
        *table(rows),
        "",
        "fastest: " + "; ".join(_ranges(found["fastest_up_to"])),
    ]
    if "training_step" in found:
        steps = found["training_step"]
        lines += [
            "",
            f"a step of DDP that computes for {readable_seconds(found['compute'])}: "
            f"{readable_seconds(steps['phalanx'])}, with a flat ring "
            f"{readable_seconds(steps['flat ring'])}",
        ]
    return lines


def _ranges(found: list[tuple[int, str]]) -> list[str]:
    *parts, (_, last) = found
    return [f"{name} up to {readable_bytes(size)}" for size, name in parts] + [
        f"{last} beyond" if parts else f"{last} at every size"
    ]


def _count(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdigit() or not least <= int(text) <= most:
            raise ArgumentTypeError(f"a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return read


def _bytes(text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if found == 0:
        raise ArgumentTypeError("at least 1 byte")
    return found


def _rate(text: str) -> float:
    """Read "10gbit" as bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ArgumentTypeError(f"a rate such as 25gbit or 100mbit, got {text!r}")
    return float(match[1]) * _BITS[match[2].lower()] / 8


def _time(text: str) -> float:
    """Read "50us", "1.5ms", or a number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us|µs|ns)?", text.strip())
    if not match or not math.isfinite(float(match[1])):
        raise ArgumentTypeError(f"a time such as 50us, 1.5ms or 0.2, got {text!r}")
    return float(match[1]) * _SECONDS[match[2] or "s"]
