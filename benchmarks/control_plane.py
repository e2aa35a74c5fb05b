"""What it takes to bring many ranks together: the store, rendezvous, groups, and who has died.

    python -m benchmarks.control_plane              # a few minutes on 2 cores
    python -m benchmarks.control_plane --quick      # a look

Ranks are threads here, eight to a host that is none, and there is no data: their engine connects
nobody. All else is real: each rank has its own connection to the store, its part of the board of
its host, and its warden, as on as many machines. But all of them share the cores of one, so that
times are those of all ranks' work one after the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.engines.wire import Wire
from phalanx.backends.hierarchy import create, hosts, warden
from phalanx.backends.hierarchy.hosts import Host
from phalanx.backends.registry import Backend, BackendOptions
from phalanx.bench.results import readable_seconds
from phalanx.stores import PrefixStore, TCPStore
from phalanx.stores.attendance import check_in

from .command import given, listed
from .documents import Table, show_tables

RANKS_PER_HOST = 8
PROCESSES = 4  # that clients of the store live in
RANKS_PER_PROCESS = 128
TIMEOUT = 300.0
ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """How many clients and ranks are tried."""

    clients: list[int]
    ranks: list[int]


FULL = Plan([256, 1024, 4096], [64, 256, 1024])
QUICK = Plan([256], [64])


class NoWire(Wire):
    """A wire that carries nothing."""

    def start(self, deliver: Any, lose: Any) -> None: ...

    def send(self, frame: Any, dst: int) -> None: ...

    def number(self, dst: int) -> int:
        return 0

    def offer(self, payload: Any, dst: int, number: int, end: Any) -> None: ...

    def take(self, payload: Any, src: int, number: int, end: Any) -> None: ...

    def close(self) -> None: ...


def _connect_nobody(options: BackendOptions, pg_options: object = None) -> MessageEngine:
    return MessageEngine("nothing", NoWire(), options, {})


def memory() -> float:
    """Return the bytes that this process has written to; what it maps twice counts once."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Dirty:"):
            return int(line.split()[1]) * 1024.0
    raise OSError("no Pss_Dirty in /proc/self/smaps_rollup: it takes Linux 6")


class Rank:
    """One of the ranks that are simulated."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank, self._size, self._port = rank, size, port
        self.shared: dict[str, Any] = {}
        self.groups: list[Any] = []

    def connect(self) -> None:
        self.store = TCPStore(ADDRESS, self._port, timeout=TIMEOUT, wait_for_workers=False)

    def check_in(self) -> None:
        check_in(PrefixStore("world", self.store), self._rank, self._size, TIMEOUT)

    def make_group(self) -> None:
        number = len(self.groups)
        everybody = list(range(self._size))
        store = PrefixStore(f"group{number}", self.store)
        options = BackendOptions(
            store, self._rank, self._size, TIMEOUT, str(number), everybody, self._size
        )
        options.shared = self.shared
        self.groups.append(create.create(options))


PHASES = {"connect": Rank.connect, "check_in": Rank.check_in}
PHASES |= {"world": Rank.make_group, "new_group": Rank.make_group}


def be_ranks(numbers: range, size: int, port: int, link: Any) -> None:
    """Be some of the ranks, and go from phase to phase as one is told over `link`."""
    os.environ[create.ENGINE] = "nothing"
    os.environ[warden.VARIABLE] = "3.2"  # what is measured is how soon all know, not this
    Backend.register_backend("nothing", _connect_nobody, extended_api=True, devices="cpu")
    threading.stack_size(512 << 10)
    mine = threading.local()
    hosts.this_host = lambda: mine.host
    ranks = {number: Rank(number, size, port) for number in numbers}
    turn = threading.Barrier(len(numbers) + 1)

    def live(number: int) -> None:
        host = f"host{number // RANKS_PER_HOST}"
        mine.host = Host(host, host, os.getpid())
        try:
            for phase in PHASES.values():
                turn.wait()
                phase(ranks[number])
                turn.wait()
        except BaseException:
            turn.abort()  # ends this process, and with it the run
            raise

    before = memory()
    for number in numbers:
        threading.Thread(target=live, args=(number,), daemon=True).start()
    link.send("here")
    for _ in PHASES:
        link.recv()
        turn.wait()
        turn.wait()  # all are through
        link.send("done")
    link.send(memory() - before)
    dead = range(size - RANKS_PER_HOST, size)
    link.recv()
    for number in numbers:
        if number in dead:
            ranks[number].shared["warden"].fall_silent()
    limit = time.monotonic() + TIMEOUT
    for number in numbers:
        roster = ranks[number].shared["roster"]
        while number not in dead and not roster.obituary(dead[0], False):
            if time.monotonic() > limit:
                raise TimeoutError(f"rank {number} has not heard of the end of rank {dead[0]}")
            time.sleep(0.02)
    link.send("told")
    link.recv()
    os._exit(0)  # past the wardens of a world that nobody leaves


def simulate(size: int) -> dict[str, float]:
    """Bring ranks together, let a host die, and return what it took."""
    context = multiprocessing.get_context("spawn")
    master = TCPStore(ADDRESS, 0, is_master=True, timeout=TIMEOUT)
    each = max(size // RANKS_PER_PROCESS, 1)
    share = size // each
    links, processes = [], []
    for first in range(0, size, share):
        here, there = context.Pipe()
        arguments = (range(first, first + share), size, master.port, there)
        processes.append(context.Process(target=be_ranks, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        links.append(here)

    def all_do() -> float:
        began = time.perf_counter()
        for link in links:
            link.send("go")
        for link in links:
            link.recv()
        return time.perf_counter() - began

    for link in links:
        link.recv()
    found: dict[str, float] = {"ranks": size}
    for name in PHASES:
        found[name] = all_do()
    found["memory"] = sum(link.recv() for link in links) / size
    found["detection"] = all_do()
    for link, process in zip(links, processes, strict=True):
        link.send("end")
        process.join()
    return found


def be_clients(port: int, number: int, total: int, link: Any) -> None:
    """Be many clients of a store, and do what one is told over `link`."""
    threading.stack_size(256 << 10)
    clients = [
        TCPStore(ADDRESS, port, timeout=TIMEOUT, wait_for_workers=False) for _ in range(number)
    ]
    link.send("connected")
    works: dict[str, Callable[[TCPStore], object]] = {
        "barrier": lambda store: store.barrier("all", total),
        "load": lambda store: [store.add("count", 1) for _ in range(10)],
    }
    while (word := link.recv()) != "end":
        threads = [threading.Thread(target=works[word], args=(store,)) for store in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        link.send("done")


def crowd(number: int) -> dict[str, float]:
    """Let clients connect to a store, wait together, and ask all at once; return what it took."""
    context = multiprocessing.get_context("spawn")
    master = TCPStore(ADDRESS, 0, is_master=True, timeout=TIMEOUT)
    before = memory()
    links, processes = [], []
    for _ in range(PROCESSES):
        here, there = context.Pipe()
        arguments = (master.port, number // PROCESSES, number, there)
        processes.append(context.Process(target=be_clients, args=arguments))
        processes[-1].start()
        links.append(here)

    def all_do(word: str) -> float:
        began = time.perf_counter()
        for link in links:
            link.send(word)
        for link in links:
            link.recv()
        return time.perf_counter() - began

    for link in links:
        link.recv()
    found: dict[str, float] = {"clients": number, "memory": (memory() - before) / number}
    probes = []
    for _ in range(200):
        began = time.perf_counter()
        master.add("probe", 1)
        probes.append(time.perf_counter() - began)
    found["latency"] = statistics.median(probes)
    found["barrier"] = all_do("barrier")
    found["requests"] = 10 * number / all_do("load")
    for link, process in zip(links, processes, strict=True):
        link.send("end")
        process.join()
    return found


def run(plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Measure everything, saying so as it goes."""
    found: dict[str, list[dict[str, float]]] = {"clients": [], "ranks": []}
    for kind, call, numbers in (("clients", crowd, plan.clients), ("ranks", simulate, plan.ranks)):
        for number in numbers:
            print(f"{number} {kind}", flush=True)
            found[kind].append(call(number))
    return found


def tables(data: dict[str, list[dict[str, float]]]) -> list[Table]:
    """Return a table of clients and one of ranks."""
    clients = [
        [
            f"{row['clients']:.0f}",
            f"{row['memory'] / 1024:.1f} KiB",
            readable_seconds(row["latency"]),
            readable_seconds(row["barrier"]),
            f"{row['requests']:,.0f}",
        ]
        for row in data["clients"]
    ]
    names = ("connect", "check_in", "world", "new_group", "detection")
    ranks = [
        [
            f"{row['ranks']:.0f}",
            *[readable_seconds(row[name]) for name in names],
            f"{row['memory'] / 2**20:.2f} MiB",
        ]
        for row in data["ranks"]
    ]
    heading = [
        "clients",
        "memory each",
        "add, others idle",
        "barrier of all",
        "requests/s, all ask",
    ]
    columns = ["ranks", "all connect", "all check in", "the world", "new_group", "a host's death"]
    return [
        ("Clients of one TCPStore", heading, clients),
        (f"Ranks, {RANKS_PER_HOST} to a host", [*columns, "memory each"], ranks),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few ranks: a look")
    parser.add_argument("--clients", type=listed(int), metavar="N", help="of a store: 256,1024")
    parser.add_argument("--ranks", type=listed(int), metavar="N", help="that meet: 64,256")
    parser.add_argument("--out", type=Path, default=Path("out/control_plane.json"))
    options = parser.parse_args(arguments)
    plan = replace(QUICK if options.quick else FULL, **given(options, "clients", "ranks"))
    data = run(plan)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    show_tables(tables(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
