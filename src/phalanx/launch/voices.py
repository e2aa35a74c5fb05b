"""What ranks that are threads print: kept apart, though they share one standard output.

While somebody listens, `sys.stdout` and `sys.stderr` ask which rank the writing thread belongs to,
also in threads that ranks have started. What is written past them (to the file descriptors, by a
child process, to a stream that somebody kept from before) cannot be told apart.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from typing import IO, Any, TextIO

from phalanx import forks
from phalanx.launch import identity
from phalanx.launch.identity import Member
from phalanx.launch.output import label

NAMES = ("stdout", "stderr")


@contextmanager
def labelled() -> Iterator[None]:
    """Pass on what ranks print, whole lines only, each with its rank before it.

    The ranks are those of worlds that the caller starts meanwhile.
    """
    with _listening(_Lines(label)):
        yield


@contextmanager
def whole_lines() -> Iterator[None]:
    """Pass on what ranks print as `labelled` does, without a label."""
    with _listening(_Lines(lambda rank, stream: "")):
        yield


@contextmanager
def collected() -> Iterator[Heard]:
    """Keep what each rank prints instead of printing it; yields where to find it.

    The ranks are those of worlds that the caller starts meanwhile.
    """
    heard = Heard()
    with _listening(heard):
        yield heard


class _Listener:
    """Who is told what the ranks of the caller's worlds write."""

    def __init__(self) -> None:
        self.home = identity.here.rank
        self.lock = threading.Lock()

    def rank_of(self, members: list[Member]) -> int | None:
        """Return the rank that this is to hear of, None if there is none."""
        return next((each.rank for each in members if each.outer is self.home), None)

    def write(self, rank: int, stream: _Stream, text: str) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Pass on what is left."""


class Heard(_Listener):
    """What ranks have written so far."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[tuple[int, str], StringIO] = {}

    def write(self, rank: int, stream: _Stream, text: str) -> None:
        with self.lock:
            self._texts.setdefault((rank, stream.name), StringIO()).write(text)

    def take(self, rank: int, name: str) -> str:
        """Return, and forget, what a rank has written to "stdout" or "stderr"."""
        with self.lock:
            text = self._texts.pop((rank, name), None)
        return "" if text is None else text.getvalue()

    def clear(self) -> None:
        """Forget what all ranks have written."""
        with self.lock:
            self._texts.clear()

    def ranks(self) -> list[int]:
        """Return the ranks that have written what nobody has taken."""
        with self.lock:
            return sorted({rank for rank, _ in self._texts})


class _Lines(_Listener):
    """Passes on whole lines, with what `head` puts before each."""

    def __init__(self, head: Callable[[int, IO[str]], str]) -> None:
        super().__init__()
        self._head = head
        self._rests: dict[tuple[int, _Stream], str] = {}

    def write(self, rank: int, stream: _Stream, text: str) -> None:
        with self.lock:
            *lines, rest = (self._rests.pop((rank, stream), "") + text).split("\n")
            if rest:
                self._rests[rank, stream] = rest
            self._print(rank, stream, lines)

    def end(self) -> None:
        with self.lock:
            for (rank, stream), rest in self._rests.items():
                self._print(rank, stream, [rest])
            self._rests.clear()

    def _print(self, rank: int, stream: _Stream, lines: list[str]) -> None:
        head = self._head(rank, stream.beneath)
        # What a carriage return lets the rest of a line overwrite is never seen.
        whole = [f"{head}{line.rstrip(chr(13)).rpartition(chr(13))[2]}\n" for line in lines]
        if whole:
            stream.beneath.write("".join(whole))
            stream.beneath.flush()


class _Stream:
    """Stands where a standard stream was: hands what ranks write to who listens to them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.beneath: TextIO = getattr(sys, name)

    @property
    def buffer(self) -> _Buffer:
        return _Buffer(self)

    def write(self, text: str) -> int:
        members = identity.ancestry(identity.here.rank)
        if members and (streams := _direct.get(members[-1])) is not None:
            return streams.get(self.name, self.beneath).write(text)
        for listener in list(_listeners) if members else ():
            if (rank := listener.rank_of(members)) is not None:
                listener.write(rank, self, text)
                return len(text)
        return self.beneath.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


class _Buffer:
    """Takes bytes for a stream."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(bytes(data).decode(self._stream.encoding or "utf-8", "replace"))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream.beneath.buffer, name)


_lock = threading.Lock()
forks.renew(sys.modules[__name__], "_lock", threading.Lock)
_listeners: list[_Listener] = []  # the outermost first
_streams: list[_Stream] = []  # those in place
_direct: dict[Member, Mapping[str, IO[str]]] = {}


@contextmanager
def _listening(listener: _Listener) -> Iterator[None]:
    with _lock:
        _listeners.append(listener)
        _put()
    try:
        yield
    finally:
        listener.end()
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _take_away()


def listen_again() -> None:
    """Take the place of the standard streams again, after somebody else has exchanged them."""
    with _lock:
        if _listeners:
            _put()


def let_through(member: Member, streams: Mapping[str, IO[str]] | None = None) -> None:
    """Let what a rank writes reach other streams, or those beneath, as it is, till `hear_again`."""
    _direct[member] = streams or {}


def hear_again(member: Member) -> None:
    """Listen to a rank that was let through."""
    _direct.pop(member, None)


def _put() -> None:
    for name in NAMES:
        if getattr(sys, name) is not None and not isinstance(getattr(sys, name), _Stream):
            stream = _Stream(name)
            _streams.append(stream)
            setattr(sys, name, stream)


def _take_away() -> None:
    for stream in _streams:
        if getattr(sys, stream.name) is stream:
            setattr(sys, stream.name, stream.beneath)
    _streams.clear()
