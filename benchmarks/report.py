"""From numbers to words: tables in the terminal and docs/benchmarks.md.

    python -m benchmarks.report out/collectives.json --docs docs

writes the document and its plots anew from an earlier run.
"""

from __future__ import annotations

from pathlib import Path

from phalanx.bench.results import Results, readable_bytes, readable_ratio, readable_seconds

from . import plots
from .documents import (
    Pictures,
    Report,
    Table,
    ending,
    markdown,
    opening,
    show_tables,
)
from .targets import TARGETS, target_table


def tables(results: Results) -> list[Table]:
    """Return one table per kind and number of ranks and operation."""
    found = []
    for kind, ranks, operation in results.groups():
        peers = results.peers_of(kind, ranks, operation)
        baselines = [name for name in ("gloo", "mpi", "threadedpg") if results.has(kind, name)]
        heading = ["size", *[results.title(peer) for peer in peers]]
        ours = [peer for peer in peers if peer.startswith("phalanx")]
        for our in ours:
            prefix = "shared vs" if our == "phalanx-shared" else "vs"
            heading += [f"{prefix} {results.title(name)}" for name in baselines]
        rows = []
        for num_bytes in results.sizes(kind, ranks, operation):
            cell = (kind, ranks, operation, num_bytes)
            row = [readable_bytes(num_bytes) if num_bytes else "-"]
            row += [readable_times(results.get(*cell, peer)) for peer in peers]
            for our in ours:
                row += [readable_ratio(results.ratio(*cell, our, name)) for name in baselines]
            rows.append(row)
        found.append((f"{operation}, {ranks} {kind}: p50 / p99", heading, rows))
    return found


def failures(results: Results) -> list[str]:
    """Return a line per operation that a peer could not do."""
    seen = {}
    for one in results.rows:
        if one["error"]:
            key = (one["peer"], one["operation"], one["ranks"], one["kind"])
            first_line = one["error"].splitlines()[0]
            seen.setdefault(key, f"from {readable_bytes(one['bytes'])}: {first_line}")
    return [
        f"{results.title(peer)}, {operation}, {ranks} {kind}, {why}"
        for (peer, operation, ranks, kind), why in seen.items()
    ]


def show(data: dict) -> None:
    """Print everything, with rich where it is installed."""
    results = Results(data)
    show_tables([*tables(results), target_table(TARGETS, results)])
    for line in failures(results):
        print(f"not available: {line}")


def readable_times(result: dict | None) -> str:
    if result is None or result["error"]:
        return "-"
    return f"{readable_seconds(result['p50'])} / {readable_seconds(result['p99'])}"


def document(data: dict, pictures: Pictures) -> str:
    """Return docs/benchmarks.md."""
    results = Results(data)
    versions = ", ".join(
        f"{peer['title']} ({peer['version']})" for peer in data["peers"].values() if peer["version"]
    )
    parts = [
        *opening("Benchmarks", "report", data),
        f"Measured: {versions}.",
        METHOD,
        "## Targets",
        "What the project asks of itself: the ratio of the other's time to Phalanx's, at the "
        "worst of all measured cells that a line covers (0 where Phalanx failed).",
        markdown(target_table(TARGETS, results)),
    ]
    for caption, name in pictures:
        parts.append(f"## {caption}\n\n![{caption}]({name})")
    parts.append("## All numbers\n\nA ratio above 1 is a speed-up.")
    parts += ending(tables(results), failures(results), level=3)
    return "\n\n".join(parts) + "\n"


def draw(data: dict, directory: Path) -> Pictures:
    return plots.draw(Results(data), directory)


METHOD = """\
How a number comes about: the ranks of all implementations live side by side for the whole run, and
whoever is not being measured sleeps. Every cell is checked for its result and warmed up, then
measured in rounds that take the implementations in turn. Ranks start together: before every call
for large messages, before every batch of calls in a row up to 64 KiB. The time of a call is that of
its slowest rank; p50 is the median in the best round, p99 is over all rounds. Tensors are float32;
a size is the larger buffer of a rank (the result of an all_gather, the input of a reduce_scatter).
send_recv is half a round trip between two ranks, send_stream the time per message of many in a row.
"Bare memory" does not communicate: beside all_reduce it is an in-place add of as many bytes by two
threads, beside broadcast and send one plain copy. MPI is mpi4py on NumPy arrays, with its
defaults (shared memory, single copies for large messages), neither pinned nor tuned; ratios
against MPI take the fastest one measured."""


REPORT = Report("collectives", "benchmarks.md", show, draw, document)

if __name__ == "__main__":
    REPORT.main()
