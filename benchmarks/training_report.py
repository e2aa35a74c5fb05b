"""The numbers of benchmarks.training in words: tables here and in docs/training-benchmarks.md.

    python -m benchmarks.training_report out/training.json --docs docs

writes the document and its plot anew from an earlier run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.bench.results import readable_seconds

from .documents import Pictures, Report, Table, ending, markdown, opening, show_tables

PICTURE = "benchmark-training.png"
COLOURS = {
    "alone": "#999999",
    "gloo": "#d95f02",
    "gloo-view": "#fdae6b",
    "torch-phalanx": "#6a51a3",
    "phalanx": "#1b6ca8",
    "phalanx-view": "#7fb8dd",
}
OURS = ("phalanx", "phalanx-view")


class Target(NamedTuple):
    """A quotient of two measured numbers that must not be larger than `at_most` for any model.

    `quotient` is given the cells of one model by way; what it needs and lacks is a KeyError.
    """

    what: str
    at_most: float
    quotient: Callable[[dict[str, dict]], float]


def _slowest(cells: dict[str, dict]) -> float:
    return max(cells[way]["ratio"] for way in OURS if way in cells)


TARGETS = [
    Target("step with Phalanx's DDP, in steps alone", 1.03, _slowest),
    Target(
        "step with Phalanx's DDP, in steps with torch's DDP on Gloo",
        1.0,
        lambda cells: _slowest(cells) / min(cells[w]["ratio"] for w in ("gloo", "gloo-view")),
    ),
    Target(
        "memory of Phalanx's DDP (PSS), in that of torch's with bucket views",
        1.0,
        lambda cells: max(cells[way]["share"] for way in OURS) / cells["gloo-view"]["share"],
    ),
]


def tables(data: dict) -> list[Table]:
    """Return a table per model."""
    found = []
    for model in dict.fromkeys(one["model"] for one in data["results"]):
        cells = [one for one in data["results"] if one["model"] == model]
        first = cells[0]
        title = (
            f"{data['titles'][model]}: {first['parameters'] / 1e6:.1f} M parameters in "
            f"{first['tensors']:,} tensors, rows of {first['steps']} steps"
        )
        heading = ["", "step", "in steps alone", "peak memory", "share of memory"]
        rows = [
            [
                data["titles"][one["way"]],
                readable_seconds(one["seconds"]),
                f"{one['ratio']:.3f}x" if "ratio" in one else "-",
                mebibytes(one["peak"]),
                mebibytes(one["share"]),
            ]
            for one in cells
        ]
        found.append((title, heading, rows))
    return found


def target_table(data: dict) -> Table:
    """Return the project's own targets, each with the worst quotient over the models."""
    by_model: dict[str, dict[str, dict]] = {}
    for one in data["results"]:
        by_model.setdefault(one["model"], {})[one["way"]] = one
    failed = [
        (math.inf, data["titles"][one["model"]]) for one in data["failures"] if one["way"] in OURS
    ]
    rows = []
    for target in TARGETS:
        found = list(failed)
        for model, cells in by_model.items():
            try:
                found.append((target.quotient(cells), data["titles"][model]))
            except (KeyError, ValueError):
                continue  # what it compares was not measured
        limit = f"{target.at_most:g}x"
        if not found:
            rows.append([target.what, limit, "not measured", "", ""])
            continue
        worst, where = max(found)
        measured = "failed" if worst == math.inf else f"{worst:.3f}x"
        outcome = "met" if worst <= target.at_most else "missed"
        rows.append([target.what, limit, measured, where, outcome])
    return "Targets", ["what", "at most", "worst measured", "where", "outcome"], rows


def progress(one: dict) -> str:
    ratio = f"  {one['ratio']:.3f}x" if "ratio" in one else ""
    return f"{one['model']:<8} {one['way']:<13} {readable_seconds(one['seconds']):>8}{ratio}"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def show(data: dict) -> None:
    """Print everything."""
    show_tables([*tables(data), target_table(data)])
    for line in failures(data):
        print(f"FAILED: {line}")


def failures(data: dict) -> list[str]:
    """Return a line per way that failed."""
    return [
        f"{data['titles'][one['way']]}, {data['titles'][one['model']]}: "
        f"{one['error'].splitlines()[0]}"
        for one in data["failures"]
    ]


METHOD = """\
{ranks} ranks, processes with one thread each, live in a Phalanx world and in a Gloo world at once;
"torch's DDP on Phalanx" is torch's reducer on a group of torch.distributed whose backend is
Phalanx. Every way to train has its own copy of the model and its own optimizer (AdamW) and sees the
same batches; "alone" trains the plain module on all ranks at the same time, without communication.
The first gradients of each way are checked against the averages of the ranks' own. Ways take turns,
a row of steps each, in {rounds} rounds that begin with another one each time; the slower rank
counts. Times are medians over the rounds; so are the ratios to a step alone, taken within each
round. Memory is measured in new processes, one way each: how far the resident set of a rank rose at
most over what it was before there was a model, and how far its share of the machine's memory (PSS:
a page that two ranks use counts half in each) had risen after the last step."""


def document(data: dict, pictures: Pictures) -> str:
    """Return docs/training-benchmarks.md."""
    parts = [
        *opening("Training steps", "training_report", data),
        METHOD.format(**data),
        "## Targets",
        "What the project asks of itself, at the worst of the measured models.",
        markdown(target_table(data)),
        *[f"## Steps\n\n![{caption}]({name})" for caption, name in pictures],
        *ending(tables(data), failures(data)),
    ]
    return "\n\n".join(parts) + "\n"


def draw(data: dict, directory: Path) -> Pictures:
    """Draw the ratios, if there are any: a group of bars per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    cells = [one for one in data["results"] if "ratio" in one]
    models = list(dict.fromkeys(one["model"] for one in cells))
    ways = [way for way in dict.fromkeys(one["way"] for one in cells) if way != "alone"]
    if not ways:
        return []
    figure = Figure(figsize=(1.5 + 2.2 * len(models), 3.6), layout="constrained")
    axis: Any = figure.subplots()
    width = 0.8 / len(ways)
    for index, way in enumerate(ways):
        ratios = {one["model"]: one["ratio"] for one in cells if one["way"] == way}
        places = [place + (index - (len(ways) - 1) / 2) * width for place in range(len(models))]
        heights = [100 * (ratios.get(model, math.nan) - 1) for model in models]
        bars = axis.bar(places, heights, width, color=COLOURS.get(way), label=data["titles"][way])
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.axhline(0, color=COLOURS["alone"], linewidth=1)
    axis.set_xticks(range(len(models)), [data["titles"][model] for model in models], fontsize=8)
    axis.set_ylabel("time added to a step alone, %")
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(ways))
    figure.savefig(directory / PICTURE, dpi=110)
    return [("What communication adds to a step", PICTURE)]


REPORT = Report("training", "training-benchmarks.md", show, draw, document)

if __name__ == "__main__":
    REPORT.main()
