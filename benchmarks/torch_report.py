"""The numbers of benchmarks.torch_backend in words: tables here and in docs/torch-benchmarks.md.

    python -m benchmarks.torch_report out/torch_backend.json --docs docs

writes the document and its plot anew from an earlier run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.bench.results import readable_bytes, readable_ratio, readable_seconds

from .documents import (
    Pictures,
    Report,
    Table,
    ending,
    markdown,
    opening,
    show_tables,
)
from .targets import Verdict, target_table, worst
from .turns import Ratio, compare

PICTURE = "benchmark-torch.png"
WAYS = {
    "gloo": "on Gloo",
    "phalanx": "on Phalanx",
    "itself": "Phalanx itself",
    "whole": "not split",
    "alone": "alone",
}
PARTS = {
    "calls": "Calls through torch.distributed",
    "decode": "Tensor-parallel decoding",
    "fsdp": "Training steps, FSDP2",
    "ddp": "Training steps, torch's DDP",
}
REFERENCES = {  # the way without what is measured, and what a time is counted in beside it
    "calls": ("itself", "calls of Phalanx itself"),
    "decode": ("whole", "tokens not split"),
    "fsdp": ("alone", "steps alone"),
    "ddp": ("alone", "steps alone"),
}
MATTERS = 1.1  # communication does if Gloo makes a step this many times as long


class Cell(NamedTuple):
    """What was measured of one thing: the times of each way, and why others have none."""

    part: str
    what: str
    num_bytes: int
    times: dict[str, list[float]]
    errors: dict[str, str]

    @property
    def name(self) -> str:
        return self.what + (f" {readable_bytes(self.num_bytes)}" if self.num_bytes else "")

    def faster(self, way: str, other: str) -> Ratio | None:
        """Return how many times faster `way` is than `other`, None if one was not measured."""
        if way in self.times and other in self.times:
            return compare(self.times[other], self.times[way])
        return None


def cells(data: dict) -> list[Cell]:
    found: dict[tuple[str, str, int], Cell] = {}
    for one in data["results"]:
        key = (one["part"], one["what"], one["bytes"])
        cell = found.setdefault(key, Cell(*key, {}, {}))
        if one["error"] is None:
            cell.times[one["way"]] = one["times"]
        else:
            cell.errors[one["way"]] = one["error"]
    return list(found.values())


class Target(NamedTuple):
    """At least `at_least` times Gloo's speed in every cell that `covers` picks."""

    what: str
    at_least: float
    covers: Callable[[Cell], bool]

    @property
    def rule(self) -> str:
        return f"{self.at_least:g}x Gloo"

    def verdict(self, found: list[Cell]) -> Verdict | None:
        """Return the lowest ratio, 0 where Phalanx failed, None if no cell was measured."""
        ratios = []
        for cell in filter(self.covers, found):
            if "phalanx" in cell.errors:
                ratios.append((0.0, cell.name))
            elif ratio := cell.faster("phalanx", "gloo"):
                ratios.append((ratio.median, cell.name))
        return worst(ratios)


def in_part(*parts: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.part in parts


def where_it_matters(part: str) -> Callable[[Cell], bool]:
    def covers(cell: Cell) -> bool:
        if cell.part != part:
            return False
        ratio = cell.faster("alone", "gloo")
        return ratio is not None and ratio.median >= MATTERS

    return covers


TARGETS = [
    Target("all_reduce of 8 B", 50, lambda cell: (cell.what, cell.num_bytes) == ("all_reduce", 8)),
    Target("every call, every size", 1, in_part("calls")),
    Target("tensor-parallel decoding", 1.3, in_part("decode")),
    Target("FSDP2, every model", 1, in_part("fsdp")),
    Target("FSDP2, where communication matters", 1.05, where_it_matters("fsdp")),
    Target("torch's DDP, every model", 1, in_part("ddp")),
    Target("torch's DDP, where communication matters", 1.05, where_it_matters("ddp")),
]


def tables(found: list[Cell]) -> list[Table]:
    """Return a table per part."""
    return [
        _table(part, [cell for cell in found if cell.part == part])
        for part in dict.fromkeys(cell.part for cell in found)
    ]


def _table(part: str, found: list[Cell]) -> Table:
    reference, units = REFERENCES[part]
    heading = [
        "",
        *[WAYS[way] for way in ("gloo", "phalanx", reference)],
        "times faster",
        "middle half of rounds",
        *[f"{WAYS[way]}, in {units}" for way in ("gloo", "phalanx")],
    ]
    rows = []
    for cell in found:
        ratio = cell.faster("phalanx", "gloo")
        rows.append(
            [
                cell.name,
                *[readable_time(cell, way) for way in ("gloo", "phalanx", reference)],
                readable_ratio(ratio and ratio.median),
                f"{readable_ratio(ratio.low)} - {readable_ratio(ratio.high)}" if ratio else "-",
                *[
                    readable_ratio((slower := cell.faster(reference, way)) and slower.median)
                    for way in ("gloo", "phalanx")
                ],
            ]
        )
    return PARTS[part], heading, rows


def readable_time(cell: Cell, way: str) -> str:
    """Write the median over the rounds; of decoding, as tokens per second."""
    if way not in cell.times:
        return "failed" if way in cell.errors else "-"
    seconds = statistics.median(cell.times[way])
    return f"{1 / seconds:.0f}/s" if cell.part == "decode" else readable_seconds(seconds)


def progress(results: list[dict]) -> str:
    (cell,) = cells({"results": results})
    times = [f"{WAYS[way]} {readable_time(cell, way)}" for way in [*cell.times, *cell.errors]]
    ratio = cell.faster("phalanx", "gloo")
    return "   ".join(
        [f"{cell.part:<7}{cell.name:<30}", *times, readable_ratio(ratio and ratio.median)]
    )


def failures(found: list[Cell]) -> list[str]:
    """Return a line per way that failed."""
    lines = {
        f"{PARTS[cell.part]}: {cell.what} {WAYS[way]}: {error.splitlines()[0]}": None
        for cell in found
        for way, error in cell.errors.items()
    }
    return list(lines)


def show(data: dict) -> None:
    """Print everything."""
    found = cells(data)
    show_tables([*tables(found), target_table(TARGETS, found)])
    for line in failures(found):
        print(f"FAILED: {line}")


METHOD = """\
{ranks} ranks, processes with one thread each, are at once in a group of torch.distributed on Gloo
and in one on Phalanx (`new_group(backend="phalanx")`). Ways take turns, a row each, in {rounds}
rounds that begin with another one each time; the slower rank counts. A ratio is taken within each
round: given are the median over the rounds and the middle half of them. Times say what this machine
took; only ratios are meant to carry over.

- Calls: results are checked first; ranks start together before every batch of up to 50 calls, above
  64 KiB before every call. A size is the larger buffer of a rank (float32); send_recv is half a
  round trip; functional_all_reduce is torch's functional collective and the wait for it. "Phalanx
  itself" is the same call of the package, without torch.distributed.
- Decoding: a model built as LLaMA is ({layers} layers, SwiGLU, rotary places, a cache of keys and
  values, float32) writes a text, batch 1, split by `parallelize_module`: two all_reduces a layer
  and an all_gather of the logits. Logits are checked against those of the model that is not split,
  which both ranks run at the same time ("not split").
- Steps: `fully_shard` (layer by layer) and DistributedDataParallel with AdamW, every way with its
  own copy of the model, on the same batches. The first gradients are checked against the averages
  of the ranks' own. "Alone" trains on both ranks at the same time without communication."""


def document(data: dict, pictures: Pictures) -> str:
    """Return docs/torch-benchmarks.md."""
    found = cells(data)
    parts = [
        *opening("torch.distributed on Phalanx", "torch_report", data),
        METHOD.format(**data),
        "## Targets",
        "What the project asks of itself: how many times faster than on Gloo, at the worst of the "
        "cells that a line covers (0 where Phalanx failed). Communication matters where a step on "
        f"Gloo takes at least {MATTERS:g} steps alone.",
        markdown(target_table(TARGETS, found)),
        *[f"## Times faster than on Gloo\n\n![{caption}]({name})" for caption, name in pictures],
        *ending(tables(found), failures(found)),
    ]
    return "\n\n".join(parts) + "\n"


def draw(data: dict, directory: Path) -> Pictures:
    """Draw how many times faster each cell is on Phalanx, if there is any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    found = [(cell, ratio) for cell in cells(data) if (ratio := cell.faster("phalanx", "gloo"))]
    panels = [part for part in PARTS if any(cell.part == part for cell, _ in found)]
    if not panels:
        return []
    widths = [max(6, sum(cell.part == part for cell, _ in found)) for part in panels]
    figure = Figure(figsize=(1 + 0.36 * sum(widths), 4.2), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)
    for axis, part in zip(axes.flat, panels, strict=True):
        chosen = [(cell, ratio) for cell, ratio in found if cell.part == part]
        medians = [ratio.median for _, ratio in chosen]
        below = [ratio.median - ratio.low for _, ratio in chosen]
        above = [ratio.high - ratio.median for _, ratio in chosen]
        bars = axis.bar(range(len(chosen)), medians, yerr=[below, above], color="#c0392b")
        axis.bar_label(
            bars, [readable_ratio(median)[:-1] for median in medians], fontsize=7, padding=2
        )
        names = [cell.name for cell, _ in chosen]
        axis.set_xticks(range(len(chosen)), names, rotation=90, fontsize=7)
        axis.set_title(PARTS[part], fontsize=8)
        axis.axhline(1, color="#7f8c8d", linewidth=1)
        if part == "calls":
            axis.set_yscale("log")
    figure.savefig(directory / PICTURE, dpi=110)
    return [("The same call, token or step on Gloo and on Phalanx", PICTURE)]


REPORT = Report("torch_backend", "torch-benchmarks.md", show, draw, document)

if __name__ == "__main__":
    REPORT.main()
