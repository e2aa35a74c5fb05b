"""Print what makes a shell complete the arguments of ``phalanx``."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from phalanx.extras import need

EXAMPLES = [
    ('eval "$(phalanx completion bash)"', "in ~/.bashrc"),
    ('eval "$(phalanx completion zsh)"', "in ~/.zshrc, after compinit"),
    ("phalanx completion fish | source", "in ~/.config/fish/config.fish"),
]

SHELLS = ("bash", "zsh", "fish")


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to print it for")


def run(arguments: Namespace) -> int:
    argcomplete = need("argcomplete", "completion", "completion in a shell")
    print(argcomplete.shellcode(["phalanx"], shell=arguments.shell))
    return 0


def is_asked() -> bool:
    """Say whether this process was started by a shell that wants to complete a line."""
    return "_ARGCOMPLETE" in os.environ


def answer(parser: ArgumentParser) -> None:
    """Tell the shell how its line may go on, and exit."""
    need("argcomplete", "completion", "completion in a shell").autocomplete(parser)
