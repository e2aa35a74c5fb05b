"""The numbers of benchmarks.hosts in words: tables here and in docs/hosts-benchmarks.md.

    python -m benchmarks.hosts_report out/hosts.json --docs docs

writes the document anew from an earlier run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from phalanx.bench.results import Results, readable_bytes, readable_ratio, readable_seconds
from phalanx.testing.hosts.switch import Link

from .documents import Pictures, Report, Table, ending, markdown, opening, show_tables
from .report import failures, readable_times
from .targets import ALL_REDUCE, Target, large, target_table

RANKS = 4


def kind_of(rate: str) -> str:
    """Name ranks by the links between their hosts."""
    return f"ranks on 2 hosts, {rate}"


def targets(data: dict[str, Any]) -> list[Target]:
    """Return what the project asks of itself."""
    found = []
    for rate in data["rates"]:
        versus = partial(
            Target,
            ours="phalanx",
            other="gloo",
            title="Gloo",
            operations=ALL_REDUCE,
            ranks=(RANKS,),
            kind=kind_of(rate),
        )
        found += [
            versus(f"all_reduce, {rate}, every size", at_least=1.0),
            versus(f"all_reduce, {rate}, 1 - 64 MiB", at_least=1.5, covers=large),
        ]
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    """Return a table per rate."""
    results = Results(data)
    peers = list(data["peers"])
    ours = [name for name in peers if name != "gloo" and "gloo" in peers]
    heading = ["size", *[results.title(name) for name in peers], "the link's limit"]
    heading += [f"{results.title(name)} vs Gloo" for name in ours]
    found = []
    for rate in data["rates"]:
        rows = []
        for num_bytes in results.sizes(kind_of(rate), RANKS, "all_reduce"):
            cell = (kind_of(rate), RANKS, "all_reduce", num_bytes)
            row = [readable_bytes(num_bytes)]
            row += [readable_times(results.get(*cell, name)) for name in peers]
            row.append(readable_seconds(limit(rate, num_bytes)))
            row += [readable_ratio(results.ratio(*cell, name, "gloo")) for name in ours]
            rows.append(row)
        found.append((f"all_reduce, 2 hosts with 2 ranks each, {rate}: p50 / p99", heading, rows))
    if data["training"]:
        found.append(training_table(data))
    return found


def training_table(data: dict[str, Any]) -> Table:
    """Return the training steps of every way."""
    cells = {(one["rate"], one["model"], one["way"]): one for one in data["training"]}
    ways = list(dict.fromkeys(way for _, _, way in cells))
    rows = []
    for rate, model in dict.fromkeys((rate, model) for rate, model, _ in cells):
        found = [cells[rate, model, way] for way in ways]
        steps = [readable_seconds(one["seconds"]) if "seconds" in one else "-" for one in found]
        speed = cells[rate, model, "phalanx"].get("speed")
        rows.append([data["titles"][model], rate, *steps, readable_ratio(speed)])
    heading = ["model", "links", *(data["titles"][way] for way in ways), "Phalanx's vs Gloo"]
    return "Training steps, 2 hosts with 2 ranks each", heading, rows


def show(data: dict[str, Any]) -> None:
    """Print everything, with rich where it is installed."""
    results = Results(data)
    show_tables([*tables(data), target_table(targets(data), results)])
    for line in failures(results):
        print(f"not available: {line}")


def document(data: dict[str, Any], pictures: Pictures) -> str:
    """Return docs/hosts-benchmarks.md."""
    results = Results(data)
    parts = [
        *opening("Benchmarks of several hosts", "hosts_report", data),
        METHOD,
        "## Targets",
        "What the project asks of itself: the ratio of Gloo's time to Phalanx's, at the worst of "
        "all measured cells that a line covers (0 where Phalanx failed).",
        markdown(target_table(targets(data), results)),
        *ending(tables(data), failures(results)),
    ]
    return "\n\n".join(parts) + "\n"


def draw(data: dict[str, Any], directory: Path) -> Pictures:
    return []


METHOD = """\
Two hosts with two ranks each, all on this machine: the hosts are namespaces with a network, memory
and processes of their own ([how](hosts.md)), each with a link of the given rate to one switch, in
both directions. The ranks of all implementations live side by side for the whole run; those that
are not being measured sleep. They start together and take turns, round by round. The time of a call
is that of its slowest rank; p50 is the median in the best round, p99 is over all rounds. Tensors
are float32. Training steps are medians over rounds in which the ways take turns; their ratio is the
median of those within each round. Gloo is torch.distributed's, flat: it does not know who shares a
host. Every host must send as many bytes as a tensor has to the other one, whatever the algorithm:
that time is the link's limit. Packets' headers and the latency of messages come on top. All ranks
share the cores of this machine, so what they compute and copy counts for more than on hosts of
their own."""


def limit(rate: str, num_bytes: int) -> float:
    """Return the seconds that the bytes take from one host to the other."""
    return num_bytes * 8 / (Link.read(rate, 0, 0).rate or 1)


REPORT = Report("hosts", "hosts-benchmarks.md", show, draw, document)

if __name__ == "__main__":
    REPORT.main()
