"""The command line: ``phalanx COMMAND``, or ``python -m phalanx COMMAND``."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Sequence

from phalanx import completion
from phalanx.commands import COMMANDS, CommandError, describe
from phalanx.extras import MissingExtra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 not possible, 2 wrong usage."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if completion.is_asked():
            completion.answer(_parser(words, COMMANDS))
        asked = [word for word in words if not word.startswith("-")][:1]
        given, unknown = _parser(words, asked).parse_known_args(words)
        if unknown:
            given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(given.run(given))
    except (CommandError, MissingExtra) as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has gone; say nothing on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser(words: Sequence[str], asked: Collection[str]) -> ArgumentParser:
    """Build the parser, with the arguments of those commands that are asked for."""
    parser = ArgumentParser(
        "phalanx", description="Run, watch and measure distributed jobs on this machine."
    )
    if "--version" in words:
        parser.add_argument("--version", action="version", version=f"phalanx {_version()}")
    else:
        parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.about, allow_abbrev=False)
        if name in asked:
            describe(subparser, importlib.import_module(command.module))
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"
