"""What became of each test: collected, shown as it goes on, written down."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
import unittest
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

STATUSES = ("pass", "skip", "fail")
LINES_OF_FAILURE = 12


@dataclasses.dataclass
class Row:
    """What became of one test."""

    test: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    exit_codes: list[int | None] | None = None


def write(path: Path, run: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write what was run, and what became of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = run | {"counts": counts(rows), "tests": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**row) for row in json.loads(path.read_text())["tests"]]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Count the tests of each status."""
    counter = Counter(row.status for row in rows)
    return {status: counter[status] for status in STATUSES}


def summary(rows: Sequence[Row]) -> str:
    """Return a text that ends with the counts and has the last lines of every failure."""
    lines = []
    for row in rows:
        if row.status == "fail":
            first, *others = row.detail.strip().splitlines()
            shown = [first, *others[-LINES_OF_FAILURE:]]
            lines += [f"--- {row.test}", *[f"    {line}" for line in shown]]
    told = ", ".join(f"{number} {status}" for status, number in counts(rows).items())
    return "\n".join([*lines, f"{told} in {sum(row.seconds for row in rows):.0f} s"])


def judge(codes: Sequence[int | None], skips: Mapping[int, str]) -> str | None:
    """Return why a test was skipped, or None if it passed; raise AssertionError if it failed.

    ``codes`` are the exit codes of its ranks, None for one that was too late; ``skips`` says which
    codes mean that a rank skips the test, and why.
    """
    if all(code == 0 for code in codes):
        return None
    if len(set(codes)) == 1 and codes[0] in skips:
        return skips[codes[0]]
    told = ", ".join(f"rank {rank}: {_ending(code)}" for rank, code in enumerate(codes))
    raise AssertionError(f"not all ranks ended well ({told})")


def _ending(code: int | None) -> str:
    if code is None:
        return "too late"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Collector(unittest.TestResult):
    """Collect a row for each test, and show how far they are.

    A terminal shows the current test on a line of its own; a pipe gets a line per test.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._total = total
        self._output = stream
        self._is_terminal = stream.isatty()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.monotonic()
        self._row = Row(_name(test), "pass")
        if self._is_terminal:
            self._show(f"\r\033[K[{len(self.rows) + 1}/{self._total}] {self._row.test}", end="")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._row.status, self._row.detail = "skip", _with_sorted_sets(reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        # The harness's own failures say all; their stack is that of the harness.
        in_ranks = hasattr(test, "exit_codes")
        detail = str(err[1]) if in_ranks else self._exc_info_to_string(err, test)
        self._row.status, self._row.detail = "fail", detail

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        detail = self._exc_info_to_string(err, test)
        self._row.status, self._row.detail = "fail", detail

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._row.status, self._row.detail = "fail", "passed, though it is marked as failing"

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        row = self._row
        row.seconds = round(time.monotonic() - self._started, 2)
        row.exit_codes = getattr(test, "exit_codes", None)
        self.rows.append(row)
        if not self._is_terminal:
            skipped = f" ({row.detail})" if row.status == "skip" else ""
            self._show(f"{row.status} {row.seconds:6.2f} s  {row.test}{skipped}")
        elif row.status == "fail":
            self._show(f"\r\033[Kfail {row.test}")

    def close(self) -> None:
        """Leave an empty line."""
        if self._is_terminal:
            self._show("\r\033[K", end="")

    def _show(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self._output, flush=True)


def _with_sorted_sets(text: str) -> str:
    """Return a text whose sets are in the same order in every process."""
    return re.sub(
        r"\{(.*?)\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text
    )


def _name(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2]
