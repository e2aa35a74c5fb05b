"""Launching programs with ``phalanx run``, for tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Written = Callable[[str], Path]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "phalanx", "run", *map(str, arguments)]


def run(*arguments: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=100, **kwargs
    )  # type: ignore[call-overload]


def default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):  # ignored below some shells
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(*arguments: object, **kwargs: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
        **kwargs,
    )  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
