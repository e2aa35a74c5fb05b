"""What the subcommands of the command line share.

A command is a module with a docstring, `EXAMPLES` (pairs of a command line and what it does),
`configure(parser)`, and `run(arguments)`, which returns the exit code. Importing it is cheap:
torch, rich and the like are imported by `run`.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from types import ModuleType
from typing import NamedTuple


class CommandError(Exception):
    """Ends a command with exit code 1 and a message instead of a traceback."""


class Command(NamedTuple):
    """Where a command is found, and what the list of commands says of it."""

    module: str
    about: str


COMMANDS = {
    "run": Command("phalanx.launch.run", "run a program on several ranks of this machine"),
    "demo": Command("phalanx.demo.command", "take a tour in a minute"),
    "ps": Command("phalanx.debug.ps", "list the jobs of this user on this machine"),
    "top": Command("phalanx.debug.top", "watch what every rank of a job does"),
    "why": Command("phalanx.debug.why", "say why a job does not move"),
    "trace": Command("phalanx.trace.command", "draw a timeline of a job that was recorded"),
    "bench": Command("phalanx.bench.command", "measure operations, alone or beside Gloo and MPI"),
    "plan": Command("phalanx.plan.command", "predict what more hosts would cost"),
    "doctor": Command("phalanx.doctor.command", "find what makes jobs slow or fail here"),
    "completion": Command("phalanx.completion", "make a shell complete these commands"),
}


def describe(parser: ArgumentParser, module: ModuleType) -> None:
    """Give a command's parser its arguments, its description and its examples."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = (module.__doc__ or "").strip()
    width = max(len(line) for line, _ in module.EXAMPLES)
    examples = [f"  {line:<{width}}  {effect}" for line, effect in module.EXAMPLES]
    parser.epilog = "\n".join(["examples:", *examples])
    module.configure(parser)
    parser.set_defaults(run=module.run, parser=parser)
