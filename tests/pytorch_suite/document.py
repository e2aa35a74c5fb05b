"""The tables of docs/pytorch-suite.md, made of what is expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pytorch_suite import expectations
from pytorch_suite.expectations import Outcomes, Reasons
from pytorch_suite.results import STATUSES
from pytorch_suite.runs import RUNS
from pytorch_suite.settings import WAYS

PATH = Path(__file__).resolve().parents[2] / "docs" / "pytorch-suite.md"


def tables() -> dict[str, str]:
    """Return the tables by name."""
    outcomes = {run: expectations.read(run) for run in RUNS}
    reasons = Reasons(expectations.REASONS.read_text())
    return {"results": _results(outcomes), "reasons": _reasons(outcomes, reasons)}


def _results(outcomes: Mapping[str, Outcomes]) -> str:
    lines = [f"| run | what is tested | {' | '.join(STATUSES)} |", "|---|---|---|---|---|"]
    for run, settings in RUNS.items():
        counter = Counter(outcome.status for outcome in outcomes[run].values())
        shim = ", with the shim" if settings.shim else ""
        tested = f"{WAYS[settings.way]}; {settings.world_size} ranks{shim}"
        numbers = " | ".join(str(counter[status]) for status in STATUSES)
        lines.append(f"| {run} | {tested} | {numbers} |")
    return "\n".join(lines)


def _reasons(outcomes: Mapping[str, Outcomes], reasons: Reasons) -> str:
    """Return the reasons of each run with the number of tests that they keep from passing."""
    counted: Counter[tuple[str, str]] = Counter()
    for run in RUNS:
        for test, outcome in outcomes[run].items():
            found = reasons.find(RUNS[run].family, test, outcome)
            if outcome.status != "pass" and found is not None:
                counted[reasons.text(*found), run] += 1
    texts = dict.fromkeys(text for text, _ in sorted(counted))
    runs = " | ".join(RUNS)
    lines = [f"| why | {runs} |", f"|---|{'---|' * len(RUNS)}"]
    for text in sorted(texts, key=lambda text: -max(counted[text, run] for run in RUNS)):
        numbers = " | ".join(str(counted[text, run] or "") for run in RUNS)
        lines.append(f"| {text} | {numbers} |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """Return the document with its tables as they should be."""
    for name, table in tables().items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{table}\n{end}{rest.partition(end)[2]}"
    return text


def update() -> None:
    """Write the tables into the document."""
    PATH.write_text(rendered(PATH.read_text()))
