"""From numbers to words: tables in the terminal and docs/benchmarks.md.

    python -m benchmarks.report out/collectives.json --docs docs

writes the document and its plots anew from an earlier run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .results import Results, readable_bytes, readable_seconds
from .targets import TARGETS

Table = tuple[str, list[str], list[list[str]]]  # title, heading, rows


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


def target_table(results: Results) -> Table:
    """Return the project's own targets, each with the worst ratio over its cells."""
    rows = []
    for target in TARGETS:
        verdict = target.verdict(results)
        if verdict is None:
            rows.append([target.what, target.rule, "not measured", "", "0", ""])
            continue
        ratio, where, num_cells = verdict
        outcome = "met" if ratio >= target.at_least else "missed"
        rows.append(
            [target.what, target.rule, readable_ratio(ratio), where, str(num_cells), outcome]
        )
    heading = ["what", "at least", "worst measured", "where", "cells", "outcome"]
    return "Targets", heading, rows


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
    show_tables([*tables(results), target_table(results)])
    for line in failures(results):
        print(f"not available: {line}")


def show_tables(everything: list[Table]) -> None:
    """Print tables, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        for title, heading, rows in everything:
            print(f"\n{title}\n{plain(heading, rows)}")
    else:
        console = Console()
        console.width = max(console.width, 190)
        for title, heading, rows in everything:
            table = RichTable(title=title, title_justify="left")
            for index, name in enumerate(heading):
                justify = "left" if title == "Targets" or not index else "right"
                table.add_column(name, justify=justify, no_wrap=True)
            for row in rows:
                table.add_row(*row)
            console.print(table)


def plain(heading: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in [heading, *rows]
    )


def markdown(table: Table) -> str:
    title, heading, rows = table
    rule = [":--" if title == "Targets" or not index else "--:" for index in range(len(heading))]
    lines = ["| " + " | ".join(row) + " |" for row in [heading, rule, *rows]]
    return "\n".join(lines)


def readable_times(result: dict | None) -> str:
    if result is None or result["error"]:
        return "-"
    return f"{readable_seconds(result['p50'])} / {readable_seconds(result['p99'])}"


def readable_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def document(data: dict, pictures: list[tuple[str, str]]) -> str:
    """Return docs/benchmarks.md."""
    results = Results(data)
    versions = ", ".join(
        f"{peer['title']} ({peer['version']})" for peer in data["peers"].values() if peer["version"]
    )
    parts = [
        "# Benchmarks",
        "<!-- Made by benchmarks/report.py; change that, not this file. -->",
        origin(data),
        f"Measured: {versions}.",
        METHOD,
        "## Targets",
        "What the project asks of itself: the ratio of the other's time to Phalanx's, at the "
        "worst of all measured cells that a line covers (0 where Phalanx failed).",
        markdown(target_table(results)),
    ]
    for caption, name in pictures:
        parts.append(f"## {caption}\n\n![{caption}]({name})")
    parts.append("## All numbers\n\nA ratio above 1 is a speed-up.")
    for table in tables(results):
        parts.append(f"### {table[0]}\n\n{markdown(table)}")
    if missing := failures(results):
        parts.append("## Not available\n\n" + "\n".join(f"- {line}" for line in missing))
    return "\n\n".join(parts) + "\n"


def origin(data: dict) -> str:
    """Say by which command, on which machine, and in which time numbers were made."""
    machine = data["machine"]
    return (
        f"Made in {data['seconds'] / 60:.0f} min by\n\n    {data['command']}\n\n"
        f"on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; Python {machine['python']}, torch {machine['torch']}, NumPy "
        f"{machine['numpy']}; load {machine['load_before']} before the run."
    )


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


def write(data: dict, directory: Path) -> None:
    """Write benchmarks.md and its plots."""
    from . import plots

    directory.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(Results(data), directory)
    (directory / "benchmarks.md").write_text(document(data, pictures))
    for name in ["benchmarks.md", *[name for _, name in pictures]]:
        print(f"wrote {directory / name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("json", type=Path, help="what benchmarks.collectives wrote")
    parser.add_argument("--docs", type=Path, help="write benchmarks.md and plots to this directory")
    options = parser.parse_args()
    data = json.loads(options.json.read_text())
    if options.docs:
        write(data, options.docs)
    else:
        show(data)


if __name__ == "__main__":
    main()
