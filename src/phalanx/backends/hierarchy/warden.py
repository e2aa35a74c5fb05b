"""What the hosts of a world tell each other beside the data: who lives, and what has failed.

Each rank raises its host's count in the store about once a second, from a thread of the native
core. A second thread, the warden's, watches the count of the next host and the ranks of its own,
writes into a log in the store whose end it has seen, and reads what others have written there: one
request at each look. So a rank that dies is named everywhere within five seconds, and so is a host
whose connections are closed: they are when all of its processes are dead. A host that is merely
silent may be frozen (a virtual machine on its way to another) and come back: it is waited for as
long as `VARIABLE` says. Whoever waits only looks at what its warden knows.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from phalanx import _native, logs
from phalanx.backends.hierarchy import entries, heart
from phalanx.backends.hierarchy.deadlocks import DeadlockSearch
from phalanx.backends.hierarchy.heart import StoreError
from phalanx.backends.hierarchy.hosts import Host
from phalanx.backends.hierarchy.patrol import Patrol
from phalanx.errors import DistBackendError, DistTimeout, PeerFailed
from phalanx.stores.base import Store

_log = logs.area("hosts")

_LOOK = 0.4  # seconds between two looks of the warden
_DEAD = 3.2  # without a sign of life, of a host or store whose connections are closed
_WRITTEN = 3.0  # for an entry of the log that has been announced
_FAREWELL = 2.5 * _LOOK  # for all wardens to read the log once more
_ANSWERS = 1.5  # for the wardens of other ranks to say what these do

VARIABLE = "PHALANX_HOST_TIMEOUT"  # seconds for which a host may give no sign of life
_FROZEN = 30.0  # by default
_LEAST = 2.0


def longest_silence() -> float:
    """Return the seconds for which a host may be silent before it counts as gone."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text or _FROZEN)
    except ValueError:
        seconds = 0.0
    if not seconds >= _LEAST:
        raise ValueError(f"{VARIABLE} is a number of seconds, {_LEAST:g} or more; got {text!r}")
    return seconds


class StoreLost(PeerFailed):
    """There is no store any more, so that nobody can be asked."""


class Account(NamedTuple):
    """What a rank says of itself in a group."""

    number: int  # of the collective that it has come to
    text: str  # "rank 2 is busy in its own code; ..."


class Group(Protocol):
    """A group that its warden looks after."""

    def account(self) -> Account: ...

    def look(self) -> None: ...


class Break(NamedTuple):
    """Why a group cannot go on from one of its collectives."""

    number: int
    kind: type[DistBackendError]
    text: str

    def concerns(self, number: int) -> bool:
        """Say whether a collective, or with 0 a message, cannot end for it."""
        if number:
            return number >= self.number
        return not issubclass(self.kind, DistTimeout)  # messages are each for itself


class Warden:
    """One rank's view of the other hosts of its world."""

    def __init__(self, store: Store, roster: _native.Roster, hosts: Sequence[Host], rank: int):
        self._limit = longest_silence()
        self._store = store.clone()
        self._store.set_timeout(self._limit)
        self.roster = roster
        self.rank = rank
        self._size = len(hosts)
        self._names = {host.id: host.name for host in hosts}
        self._order = list(self._names)
        self._members = {
            label: [each for each, host in enumerate(hosts) if host.id == label]
            for label in self._order
        }
        self._mine = hosts[rank].id
        self._read = 0  # entries of the log
        self._questions: list[int] = []  # which of them ask something
        self._published: set[int] = set()  # ranks of this host whose end has been told
        self._closed: set[int] = set()  # ranks whose wardens watch no longer
        self._gone: set[str] = set()  # hosts
        self._suspected: set[str] = set()  # hosts to which connections have been lost
        self._broken: dict[str, Break] = {}  # by group
        self._left: dict[str, set[int]] = {}  # ranks that have left a group
        self._groups: dict[str, Group] = {}
        self._watched, self._count, self._since = "", -1, 0.0  # a host, its signs of life
        self._closing = threading.Event()
        self._deadlocks = DeadlockSearch(
            self._store, roster, self._members, self._mine, self._write
        )
        self._heart = heart.start(self._store, f"beat/{self._mine}")
        self._store.add("log", 0)
        self._patrol = Patrol(self._look, _LOOK, self.is_lost)
        self._patrol.start()

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return next(self._names[label] for label, all in self._members.items() if rank in all)

    # What it is told

    def join(self, name: str, group: Group) -> None:
        """Say that this rank is in a group."""
        self._groups[name] = group

    def leave(self, group: str) -> None:
        """Tell the other hosts that this rank has left a group."""
        self._groups.pop(group, None)
        self._write(kind="left", group=group, rank=self.rank)

    def say_broken(self, group: str, number: int, kind: type[Exception], text: str) -> None:
        """Tell all that a group cannot go on from a collective; the first word counts."""
        name = kind.__name__
        self._write(kind="broken", group=group, number=number, error=name, text=text)
        self._linger()

    def say_ended(self, rank: int, how: str) -> None:
        """Tell the other hosts how a rank of this one has ended."""
        self._published.add(rank)
        self._write(kind="ended", rank=rank, text=how)
        if rank == self.rank:
            self._linger()

    def _linger(self) -> None:
        """As rank 0, with whom the store may go, give all time to read why."""
        if self.rank == 0 and not self._closing.is_set() and not self.is_lost():
            time.sleep(_FAREWELL)

    def _write(self, **entry: Any) -> int:
        """Write into the log; return the number of the entry.

        A store that is gone cannot be told anything: others find that out themselves.
        """

        def write() -> int:
            number = self._store.add("log", 1)
            self._store.set(f"log/{number}", json.dumps(entry))
            return number

        return self._patrol.do(write) or 0

    # What it knows

    def check(self, group: str, number: int, needs: Sequence[int]) -> None:
        """Raise what is known to keep a group, or a wait for these ranks, from going on.

        ``number`` is that of the collective that waits; 0 for a message.
        """
        end = next((text for rank in needs if (text := self._end_of(rank, group))), "")
        # Read after that: who breaks a group says so, and ends then.
        known = self._broken.get(group)
        if known is not None and known.concerns(number):
            raise known.kind(known.text)
        if end:
            raise PeerFailed(end)
        if self.is_lost():
            silence = f"the store has not answered for {self._heart.silence():.1f} s"
            raise StoreLost(f"{silence}: {self._why_lost()}{self._advice(self._heart.refused())}")

    def _end_of(self, rank: int, group: str) -> str:
        """Say how a rank has ended, as far as a group is concerned."""
        if end := self.roster.obituary(rank, True):
            return str(end)
        if rank in self._left.get(group, ()) or rank in self._closed:
            return (
                f"rank {rank} on host {self.host_of(rank)} has left this group "
                "(destroy_process_group, or the end of its program) and will not come"
            )
        return ""

    def _why_lost(self) -> str:
        first, mine = self._names[self._order[0]], self._names[self._mine]
        if end := self.roster.obituary(0, True):
            return f"it was kept by rank 0; {end}"
        if self._order[0] == self._mine:
            return "rank 0, which keeps it, may be stopped"
        return (
            f"rank 0, which keeps it on host {first}, is dead or stopped, that host is down, or "
            f"{mine} is cut off from it"
        )

    def is_lost(self) -> bool:
        """Say whether the store cannot be reached: to ask it would only take time."""
        return self._heart.silence() > self._patience(self._heart.refused())

    def _patience(self, disconnected: bool) -> float:
        """Return the seconds for which a host, or the store, may be silent."""
        return min(_DEAD, self._limit) if disconnected else self._limit

    def _advice(self, disconnected: bool) -> str:
        """Return what to add to an error about silence: how to wait longer, if that may help."""
        return "" if disconnected else f"; {VARIABLE} ({self._limit:g} s) is how long it may freeze"

    def suspect(self, ranks: Sequence[int]) -> None:
        """Tell all that connections to these ranks have been lost: their hosts may be gone."""
        for label, members in self._members.items():
            if label not in self._suspected and not set(ranks).isdisjoint(members):
                self._suspected.add(label)
                self._write(kind="suspected", host=label)

    def known_break(self, group: str, number: int) -> Break | None:
        """Return why a collective of a group cannot end, as far as anybody has said so."""
        self.read()
        known = self._broken.get(group)
        return known if known is not None and known.concerns(number) else None

    def ask(self, group: str, ranks: Sequence[int]) -> dict[int, Account]:
        """Ask what the ranks of a group do there; return what comes in a moment, by rank."""
        told: dict[int, Account] = {}
        question = self._write(kind="ask", group=group)
        keys = {rank: f"doing/{question}/{rank}" for rank in ranks if rank != self.rank}
        for _ in range(round(_ANSWERS / (_LOOK / 4))):  # not by the clock, if this stalls itself
            if len(told) == len(keys) or self.is_lost():
                break
            time.sleep(_LOOK / 4)
            missing = {rank: key for rank, key in keys.items() if rank not in told}
            told |= self._patrol.do(partial(self._answers, missing)) or {}
        return told

    def _answers(self, keys: Mapping[int, str]) -> dict[int, Account]:
        answers = {}
        for rank, key in keys.items():
            if self._store.check([key]):
                try:
                    answers[rank] = Account(*entries.account(self._store.get(key)))
                except entries.Malformed as error:
                    self._skip(key, error)
                    answers[rank] = Account(0, "")
        return answers

    def tell(self, rank: int, told: Mapping[int, Account]) -> str:
        """Put into words what a rank has said of itself."""
        if rank not in told and (end := self.roster.obituary(rank, True)):
            return end
        said = told[rank].text.partition(f"rank {rank} ")[2] if rank in told else ""
        where = f"rank {rank} on host {self.host_of(rank)}"
        return f"{where} {said or 'does not answer: it may be stopped, or busy outside of Python'}"

    def read(self) -> None:
        """Take notice of what is new in the log."""
        self._patrol.do(lambda: self._read_to(self._store.add("log", 0)))

    def _read_to(self, newest: int) -> None:
        while self._read < newest:
            number = self._read + 1
            entry = self._entry(f"log/{number}")
            self._read = number
            self._heed(number, entry)

    def _entry(self, key: str) -> dict[str, Any]:
        """Return an entry of the log.

        Nothing if who was about to write it has died over it, or what was written is malformed.
        """
        try:
            self._store.wait([key], _WRITTEN)
            return entries.log_entry(self._store.get(key), self._size)
        except StoreError:
            if self._store.check([key]):
                raise
        except entries.Malformed as error:
            self._skip(key, error)
        return {"kind": ""}

    def _skip(self, key: str, error: entries.Malformed) -> None:
        _log.warning(
            "what is in the store at '%s' is malformed and is skipped: %s; who wrote it is no rank "
            "of this job, or runs another version of phalanx",
            key,
            str(error)[:400],
            extra={"rank": self.rank},
        )

    def _heed(self, number: int, entry: dict[str, Any]) -> None:
        if entry["kind"] == "ended" and entry["rank"] not in self._members[self._mine]:
            self.roster.fail(entry["rank"], entry["text"])
        elif entry["kind"] == "broken":
            told = Break(entry["number"], entry["error"], entry["text"])
            known = self._broken.setdefault(entry["group"], told)
            if told.number < known.number:
                self._broken[entry["group"]] = told
        elif entry["kind"] == "deadlock":
            # Those that still wait as they did when it was found.
            now = {(rank, since) for rank, since, _ in _native.blocked_waits(self.roster)}
            told_ranks = {rank for rank, _ in now.intersection(entry["waits"])}
            _native.sentence(self.roster, sorted(told_ranks), entry["text"])
        elif entry["kind"] == "left":
            self._left.setdefault(entry["group"], set()).add(entry["rank"])
        elif entry["kind"] == "suspected":
            self._suspected.add(entry["host"])
        elif entry["kind"] == "closed":
            self._closed.add(entry["rank"])
        elif entry["kind"] == "ask":
            self._questions.append(number)
            if group := self._groups.get(entry["group"]):
                self._store.set(f"doing/{number}/{self.rank}", json.dumps(group.account()))

    # Its watch

    def _look(self) -> None:
        if self._speaks_for_host():
            self._deadlocks.look()
        self._patrol.do(self._ask_store)
        for group in list(self._groups.values()):
            group.look()

    def _ask_store(self) -> None:
        """Read the log, and see whether the next host lives."""
        following = self._next_host()
        if following != self._watched:
            self._watched, self._since = following, time.monotonic()
            self._count = self._store.add(f"beat/{following}", 0) if following else -1
        keys = ["log", f"beat/{following}"] if following else ["log"]
        now = time.monotonic()  # a store that takes long keeps the others' signs back, too
        newest, *counts = map(int, self._store.multi_get(keys))
        self._read_to(newest)
        if counts != [self._count]:
            self._count, self._since = next(iter(counts), -1), now
        elif now - self._since > self._patience(following in self._suspected):
            self._bury(following, now - self._since)

    def _next_host(self) -> str:
        """Return the host after this one, of those that live; "" if there is none."""
        start = self._order.index(self._mine)
        for label in (*self._order[start + 1 :], *self._order[:start]):
            if label not in self._gone and not self._has_ended(label):
                return label
        return ""

    def _has_ended(self, label: str) -> bool:
        """Say whether all ranks of a host are known to have ended, or to have left the world."""
        return all(
            rank in self._closed or self.roster.obituary(rank, False)
            for rank in self._members[label]
        )

    def _bury(self, label: str, silence: float) -> None:
        self._gone.add(label)
        how = (
            f"is gone: its host {self._names[label]} has given no sign of life for "
            f"{silence:.1f} s (it is down, cut off, or its ranks are dead"
            f"{self._advice(label in self._suspected)})"
        )
        for rank in self._members[label]:
            if not self.roster.obituary(rank, False):
                self._write(kind="ended", rank=rank, text=how)

    def _speaks_for_host(self) -> bool:
        """Tell the other hosts which ranks of this one have ended, if this is the first that can.

        Return whether it is.
        """
        ends = {rank: self.roster.obituary(rank, True) for rank in self._members[self._mine]}
        living = [rank for rank, end in ends.items() if not end and rank not in self._closed]
        if not living or living[0] != self.rank:
            return False
        for rank, end in ends.items():
            if end and rank not in self._published:
                self.say_ended(rank, _predicate(rank, end))
        return True

    def close(self) -> None:
        """Watch no longer; the last rank of the world that says so clears the store."""
        self._closing.set()
        self._heart.stop()
        self._write(kind="closed", rank=self.rank)
        self._patrol.do(self._sign_off)
        self._patrol.close()

    def fall_silent(self) -> None:
        """Stop without a word, as when a host dies: for trials of what the others make of it."""
        self._closing.set()
        self._heart.stop()
        self._patrol.close()

    def _sign_off(self) -> None:
        if self._store.add("closed", 1) == self._size:
            self._clear()

    def _clear(self) -> None:
        self._read_to(self._store.add("log", 0))
        for number in self._questions:
            for rank in range(self._size):
                self._store.delete_key(f"doing/{number}/{rank}")
        for number in range(1, self._read + 1):
            self._store.delete_key(f"log/{number}")
        for label in self._order:
            self._store.delete_key(f"beat/{label}")
            self._store.delete_key(f"stuck/{label}")
        self._store.delete_key("log")
        self._store.delete_key("closed")


def _predicate(rank: int, obituary: str) -> str:
    """Return what an obituary says, without whom it is about."""
    head, separator, text = obituary.partition(") ")
    return text if separator and head.startswith(f"rank {rank} (") else obituary
