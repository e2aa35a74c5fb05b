"""What a test on four ranks costs: pytest.mark.world beside the test cases of torch.

    python -m benchmarks.testing --docs docs     # everything
    python -m benchmarks.testing --quick         # a look

The same body, an all_reduce whose result is checked, is run by pytest in one session: on threads
and on warm processes of Phalanx, and in torch's MultiThreadedTestCase, MultiProcessTestCase (new
processes for each test) and MultiProcContinuousTest (which keeps processes and their group).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from phalanx.bench.results import readable_ratio, readable_seconds

from . import command
from .command import known, listed
from .documents import Pictures, Report, Table, ending, markdown, opening, show_tables
from .turns import compare

RANKS = 4
PLUGIN = "phalanx.testing.plugin"

PREAMBLE = f"""
import phalanx
import pytest
import torch
import torch.distributed
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)


def body(dist):
    x = torch.full((1024,), float(dist.get_rank()))
    dist.all_reduce(x)
    assert x.tolist() == [{sum(range(RANKS))}.0] * 1024
"""

FUNCTION = """
@pytest.mark.world({mark})
def {test}():
    body({dist})
"""

THREADED = f"""
class Case{{turn}}(MultiThreadedTestCase):
    world_size = {RANKS}

    def setUp(self):
        super().setUp()
        self._spawn_threads()
"""

NEW_PROCESSES = f"""
class Case{{turn}}(MultiProcessTestCase):
    world_size = {RANKS}

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def make_group(self):
        store = torch.distributed.FileStore(self.file_name, self.world_size)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size
        )
"""

CONTINUOUS = f"""
class Case{{turn}}(MultiProcContinuousTest):
    world_size = {RANKS}
    backend_str = classmethod(lambda cls: "gloo")
    device_type = classmethod(lambda cls: "cpu")
"""

METHOD = """
    def {test}(self):
        {before}body(torch.distributed)
"""

CONFTEST = """
import json, re
from pathlib import Path

found = {}

def pytest_runtest_logreport(report):
    entry = found.setdefault(report.nodeid, {"seconds": 0.0, "error": None})
    entry["seconds"] += report.duration
    if report.outcome != "passed":
        entry["error"] = report.longreprtext

def pytest_sessionfinish():
    rows = []
    for nodeid, entry in found.items():
        way, turn, index = re.search(r"test_(\\w+)_(\\d+)_(\\d+)", nodeid).groups()
        rows.append({"way": way, "turn": int(turn), "index": int(index), **entry})
    Path("results.json").write_text(json.dumps(rows))
"""


class Way(NamedTuple):
    """A way to run a test on several ranks."""

    title: str
    mark: str = ""  # of tests that are functions
    dist: str = "torch.distributed"  # what their body communicates with
    case: str = ""  # the class of tests that are methods
    before: str = ""  # what their body begins with
    alone: bool = False  # no test leaves anything to the next, so that one in a round will do

    def tests(self, name: str, turn: int, count: int) -> str:
        """Return the source of the tests of one round."""
        names = [f"test_{name}_{turn}_{index}" for index in range(1 if self.alone else count)]
        if not self.case:
            return "".join(
                FUNCTION.format(mark=self.mark, test=test, dist=self.dist) for test in names
            )
        methods = [METHOD.format(test=test, before=self.before) for test in names]
        return self.case.format(turn=f"_{name}_{turn}") + "".join(methods)


WAYS = {
    "threads": Way("world(4)", mark=f"{RANKS}", dist="phalanx"),
    "torch": Way("world(4, torch=True)", mark=f"{RANKS}, torch=True"),
    "threaded": Way("MultiThreadedTestCase", case=THREADED),
    "processes": Way(
        'world(4, ranks="processes")', mark=f'{RANKS}, ranks="processes"', dist="phalanx"
    ),
    "continuous": Way("MultiProcContinuousTest", case=CONTINUOUS),
    "new": Way(
        "MultiProcessTestCase",
        case=NEW_PROCESSES,
        before="self.make_group()\n        ",
        alone=True,
    ),
}
# Whose times those of a way are divided by.
PEERS = {
    "threads": ["threaded"],
    "torch": ["threaded"],
    "processes": ["new", "continuous"],
}
# Seconds that a test may cost, once others have run.
TARGETS = {"threads": 0.05, "torch": 0.05, "processes": 0.2}


def run(ways: list[str], rounds: int, count: int) -> dict[str, Any]:
    """Run one test of each way in a session of its own, and then all in one.

    There, each round begins with another way.
    """
    order = [ways[turn % len(ways) :] + ways[: turn % len(ways)] for turn in range(rounds)]
    tests = [WAYS[way].tests(way, turn, count) for turn in range(rounds) for way in order[turn]]
    first = [one for way in ways for one in session([WAYS[way].tests(way, 0, 1)])]
    return {"first": first, "results": session(tests)}


def session(tests: list[str]) -> list[dict[str, Any]]:
    """Return what became of tests that pytest has run, in their order."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        Path(name, "conftest.py").write_text(CONFTEST)
        Path(name, "test_costs.py").write_text(PREAMBLE + "".join(tests))
        installed = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
        plugin = [] if installed else ["-p", PLUGIN]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "."],
            cwd=name,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results = Path(name, "results.json")
        if not results.exists():
            raise SystemExit(f"pytest did not come to an end:\n{done.stdout}")
        return list(json.loads(results.read_text()))


class Times:
    """The times of the tests of one way."""

    def __init__(self, way: str, data: dict[str, Any]) -> None:
        self.way = way
        (self.first,) = [one["seconds"] for one in data["first"] if one["way"] == way]
        own = [one for one in data["results"] if one["way"] == way]
        self.error = next((one["error"] for one in own if one["error"]), None)
        last = max((one["index"] for one in own), default=0)
        # The first of a class starts its processes, and the last ends them.
        counted = [one for one in own if WAYS[way].alone or 0 < one["index"] < last]
        self.rounds = [
            [one["seconds"] for one in counted if one["turn"] == turn]
            for turn in sorted({one["turn"] for one in own})
        ]

    @property
    def median(self) -> float:
        return median(seconds for each in self.rounds for seconds in each)

    def faster_than(self, other: Times) -> str:
        """Return how many times: the median over the rounds, and the middle half of them."""
        ratio = compare(*([median(each) for each in times.rounds] for times in (other, self)))
        return (
            f"{readable_ratio(ratio.median)} "
            f"({readable_ratio(ratio.low)} - {readable_ratio(ratio.high)})"
        )


def times(data: dict[str, Any]) -> dict[str, Times]:
    """Return the times of the ways that were measured."""
    names = {one["way"] for one in data["results"]}
    return {way: Times(way, data) for way in WAYS if way in names}


def cost_table(data: dict[str, Any]) -> Table:
    found = times(data)
    rows = []
    for way, own in found.items():
        name = f"`{WAYS[way].title}`"
        if own.error:
            rows.append([name, "failed", "-", "-"])
            continue
        ratios = [
            f"{own.faster_than(found[peer])} {WAYS[peer].title}"
            for peer in PEERS.get(way, [])
            if peer in found and not found[peer].error
        ]
        seconds = readable_seconds(own.median), readable_seconds(own.first)
        rows.append([name, *seconds, ", ".join(ratios) or "-"])
    heading = ["", "a test", "the only one of a session", "times faster than"]
    return f"A test on {RANKS} ranks", heading, rows


def target_table(data: dict[str, Any]) -> Table:
    found = times(data)
    rows = []
    for way, limit in TARGETS.items():
        if way not in found:
            rows.append([WAYS[way].title, readable_seconds(limit), "not measured", ""])
        elif found[way].error:
            rows.append([WAYS[way].title, readable_seconds(limit), "failed", "missed"])
        else:
            seconds = found[way].median
            outcome = "met" if seconds < limit else "missed"
            rows.append(
                [WAYS[way].title, readable_seconds(limit), readable_seconds(seconds), outcome]
            )
    return "Targets", ["what", "less than", "measured", "outcome"], rows


def failures(data: dict[str, Any]) -> list[str]:
    found = times(data).values()
    return [
        f"{WAYS[own.way].title}: {own.error.strip().splitlines()[-1]}" for own in found if own.error
    ]


def show(data: dict[str, Any]) -> None:
    """Print everything."""
    show_tables([cost_table(data), target_table(data)])
    for line in failures(data):
        print(f"FAILED: {line}")


METHOD_TEXT = """\
The body of each test is an all_reduce of 4 KiB on {ranks} ranks and a check of its result. It takes
less than a millisecond in a world that is there, and is part of the times. All tests run in one
session of pytest. The ways take turns: in each of {rounds} rounds, {count} tests of each, of which
the first and the last do not count (classes start and end processes there), and one of
`MultiProcessTestCase`, where tests have nothing in common. A time is that of setting up, calling
and tearing down as pytest tells it. A ratio is taken within each round: given are the median over
the rounds and the middle half of them. A session of its own, with one test, says what the first
test costs; importing torch is not part of that.

`MultiProcContinuousTest` keeps one process group, and all that a test leaves behind, for a whole
class. `world(4, ranks="processes")` makes a new group for each test, and gives it processes that
are as new ones are. `MultiThreadedTestCase` has one random stream for all ranks."""


def document(data: dict[str, Any], pictures: Pictures) -> str:
    """Return docs/testing-benchmarks.md."""
    parts = [
        *opening("What a test costs", "testing", data),
        METHOD_TEXT.format(**data),
        "## Targets",
        markdown(target_table(data)),
        *ending([cost_table(data)], failures(data)),
    ]
    return "\n\n".join(parts) + "\n"


REPORT = Report("testing", "testing-benchmarks.md", show, lambda data, directory: [], document)


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(REPORT, __doc__)
    read = listed(known(WAYS, "way"))
    parser.add_argument(
        "--ways", type=read, metavar="NAMES", help=f"only these, of {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--tests", type=int, metavar="N", help="how many of each way in a round; at least 3"
    )
    options = parser.parse_args(arguments)
    if options.tests is not None and options.tests < 3:
        parser.error("--tests: at least 3, since the first and the last of a round do not count")
    rounds = options.rounds or (2 if options.quick else 7)
    count = options.tests or (3 if options.quick else 6)
    ways = options.ways or list(WAYS)
    about = {"ranks": RANKS, "rounds": rounds, "count": count}
    command.carry_out(REPORT, options, arguments, about, lambda: run(ways, rounds, count))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
