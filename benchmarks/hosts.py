"""Measure all_reduce and training steps between hosts beside flat Gloo, on one machine.

    python -m benchmarks.hosts --docs docs        # about 15 minutes on 2 cores
    python -m benchmarks.hosts --quick            # a look, a minute or two

The hosts are network namespaces of this machine, joined by links of a given rate (tc tbf), with two
ranks each. The ranks of all implementations live side by side for the whole run and take turns, as
in benchmarks.collectives, whose way of measuring this is. Training steps are measured as in
benchmarks.training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.bench.libraries import TorchLike
from phalanx.bench.measurement import Teams, measure
from phalanx.bench.operations import OPERATIONS
from phalanx.bench.peers import Peer
from phalanx.bench.plan import Cell, Effort
from phalanx.bench.ranks import TIMEOUT, Place, keep_quiet, serve_process
from phalanx.bench.results import parse_bytes, parse_sizes
from phalanx.testing.hosts import Hosts

from . import command
from .collectives import choose_peers, progress
from .command import given, known, listed
from .hosts_report import RANKS, REPORT, kind_of
from .models import WORKLOADS
from .training import WAYS, time_steps
from .training_report import progress as progress_of_training
from .turns import PATIENCE, compare, launch, slowest_rank
from .turns import be_rank as be_training_rank

HOSTS = 2

PEERS = [
    Peer("gloo", "Gloo", "gloo"),
    Peer("phalanx-gloo", "Phalanx on Gloo", "phalanx-gloo"),
    Peer("phalanx", "Phalanx", "phalanx"),
]


@dataclass(frozen=True)
class Plan:
    """Which cells are measured, and for how long."""

    rates: list[str]
    sizes: list[int]
    budget: float  # seconds per cell and peer, over all rounds
    rounds: int
    models: list[str]
    seconds: float  # of each way's row of training steps in a round


RATES = ["1gbit", "10gbit"]
FULL = Plan(RATES, parse_sizes("4:64M:4"), 3.0, 5, ["gpt-5m", "mlp"], 4.0)
QUICK = Plan(RATES, parse_sizes("4:16M:64"), 0.5, 2, ["gpt-5m"], 1.0)
TRAINED = ["alone", "gloo", "phalanx"]


class OnHosts:
    """Ranks that were started on hosts."""

    def __init__(self, hosts: Hosts, peer: Peer, size: int, directory: Path, pinned: bool) -> None:
        self._job = hosts.start(be_rank, peer.world, str(directory), size)

    def ended(self) -> str | None:
        if all(program.returncode is None for program in self._job.programs):
            return None
        try:
            self._job.wait()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "its ranks ended early"

    def join(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while any(program.returncode is None for program in self._job.programs):
            if time.monotonic() > limit:
                return False
            time.sleep(0.01)
        self._job.close()
        return True

    def kill(self, pids: Collection[int]) -> None:
        for program in self._job.programs:
            program.kill()


def be_rank(world: str, directory: str, size: int) -> None:
    """Be one rank of an implementation."""
    place, rank = Place(Path(directory), size, pinned=False), int(os.environ["RANK"])
    keep_quiet(place.directory)
    if world == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        import phalanx as dist

        dist.init_process_group("gloo" if world == "phalanx-gloo" else "phalanx", timeout=TIMEOUT)
    serve_process(place, rank, partial(TorchLike, dist, rank, size))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := Hosts.unavailable():
        raise SystemExit(reason)
    asked = given(options, "rates", "sizes", "budget", "rounds", "models", "seconds")
    plan = replace(QUICK if options.quick else FULL, **asked)
    peers = choose_peers(PEERS, options.impl)
    about = {
        "rates": plan.rates,
        "budget": plan.budget,
        "rounds": plan.rounds,
        "peers": {peer.name: {"title": peer.title, "kind": peer.kind} for peer in peers},
        "titles": {name: WORKLOADS[name].title for name in plan.models}
        | {name: WAYS[name].title for name in TRAINED},
    }
    command.carry_out(REPORT, options, arguments, about, lambda: run(plan, peers))
    return 0


def run(plan: Plan, peers: list[Peer]) -> dict[str, Any]:
    """Measure everything, saying so as it goes."""
    return {"results": measure_calls(plan, peers), "training": measure_training(plan)}


def measure_calls(plan: Plan, peers: list[Peer]) -> list[dict[str, Any]]:
    """Measure all_reduce."""
    results = []
    effort = Effort(plan.budget, plan.rounds)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        Hosts(HOSTS, ranks=RANKS // HOSTS, shared=[name]) as hosts,
        Teams(peers, RANKS, hire=partial(OnHosts, hosts), within=Path(name)) as teams,
    ):
        for rate in plan.rates:
            hosts.shape(rate=rate)
            for num_bytes in plan.sizes:
                row = measure(teams, Cell(OPERATIONS["all_reduce"], num_bytes), effort)
                row = [{**one, "kind": kind_of(rate)} for one in row]
                results += row
                print(progress(row), flush=True)
    return results


def measure_training(plan: Plan) -> list[dict[str, Any]]:
    """Measure training steps."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        Hosts(HOSTS, ranks=RANKS // HOSTS, shared=[name]) as hosts,
    ):
        task = partial(
            launch, time_steps, TRAINED, size=RANKS, run=partial(train, hosts), within=Path(name)
        )
        for rate in plan.rates if plan.models else []:
            hosts.shape(rate=rate)
            for model in plan.models:
                outcome = task(model, plan.rounds, plan.seconds)
                times = slowest_rank([rank["times"] for rank in outcome.ranks])
                for way in TRAINED:
                    one = {"rate": rate, "model": model, "way": way}
                    if way not in times:
                        found.append({**one, "error": outcome.errors[way]})
                        continue
                    one["seconds"] = statistics.median(times[way])
                    if "gloo" in times:
                        one["speed"] = compare(times["gloo"], times[way]).median
                    found.append(one)
                    print(f"{rate:<8} {progress_of_training(one)}", flush=True)
    return found


def train(hosts: Hosts, size: int, directory: str, *args: Any) -> list[Any]:
    """Run a task of training on ranks of the hosts."""
    return hosts.launch(
        be_training_rank,
        directory,
        *args,
        env={"GLOO_SOCKET_IFNAME": "eth0"},
        backend="phalanx",
        group_timeout=TIMEOUT,
        timeout=PATIENCE,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser(REPORT, __doc__)
    add = parser.add_argument
    add("--impl", type=listed(str), metavar="NAMES", help="only these implementations")
    add("--rates", type=listed(str), metavar="RATES", help="of links, such as 1gbit,10gbit")
    add("--bytes", type=listed(parse_bytes), dest="sizes", metavar="SIZES", help="only these")
    add("--budget", type=float, metavar="SECONDS", help="time per cell and implementation")
    models = listed(known(WORKLOADS, "model"))
    add("--models", type=models, metavar="NAMES", help="only these models are trained")
    add("--seconds", type=float, metavar="S", help="length of a row of training steps in a round")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
