"""What ranks that are threads print and log, in sections of their own."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

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
                yield Captures(arguments, records)
        elif not readers <= _OF_PYTHON.intersection(arguments):
            with voices.whole_lines():
                yield Captures(arguments, records)
        else:
            with voices.collected() as heard:
                try:
                    yield Captures(arguments, records, heard)
                finally:
                    for rank in heard.ranks():
                        for name in voices.NAMES:
                            add_section(item, rank, name, heard.take(rank, name))


def add_section(item: pytest.Item, rank: int, name: str, text: str) -> None:
    """Add what a rank has written to stdout, stderr or log to the test's report."""
    if text:
        item.add_report_section(f"call (rank {rank})", name, text)


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
    """The arguments of the test, with what reads output replaced for each rank."""

    def __init__(
        self, arguments: dict[str, Any], records: _Records, heard: voices.Heard | None = None
    ) -> None:
        self._arguments = arguments
        self._records = records
        self._heard = heard
        self._opening = _Opening()

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the arguments for one rank."""
        given = dict(self._arguments)
        if self._heard is not None:
            for name in _OF_PYTHON.intersection(given):
                encoding = "utf-8" if name == "capsysbinary" else None
                given[name] = _Reader(self._heard, rank, encoding, self._opening, given[name])
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


class _Opening:
    """Capturing turned off for one rank or several at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stack = ExitStack()

    @contextmanager
    def of(self, capture: Any) -> Iterator[None]:
        """Let what the calling rank writes pass `capture` and what else captures."""
        me = identity.ancestry(identity.here.rank)[-1]
        with self._lock:
            if self._users == 0:
                self._stack.enter_context(capture.disabled())
                voices.listen_again()
            self._users += 1
        voices.let_through(me)
        try:
            yield
        finally:
            voices.hear_again(me)
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._stack.close()
                    voices.listen_again()


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
        opening: _Opening,
        capture: Any,
    ) -> None:
        self._heard, self._rank, self._encoding = heard, rank, encoding
        self._opening, self._capture = opening, capture

    def readouterr(self) -> _Output:
        """Return, and forget, what the rank has written."""
        texts = (self._heard.take(self._rank, name) for name in voices.NAMES)
        return _Output(*(text.encode(self._encoding) if self._encoding else text for text in texts))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Do not capture what this rank writes, for the length of a block."""
        with self._opening.of(self._capture):
            yield
