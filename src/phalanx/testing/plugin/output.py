"""What ranks that are threads print and log, in sections of their own."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple, cast

import pytest

from phalanx.launch import identity, voices
from phalanx.launch.outcomes import Failure

# These read what Python code writes, of which the rank is known.
_OF_PYTHON = {"capsys", "capsysbinary"}

# Where torch.distributed logs every failing call, for whoever puts a handler there.
_FOR_NOBODY = "c10d-NullHandler"


@contextmanager
def kept_apart(item: pytest.Function, arguments: dict[str, Any]) -> Iterator[Captures]:
    """Keep the output of ranks apart, and add sections of it to the test's report.

    Where nothing is captured lines are labelled instead. A test that takes capsys reads, on each
    rank, what that rank has written. capfd, and fixtures that use either, read the lines of all.
    """
    readers = {
        name for name, value in item.funcargs.items() if isinstance(value, pytest.CaptureFixture)
    }
    with _logs(item) as records:
        if not readers and item.config.getoption("capture") in ("no", "tee-sys"):
            with voices.labelled():
                yield Captures(records)
        elif not readers <= _OF_PYTHON.intersection(arguments):
            with voices.whole_lines():
                yield Captures(records)
        else:
            with _terminal(item.funcargs, readers) as terminal, voices.collected() as heard:
                try:
                    yield Captures(records, heard, terminal)
                finally:
                    for rank in heard.ranks():
                        for name in voices.NAMES:
                            add_section(item, rank, name, heard.take(rank, name))


def add_section(item: pytest.Item, rank: int, name: str, text: str) -> None:
    """Add what a rank has written to stdout, stderr or log to the test's report."""
    if text:
        item.add_report_section(f"call (rank {rank})", name, text)


@contextmanager
def _terminal(funcargs: dict[str, Any], readers: set[str]) -> Iterator[dict[str, IO[str]]]:
    """Yield streams that pass what captures, if the test reads output: for `capsys.disabled()`.

    They are opened before there are ranks: while capturing is turned off, it is so for all.
    """
    with ExitStack() as stack:
        found = {}
        for reader in sorted(readers)[:1]:
            with funcargs[reader].disabled():
                for name in voices.NAMES:
                    found[name] = _copied(getattr(sys, name), stack)
        yield found


def _copied(stream: Any, stack: ExitStack) -> IO[str]:
    """Return a stream to where another leads now, wherever its descriptor leads later."""
    try:
        descriptor = os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):  # it has none, and leads where it leads
        return cast("IO[str]", stream)
    # Line by line: what one rank prints is not torn by what others do.
    return stack.enter_context(open(descriptor, "w", buffering=1, encoding=stream.encoding))


@contextmanager
def _logs(item: pytest.Item) -> Iterator[_Records]:
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    handler = getattr(plugin, "report_handler", logging.NullHandler())  # for `-p no:logging`
    records = _Records(handler)
    handler.addFilter(records)
    try:
        yield records
    finally:
        handler.removeFilter(records)
        for rank, lines in sorted(records.lines.items()):
            add_section(item, rank, "log", "\n".join(lines))


class _Records(logging.Filter):
    """Takes the records of ranks from a handler."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._lock = threading.Lock()
        self.lines: dict[int, list[str]] = defaultdict(list)

    def filter(self, record: logging.LogRecord) -> bool:
        members = identity.ancestry(identity.here.rank)
        if members and not record.name.startswith(_FOR_NOBODY):
            line = self._handler.format(record)
            with self._lock:
                self.lines[members[-1].rank].append(line)
        return not members


class Captures:
    """What is captured of ranks."""

    def __init__(
        self,
        records: _Records,
        heard: voices.Heard | None = None,
        terminal: Mapping[str, IO[str]] | None = None,
    ) -> None:
        self._records = records
        self._terminal = terminal
        self._heard = heard

    def of_rank(self, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a test with what reads output replaced for one rank."""
        given = dict(arguments)
        if self._heard is not None:
            for name in _OF_PYTHON.intersection(given):
                encoding = "utf-8" if name == "capsysbinary" else None
                given[name] = _Reader(self._heard, rank, encoding, self._terminal or {})
        return given

    def forget_output(self) -> None:
        """Forget what ranks have printed and logged so far."""
        self._records.lines.clear()
        if self._heard is not None:
            self._heard.clear()

    def forget_logs_of(self, failures: list[Failure]) -> None:
        """Forget what only says that a rank has failed as the report says anyway."""
        for failure in failures:
            lines = self._records.lines[failure.rank]
            same = f" [rank {failure.rank}] {failure}"
            lines[:] = [line for line in lines if not line.endswith(same)]


class _Output(NamedTuple):
    out: Any
    err: Any


class _Reader:
    """A rank's capsys: reads what this rank has written."""

    def __init__(
        self,
        heard: voices.Heard,
        rank: int,
        encoding: str | None,
        terminal: Mapping[str, IO[str]],
    ) -> None:
        self._heard, self._rank = heard, rank
        self._encoding, self._terminal = encoding, terminal

    def readouterr(self) -> _Output:
        """Return, and forget, what the rank has written."""
        texts = (self._heard.take(self._rank, name) for name in voices.NAMES)
        return _Output(*(text.encode(self._encoding) if self._encoding else text for text in texts))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Do not capture what this rank writes, for the length of a block."""
        me = identity.ancestry(identity.here.rank)[-1]
        voices.let_through(me, self._terminal)
        try:
            yield
        finally:
            voices.hear_again(me)
