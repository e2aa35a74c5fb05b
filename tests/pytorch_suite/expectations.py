"""What is expected of each test in each run, and why some cannot pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytorch_suite.results import STATUSES, Row

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = Path(__file__).parent / "expected"
REASONS = Path(__file__).parent / "reasons.toml"


@dataclass(frozen=True, order=True)
class Outcome:
    """What is expected of a test: its status and, if PyTorch skips it, what PyTorch says."""

    status: str
    said: str = ""

    @classmethod
    def of(cls, row: Row) -> Outcome:
        """Return the outcome of a test that ran."""
        return cls(row.status, row.detail if row.status == "skip" else "")

    def __str__(self) -> str:
        return f"{self.status}: {self.said}" if self.said else self.status


Outcomes = Mapping[str, Outcome]


def path_of(run: str) -> Path:
    """Return where the outcomes of a run are written."""
    return DIRECTORY / f"{run}.txt"


def read(run: str) -> dict[str, Outcome]:
    """Return the outcomes that are expected of a run, none if it has never been written."""
    path = path_of(run)
    return parse(path.read_text()) if path.exists() else {}


def parse(text: str) -> dict[str, Outcome]:
    """Return the outcomes that a text tells, one test a line."""
    outcomes = {}
    for line in text.splitlines():
        test, _, outcome = line.partition(" ")
        status, _, said = outcome.partition(": ")
        if status not in STATUSES:
            raise ValueError(f"status {status!r} of {test} (known: {', '.join(STATUSES)})")
        outcomes[test] = Outcome(status, said)
    return outcomes


def render(outcomes: Outcomes) -> str:
    """Return the outcomes as a text with a line for each test, sorted."""
    return "".join(f"{test} {outcomes[test]}\n" for test in sorted(outcomes))


class Reasons:
    """Why tests do not pass: by name, or by what PyTorch says when it skips them.

    By name in the table of the way's ``family``, or in that for all; then by a regular expression.
    """

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[str, str]] = tomllib.loads(text)

    def find(self, family: str, test: str, outcome: Outcome) -> tuple[str, str] | None:
        """Return the table and the key of the reason for an outcome, if there is one."""
        for table in (family, "tests"):
            if test in self._tables[table]:
                return table, test
        if outcome.status == "skip":
            for pattern in self._tables["skips"]:
                if re.fullmatch(pattern, outcome.said):
                    return "skips", pattern
        return None

    def text(self, table: str, key: str) -> str:
        """Return a reason."""
        return self._tables[table][key]

    def missing(self, family: str, outcomes: Outcomes) -> list[str]:
        """Return the tests that neither pass nor have a reason."""
        return sorted(
            test
            for test, outcome in outcomes.items()
            if outcome.status != "pass" and self.find(family, test, outcome) is None
        )

    def all(self) -> set[tuple[str, str]]:
        """Return the table and the key of each reason."""
        return {(table, key) for table, reasons in self._tables.items() for key in reasons}


@dataclass(frozen=True)
class Difference:
    """A test whose outcome is not the expected one."""

    test: str
    expected: Outcome | None
    seen: Outcome | None

    @property
    def is_progress(self) -> bool:
        """Return whether the test passes now, and did not or was not there."""
        return self.seen is not None and self.seen.status == "pass"

    def __str__(self) -> str:
        expected = self.expected or "not in the list"
        seen = self.seen or "not there any more"
        return f"{self.test}: {seen} (expected: {expected})"


def differences(expected: Outcomes, seen: Outcomes, is_complete: bool) -> list[Difference]:
    """Compare what was seen with what is expected; of all tests if the run was complete."""
    tests = {*expected, *seen} if is_complete else seen
    return [
        Difference(test, expected.get(test), seen.get(test))
        for test in sorted(tests)
        if expected.get(test) != seen.get(test)
    ]
