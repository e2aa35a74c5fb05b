"""The command line: ``phalanx COMMAND``, or ``python -m phalanx COMMAND``."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from phalanx.debug.outside import JobNotFound

# Each is a module with a docstring, `configure(parser)` and `run(arguments)`, which returns the
# exit code.
COMMANDS = {
    "ps": "phalanx.debug.ps",
    "top": "phalanx.debug.top",
    "why": "phalanx.debug.why",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 not possible, 2 wrong usage."""
    parser = ArgumentParser("phalanx", description="Look after jobs of phalanx on this machine.")
    parser.add_argument("--version", action="version", version=f"phalanx {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        about = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=about, description=about)
        module.configure(command)
        command.set_defaults(run=module.run)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except JobNotFound as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone; say nothing on the way out
        return 0
    except KeyboardInterrupt:
        return 130


def _version() -> str:
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"
