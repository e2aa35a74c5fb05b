"""Run PyTorch's tests in all ways that are kept track of, and compare with what is expected.

    python -m pytorch_suite                           all runs
    python -m pytorch_suite package-3 -k all_reduce   some tests of one
    python -m pytorch_suite --update                  take what comes out as what is expected

Fails if a test does not do as expected, unless it passes newly, or has no reason not to pass.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pytorch_suite import document, expectations, results
from pytorch_suite.expectations import Outcome
from pytorch_suite.run import add_selection, heed_signals
from pytorch_suite.runs import RUNS
from pytorch_suite.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "pytorch-suite"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="pytorch_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--update", action="store_true", help="write what came out as expected")
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    add_selection(parser)
    options = parser.parse_args(arguments)
    unknown = sorted({*options.runs} - {*RUNS})
    if unknown:
        parser.error(f"unknown run {', '.join(unknown)} (known: {', '.join(RUNS)})")
    return options


def command(settings: Settings, options: argparse.Namespace, path: Path) -> list[str]:
    """Return the command for a run."""
    return [
        *(sys.executable, "-m", "pytorch_suite.run"),
        *("--way", settings.way, "--world-size", str(settings.world_size)),
        *(["--shim"] if settings.shim else []),
        *("--start-method", options.start_method, "--json", str(path)),
        *[f"--select={pattern}" for pattern in options.select],
        *[f"--exclude={pattern}" for pattern in options.exclude],
    ]


def judge(run: str, rows: list[results.Row], options: argparse.Namespace) -> bool:
    """Compare a run with what is expected of it; say what differs, return whether all is well."""
    is_complete = not (options.select or options.exclude)
    expected = expectations.read(run)
    seen = {row.test: Outcome.of(row) for row in rows}
    found = expectations.differences(expected, seen, is_complete)
    if options.update:
        after = seen if is_complete else {**expected, **seen}
        expectations.path_of(run).write_text(expectations.render(after))
        print(f"{len(found)} outcomes of {run} updated")
        found = []
    for difference in found:
        print(f"{'passes now' if difference.is_progress else 'differs'}: {difference}")
    if any(difference.is_progress for difference in found):
        print(f"{run} has become better: run again with --update to have it stay so")
    reasons = expectations.Reasons(expectations.REASONS.read_text())
    unexplained = reasons.missing(RUNS[run].family, seen)
    for test in unexplained:
        print(f"no reason: {test}: {seen[test]} (say why in {expectations.REASONS.name})")
    is_worse = any(not difference.is_progress for difference in found)
    return not unexplained and not is_worse


def main(options: argparse.Namespace) -> int:
    """Run the runs in turn; return 1 if one of them is not as it should be."""
    bad = []
    for run in options.runs or RUNS:
        path = OUT / f"{run}.json"
        path.unlink(missing_ok=True)
        print(f"=== {run}", flush=True)
        with subprocess.Popen(command(RUNS[run], options, path)) as process:
            try:
                process.wait()
            finally:
                process.terminate()
                process.wait()
        if not path.exists():
            print(f"{run} ended with exit code {process.returncode} and no results")
            bad.append(run)
        elif not judge(run, results.read(path), options):
            bad.append(run)
    if options.update:
        document.update()
    print(f"not as expected: {', '.join(bad)}" if bad else "all as expected")
    return int(bool(bad))


if __name__ == "__main__":
    heed_signals()
    try:
        sys.exit(main(parse()))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
