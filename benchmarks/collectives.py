"""Measure every collective and send/recv beside the alternatives, in one run on one machine.

    python -m benchmarks.collectives --docs docs        # everything, about 20 minutes on 2 cores
    python -m benchmarks.collectives --quick            # a look, two or three minutes

How a number comes about:

- All ranks of all peers are started once and live for the whole run; whoever is not being measured
  blocks in a read. Each cell (operation, size, ranks) is checked for its result, warmed up, and
  then measured in rounds that take the peers in turn, so that a slow moment of the machine hits
  all of them alike.
- Ranks start together, released by a start line that belongs to the benchmark and not to any
  peer: before every call for large messages, before every batch of calls in a row up to 64 KiB.
- The time of a call is that of its slowest rank. p50 is the median over calls (small messages: over
  the means of batches) in the best round; p99 is over all calls of all rounds.
- send_recv is half a round trip between ranks 0 and 1, send_stream the time per message when rank 0
  sends many in a row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from . import report
from .measurement import Teams, measure
from .operations import OPERATIONS, Operation
from .peers import Peer, known_peers
from .results import parse_bytes, readable_bytes, readable_seconds


@dataclass(frozen=True)
class Plan:
    """Which cells are measured, and for how long.

    Worlds of more than two ranks, the crowds, get fewer sizes; of threads only all_reduce is asked.
    """

    operations: list[str]
    sizes: list[int]
    crowd_operations: list[str]
    crowd_sizes: list[int]
    processes: list[int]
    threads: list[int]
    budget: float  # seconds per cell and peer, over all rounds
    rounds: int

    def worlds(self) -> Iterator[tuple[str, int, list[str], list[int]]]:
        """Yield each world: kind and number of ranks, and the operations and sizes asked of it."""
        for size in self.processes:
            if size <= 2:
                yield "processes", size, self.operations, self.sizes
            else:
                yield "processes", size, self.crowd_operations, self.crowd_sizes
        for size in self.threads:
            yield "threads", size, ["all_reduce"], self.crowd_sizes


def byte_sizes(text: str) -> list[int]:
    return [parse_bytes(word) for word in text.split(",")]


FULL = Plan(
    operations=list(OPERATIONS),
    sizes=byte_sizes("8,256,4K,64K,256K,1M,4M,16M,64M,256M"),
    crowd_operations=list(OPERATIONS),
    crowd_sizes=byte_sizes("8,64K,1M,16M"),
    processes=[2, 4, 8],
    threads=[4, 16, 64],
    budget=0.6,
    rounds=3,
)
QUICK = Plan(
    operations=list(OPERATIONS),
    sizes=byte_sizes("8,64K,1M,16M"),
    crowd_operations=["all_reduce"],
    crowd_sizes=byte_sizes("8,64K,1M"),
    processes=[2, 4],
    threads=[4, 16],
    budget=0.2,
    rounds=2,
)


def choose_plan(options: argparse.Namespace) -> Plan:
    """Start from the quick or the full plan and narrow it to what was asked for."""
    asked = {
        "operations": options.operations,
        "crowd_operations": options.operations,
        "sizes": options.bytes,
        "crowd_sizes": options.bytes,
        "processes": options.processes,
        "threads": options.threads,
        "budget": options.budget,
        "rounds": options.rounds,
    }
    return replace(
        QUICK if options.quick else FULL,
        **{name: value for name, value in asked.items() if value is not None},
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    plan = choose_plan(options)
    peers = choose_peers(known_peers(options.mpi or [Path(sys.prefix)]), options.impl)
    about = {
        "command": command_line(sys.argv[1:] if arguments is None else arguments),
        "budget": plan.budget,
        "rounds": plan.rounds,
        "machine": machine(),
        "peers": {
            peer.name: {"title": peer.title, "kind": peer.kind, "version": peer.version}
            for peer in peers
        },
    }
    began = time.monotonic()
    results = run(plan, peers)
    data = {**about, "seconds": round(time.monotonic() - began, 1), "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    report.show(data)
    print(f"wrote {options.out}")
    if options.docs:
        report.write(data, options.docs)
    return 0


def run(plan: Plan, peers: list[Peer]) -> list[dict]:
    """Measure everything, saying so as it goes."""
    results = []
    for kind, size, names, sizes in plan.worlds():
        with Teams([peer for peer in peers if peer.kind == kind], size) as teams:
            for operation, num_bytes in cells(names, sizes):
                if row := measure(teams, operation, num_bytes, plan.budget, plan.rounds):
                    results += row
                    print(progress(row), flush=True)
    return results


def cells(names: list[str], sizes: list[int]) -> Iterator[tuple[Operation, int]]:
    for name in names:
        operation = OPERATIONS[name]
        for num_bytes in sizes if operation.sized else [0]:
            yield operation, num_bytes


def progress(row: list[dict]) -> str:
    first = row[0]
    size = readable_bytes(first["bytes"]) if first["bytes"] else ""
    heading = f"{first['ranks']} {first['kind']}  {first['operation']:<22}{size:>8}"
    times = [
        f"{one['peer']} " + (readable_seconds(one["p50"]) if one["error"] is None else "failed")
        for one in row
    ]
    return "   ".join([heading, *times])


def machine() -> dict:
    """Describe what a reader needs to compare numbers with those of another machine."""
    lines = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": lines.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def command_line(arguments: list[str], module: str = "collectives") -> str:
    """Return how the run was asked for, with directories shortened to their names."""
    short = [Path(word).name if word.startswith("/") else word for word in arguments]
    return " ".join([f"python -m benchmarks.{module}", *short])


def choose_peers(peers: list[Peer], names: list[str] | None) -> list[Peer]:
    """Return the peers that can run, or exactly the ones asked for."""
    known = {peer.name: peer for peer in peers}
    for name in names or ():
        if name not in known:
            raise SystemExit(f"unknown implementation {name!r} (known: {', '.join(known)})")
    chosen = []
    for peer in peers:
        if names is not None and peer.name not in names:
            continue
        if peer.missing is None:
            chosen.append(peer)
        elif names is not None:
            raise SystemExit(f"{peer.name} cannot run here: {peer.missing}")
        else:
            print(f"without {peer.name}: {peer.missing}")
    return chosen


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=summary)

    def listed(convert):
        return lambda text: [convert(word) for word in text.split(",") if word]

    def operation(name: str) -> str:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(
                f"unknown operation {name!r} (known: {', '.join(OPERATIONS)})"
            )
        return name

    add = parser.add_argument
    add("--quick", action="store_true", help="few sizes and short measurements: a look")
    add("--impl", type=listed(str), metavar="NAMES", help="only these implementations")
    add("--operations", type=listed(operation), metavar="NAMES", help="only these operations")
    add("--bytes", type=listed(parse_bytes), metavar="SIZES", help="only these, such as 8,64K,1M")
    add("--processes", type=listed(int), metavar="COUNTS", help="worlds of processes ('': none)")
    add("--threads", type=listed(int), metavar="COUNTS", help="worlds of threads ('': none)")
    add("--budget", type=float, metavar="SECONDS", help="time per cell and implementation")
    add("--rounds", type=int, metavar="N", help="how often the implementations take turns")
    add(
        "--mpi",
        type=Path,
        action="append",
        metavar="PREFIX",
        help="a Python environment with mpi4py and an MPI; repeat to measure several (default: "
        "the running one)",
    )
    add("--out", type=Path, default=Path("out/collectives.json"), help="every number, as JSON")
    add("--docs", type=Path, help="also write benchmarks.md and its plots to this directory")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
