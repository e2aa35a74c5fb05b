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
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.bench.measurement import Teams, measure
from phalanx.bench.operations import OPERATIONS
from phalanx.bench.peers import PEERS, Peer, mpi
from phalanx.bench.plan import Cell, Effort
from phalanx.bench.results import parse_bytes, readable_bytes, readable_seconds

from . import command
from .command import given, known, listed
from .report import REPORT


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


# What the document tells of; `exchange` is for phalanx bench alone.
DOCUMENTED = [name for name in OPERATIONS if name != "exchange"]

FULL = Plan(
    operations=DOCUMENTED,
    sizes=byte_sizes("8,256,4K,64K,256K,1M,4M,16M,64M,256M"),
    crowd_operations=DOCUMENTED,
    crowd_sizes=byte_sizes("8,64K,1M,16M"),
    processes=[2, 4, 8],
    threads=[4, 16, 64],
    budget=0.6,
    rounds=3,
)
QUICK = Plan(
    operations=DOCUMENTED,
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
    asked = given(options, "operations", "sizes", "processes", "threads", "budget", "rounds")
    for name in ("operations", "sizes"):
        if name in asked:
            asked[f"crowd_{name}"] = asked[name]
    return replace(QUICK if options.quick else FULL, **asked)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    plan = choose_plan(options)
    peers = choose_peers(known_peers(options.mpi or [Path(sys.prefix)]), options.impl)
    about = {
        "budget": plan.budget,
        "rounds": plan.rounds,
        "peers": {
            peer.name: {"title": peer.title, "kind": peer.kind, "version": peer.version}
            for peer in peers
        },
    }
    command.carry_out(REPORT, options, arguments, about, lambda: {"results": run(plan, peers)})
    return 0


def run(plan: Plan, peers: list[Peer]) -> list[dict]:
    """Measure everything, saying so as it goes."""
    results = []
    effort = Effort(plan.budget, plan.rounds)
    for kind, size, names, sizes in plan.worlds():
        with Teams([peer for peer in peers if peer.kind == kind], size) as teams:
            for cell in cells(names, sizes):
                if row := measure(teams, cell, effort):
                    results += row
                    print(progress(row), flush=True)
    return results


def cells(names: list[str], sizes: list[int]) -> Iterator[Cell]:
    for name in names:
        operation = OPERATIONS[name]
        for num_bytes in sizes if operation.sized else [0]:
            yield Cell(operation, num_bytes)


def progress(row: list[dict]) -> str:
    first = row[0]
    size = readable_bytes(first["bytes"]) if first["bytes"] else ""
    heading = f"{first['ranks']} {first['kind']}  {first['operation']:<22}{size:>8}"
    times = [
        f"{one['peer']} " + (readable_seconds(one["p50"]) if one["error"] is None else "failed")
        for one in row
    ]
    return "   ".join([heading, *times])


def known_peers(mpi_prefixes: list[Path]) -> list[Peer]:
    """Return every peer there is, also those that cannot run here."""
    here = Path(sys.prefix)
    processes, threads = PEERS["processes"], PEERS["threads"]
    return [
        *[processes[name](here) for name in ("phalanx", "phalanx-shared", "gloo")],
        *[mpi(prefix) for prefix in mpi_prefixes],
        processes["bare"](here),
        *[threads[name](here) for name in ("phalanx", "threadedpg")],
    ]


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
    parser = command.parser(REPORT, __doc__)
    operations, sizes = listed(known(OPERATIONS, "operation")), listed(parse_bytes)
    add = parser.add_argument
    add("--impl", type=listed(str), metavar="NAMES", help="only these implementations")
    add("--operations", type=operations, metavar="NAMES", help="only these operations")
    add("--bytes", type=sizes, dest="sizes", metavar="SIZES", help="only these, such as 8,64K,1M")
    add("--processes", type=listed(int), metavar="COUNTS", help="worlds of processes ('': none)")
    add("--threads", type=listed(int), metavar="COUNTS", help="worlds of threads ('': none)")
    add("--budget", type=float, metavar="SECONDS", help="time per cell and implementation")
    add(
        "--mpi",
        type=Path,
        action="append",
        metavar="PREFIX",
        help="a Python environment with mpi4py and an MPI; repeat to measure several (default: "
        "the running one)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
