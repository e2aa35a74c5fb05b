"""Operations per second of the TCP store, against torch's, in one run.

    python benchmarks/stores.py [--seconds 1.0] [--rounds 3] [--json out/stores.json]

One server process per store, as rank 0 would be; clients are processes of their own: one client,
eight processes, and 64 threads in four processes (each thread with its own connection, as torch's
client holds a lock while it talks). Every client does one operation at a time, as fast as it can:

set, get   a key of its own, 64 bytes
add        one counter for all
wait       for a key that exists
pair       two clients hand a token to and fro through keys: what a waiting client is woken at

Stores take turns within each round, and the best round counts: other users of the machine only ever
slow a store down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
OPERATIONS = ("set", "get", "add", "wait", "pair")
# Clients: processes, threads in each.
CLIENTS = {1: (1, 1), 8: (8, 1), 64: (4, 16)}


def store_class(name: str) -> Any:
    if name == "torch":
        import torch.distributed

        return torch.distributed.TCPStore
    import phalanx.stores

    return phalanx.stores.TCPStore


def serve(name: str, ports: Any, end: Any) -> None:
    store = store_class(name)(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    ports.put(store.port)
    end.wait()


def client(
    name: str, port: int, operation: str, index: int, start: Any, seconds: float
) -> tuple[int, float, float]:
    """Return how many operations this client had done, from when, until when."""
    store = store_class(name)(HOST, port, wait_for_workers=False, timeout=TIMEOUT)
    key, value = f"key/{index}", "v" * 64
    store.set(key, value)
    calls = {
        "set": lambda: store.set(key, value),
        "get": lambda: store.get(key),
        "add": lambda: store.add("counter", 1),
        "wait": lambda: store.wait([key]),
    }
    start.wait()
    begin = time.perf_counter()
    end = begin + seconds
    count = 0
    if operation == "pair":
        partner, role = divmod(index, 2)
        # The first of a pair decides when to stop, and says so with its last token.
        while True:
            if role == 0:
                last = time.perf_counter() >= end
                store.set(f"pair/{partner}/0/{count}", "end" if last else "go")
                store.get(f"pair/{partner}/1/{count}")
            else:
                last = store.get(f"pair/{partner}/0/{count}") == b"end"
                store.set(f"pair/{partner}/1/{count}", "ok")
            count += 1
            if last:
                return count, begin, time.perf_counter()
    call = calls[operation]
    while time.perf_counter() < end:
        for _ in range(16):
            call()
        count += 16
    store.get(key)  # both stores send a set without waiting: done means that the server had it
    return count, begin, time.perf_counter()


def clients(
    name: str, port: int, operation: str, first: int, threads: int, start: Any, seconds: float,
    counts: Any,
) -> None:  # fmt: skip
    results: list[Any] = [None] * threads

    def work(index: int) -> None:
        results[index] = client(name, port, operation, first + index, start, seconds)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts.put(results)


def measure(name: str, operation: str, number: int, seconds: float) -> float:
    """Return operations per second of `number` clients together."""
    context = multiprocessing.get_context("fork")
    ports, counts, end = context.SimpleQueue(), context.SimpleQueue(), context.Event()
    processes, threads = CLIENTS[number]
    start = context.Barrier(number)
    server = context.Process(target=serve, args=(name, ports, end))
    server.start()
    port = ports.get()
    workers = [
        context.Process(
            target=clients,
            args=(name, port, operation, index * threads, threads, start, seconds, counts),
        )
        for index in range(processes)
    ]
    for worker in workers:
        worker.start()
    results = [result for _ in workers for result in counts.get()]
    for worker in workers:
        worker.join()
    end.set()
    server.join()
    numbers, begins, ends = zip(*results, strict=True)
    return sum(numbers) / (max(ends) - min(begins))


def main() -> None:
    parser = argparse.ArgumentParser(description="TCPStore: phalanx against torch")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("out/stores.json"))
    options = parser.parse_args()

    rows = []
    print(f"{'clients':>7}  {'operation':<9}  {'phalanx/s':>10}  {'torch/s':>10}  {'ratio':>6}")
    for number in CLIENTS:
        for operation in OPERATIONS:
            if operation == "pair" and number == 1:
                continue
            rates: dict[str, list[float]] = {"phalanx": [], "torch": []}
            for _ in range(options.rounds):
                for name, list_ in rates.items():
                    list_.append(measure(name, operation, number, options.seconds))
            ours, theirs = max(rates["phalanx"]), max(rates["torch"])
            rows.append(
                {
                    "clients": number,
                    "operation": operation,
                    "phalanx_per_second": ours,
                    "torch_per_second": theirs,
                    "ratio": ours / theirs,
                }
            )
            rates_text = f"{ours:>10,.0f}  {theirs:>10,.0f}  {ours / theirs:>6.2f}"
            print(f"{number:>7}  {operation:<9}  {rates_text}")
    ratios = [float(row["ratio"]) for row in rows]
    print(f"lowest ratio {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    # Loaded once here, so that forked clients need not.
    store_class("torch")
    store_class("phalanx")
    main()
