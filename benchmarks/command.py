"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from phalanx.bench import facts

from .documents import Report

T = TypeVar("T")


def parser(report: Report, summary: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has; `summary` is its docstring."""
    name = report.benchmark
    found = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(summary or "").partition("\n")[0]
    )
    add = found.add_argument
    add("--quick", action="store_true", help="few and short measurements: a look")
    add("--rounds", type=int, metavar="N", help="how often those who are compared take turns")
    add("--out", type=Path, default=Path(f"out/{name}.json"), help="every number, as JSON")
    add("--docs", type=Path, help=f"also write {report.document} and its plots there")
    return found


def listed(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a reader of words with commas between them."""
    return lambda text: [convert(word) for word in text.split(",") if word]


def known(names: Collection[str], what: str) -> Callable[[str], str]:
    """Return a reader of one of these names."""

    def read(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"unknown {what} {name!r} (known: {', '.join(names)})")
        return name

    return read


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the named options that were given."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def carry_out(
    report: Report,
    options: argparse.Namespace,
    arguments: list[str] | None,
    about: dict[str, Any],
    run: Callable[[], dict[str, Any]],
) -> None:
    """Run a benchmark, keep all its numbers, and show and write up what they say.

    What the run returns is added to what there is to say `about` it.
    """
    data = {
        "command": command_line(report.benchmark, sys.argv[1:] if arguments is None else arguments),
        "machine": facts.describe(),
        **about,
    }
    began = time.monotonic()
    data |= run()
    data["seconds"] = round(time.monotonic() - began, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    report.show(data)
    print(f"wrote {options.out}")
    if options.docs:
        report.write(data, options.docs)


def command_line(module: str, arguments: list[str]) -> str:
    """Return how the run was asked for, with directories shortened to their names."""
    short = [Path(word).name if word.startswith("/") else word for word in arguments]
    return " ".join([f"python -m benchmarks.{module}", *short])
