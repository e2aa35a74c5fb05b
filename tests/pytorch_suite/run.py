"""Run PyTorch's tests of torch.distributed once.

python -m pytorch_suite.run --way package --world-size 3 -k all_reduce -k test_barrier
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pytorch_suite.settings import WAYS, Settings


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:8} {text}" for name, text in WAYS.items()),
    )
    parser.add_argument("--way", choices=WAYS, required=True, help="what to test; see below")
    parser.add_argument("--world-size", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--shim", action="store_true", help="GPUs are the CPU: skip hardly a test")
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--timeout", type=int, default=120, metavar="SECONDS", help="of a test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    add_selection(parser)
    return parser.parse_args(arguments)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which tests to run."""
    parser.add_argument(
        "-k", "--select", action="append", default=[], metavar="PATTERN", help="only these tests"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="not these tests"
    )


def is_selected(name: str, select: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether the regular expressions select a test."""

    def found(patterns: Sequence[str]) -> bool:
        return any(re.search(pattern, name) for pattern in patterns)

    return (not select or found(select)) and not found(exclude)


def heed_signals() -> None:
    """Have the first SIGINT or SIGTERM raise KeyboardInterrupt, and ignore those after it."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: Any) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in numbers:
        signal.signal(each, interrupt)


def main(options: argparse.Namespace) -> int:
    """Run the tests; return 1 if one has failed."""
    settings = Settings(
        options.way, options.world_size, options.shim, options.start_method, options.timeout
    )
    settings.export()
    heed_signals()
    with tempfile.TemporaryDirectory(prefix="pytorch-suite-") as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        return _run(settings, options)


def _run(settings: Settings, options: argparse.Namespace) -> int:
    import torch

    from pytorch_suite import harness, results

    harness.end_with_parent(signal.SIGTERM)
    cases = [
        case
        for case in harness.cases()
        if is_selected(case._testMethodName, options.select, options.exclude)
    ]
    if not cases:
        raise SystemExit("no test is selected")
    collector = results.Collector(len(cases), sys.stderr)
    try:
        unittest.TestSuite(cases).run(collector)
    finally:
        collector.close()
        for process in multiprocessing.active_children():  # of a test that was interrupted
            process.kill()
            process.join()
    if options.json:
        run = {"torch": torch.__version__} | dataclasses.asdict(settings)
        results.write(options.json, run, collector.rows)
    print(results.summary(collector.rows))
    return int(results.counts(collector.rows)["fail"] > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(parse()))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
