"""What the hosts of a world tell each other beside the data: who lives, and what has failed.

Each rank raises its host's count in the store about once a second, from a thread of the native
core. A second thread, the warden's, watches the count of the next host and the ranks of its own,
writes into a log in the store whose end it has seen, and reads what others have written there. So
a rank or host that dies is named everywhere within five seconds; whoever waits only looks at what
its warden knows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from phalanx import _native, bystanders, errors
from phalanx.backends.hierarchy import heart
from phalanx.backends.hierarchy.deadlocks import DeadlockSearch
from phalanx.backends.hierarchy.heart import StoreError
from phalanx.backends.hierarchy.hosts import Host
from phalanx.errors import DistBackendError, DistTimeout, PeerFailed
from phalanx.stores.base import Store

_LOOK = 0.4  # seconds between two looks of the warden
_DEAD = 3.2  # without a sign of life
_STORE_TIMEOUT = 3.0  # of one request
_FAREWELL = 2.5 * _LOOK  # for all wardens to read the log once more
_ANSWERS = 1.5  # for the wardens of other ranks to say what these do


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
        self._store = store.clone()
        self._store.set_timeout(_STORE_TIMEOUT)
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
        self._published: set[int] = set()  # ranks of this host whose end has been told
        self._closed: set[int] = set()  # ranks whose wardens watch no longer
        self._gone: set[str] = set()  # hosts
        self._broken: dict[str, Break] = {}  # by group
        self._left: dict[str, set[int]] = {}  # ranks that have left a group
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._deadlocks = DeadlockSearch(
            self._store, roster, self._members, self._mine, self._write
        )
        self._heart = heart.start(self._store, f"beat/{self._mine}")
        thread = threading.Thread(target=self._watch, name="phalanx-warden", daemon=True)
        self._thread = bystanders.mark(thread)
        self._thread.start()

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
        if self.rank == 0 and not self._closing.is_set():
            time.sleep(_FAREWELL)  # the store may go with this rank, and all should know why

    def say_ended(self, rank: int, how: str) -> None:
        """Tell the other hosts how a rank of this one has ended."""
        self._published.add(rank)
        self._write(kind="ended", rank=rank, text=how)

    def _write(self, **entry: Any) -> int:
        """Write into the log; return the number of the entry."""
        number = 0
        if self._is_lost():
            return number
        # A store that is gone cannot be told anything: others find that out themselves.
        with suppress(StoreError):
            number = self._store.add("log", 1)
            self._store.set(f"log/{number}", json.dumps(entry))
        return number

    # What it knows

    def check(self, group: str, number: int, needs: Sequence[int]) -> None:
        """Raise what is known to keep a group, or a wait for these ranks, from going on.

        ``number`` is that of the collective that waits; 0 for a message.
        """
        known = self._broken.get(group)
        if known is not None and known.concerns(number):
            raise known.kind(known.text)
        for rank in needs:
            end = self.roster.obituary(rank, True)
            if not end and rank in self._left.get(group, ()):
                end = (
                    f"rank {rank} on host {self.host_of(rank)} has left this group "
                    "(destroy_process_group, or the end of its program) and will not come"
                )
            if end:
                raise PeerFailed(end)
        if self._is_lost():
            first, mine = self._names[self._order[0]], self._names[self._mine]
            raise StoreLost(
                f"the store has not answered for {self._heart.silence():.1f} s: rank 0 and its "
                f"host, {first}, are down, or {mine} is cut off from them"
            )

    def _is_lost(self) -> bool:
        """Say whether the store cannot be reached: to ask it would only take time."""
        return self._heart.silence() > _DEAD

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
        limit = time.monotonic() + _ANSWERS
        with suppress(StoreError):
            while len(told) < len(keys) and time.monotonic() < limit:
                time.sleep(_LOOK / 4)
                for rank in keys.keys() - told.keys():
                    if self._store.check([keys[rank]]):
                        told[rank] = Account(*json.loads(self._store.get(keys[rank])))
        return told

    def tell(self, rank: int, told: Mapping[int, Account]) -> str:
        """Put into words what a rank has said of itself."""
        said = told[rank].text.partition(f"rank {rank} ")[2] if rank in told else ""
        where = f"rank {rank} on host {self.host_of(rank)}"
        return f"{where} {said or 'does not answer: it may be stopped, or busy outside of Python'}"

    def read(self) -> None:
        """Take notice of what is new in the log."""
        if self._is_lost():
            return
        with self._lock, suppress(StoreError):
            newest = self._store.add("log", 0)
            while self._read < newest:
                entry = json.loads(self._store.get(f"log/{self._read + 1}"))
                self._read += 1
                self._heed(self._read, entry)

    def _heed(self, number: int, entry: dict[str, Any]) -> None:
        if entry["kind"] == "ended" and entry["rank"] not in self._members[self._mine]:
            self.roster.fail(entry["rank"], entry["text"])
        elif entry["kind"] == "broken":
            kind = getattr(errors, entry["error"], DistBackendError)
            told = Break(entry["number"], kind, entry["text"])
            known = self._broken.setdefault(entry["group"], told)
            if told.number < known.number:
                self._broken[entry["group"]] = told
        elif entry["kind"] == "deadlock":
            # Those that still wait as they did when it was found.
            now = {(rank, since) for rank, since, _ in _native.blocked_waits(self.roster)}
            told_ranks = {rank for rank, since in entry["waits"] if (rank, since) in now}
            _native.sentence(self.roster, sorted(told_ranks), entry["text"])
        elif entry["kind"] == "left":
            self._left.setdefault(entry["group"], set()).add(entry["rank"])
        elif entry["kind"] == "closed":
            self._closed.add(entry["rank"])
        elif entry["kind"] == "ask" and (group := self._groups.get(entry["group"])):
            self._store.set(f"doing/{number}/{self.rank}", json.dumps(group.account()))

    # Its watch

    def _watch(self) -> None:
        count, since = -1, time.monotonic()
        watched = ""
        while not self._closing.wait(_LOOK):
            if self._speaks_for_host():
                self._deadlocks.look()
            self.read()
            for group in list(self._groups.values()):
                group.look()
            following = self._next_host()
            if following != watched:
                watched, count, since = following, -1, time.monotonic()
            if not watched:
                continue
            if self._is_lost():
                continue
            try:
                seen = self._store.add(f"beat/{watched}", 0)
            except StoreError:
                continue  # the heart's silence tells
            now = time.monotonic()
            if seen != count:
                count, since = seen, now
            elif now - since > _DEAD:
                self._bury(watched, now - since)

    def _next_host(self) -> str:
        """Return the host after this one, of those that live; "" if there is none."""
        start = self._order.index(self._mine)
        for label in (*self._order[start + 1 :], *self._order[:start]):
            if label not in self._gone and not self._has_ended(label):
                return label
        return ""

    def _has_ended(self, label: str) -> bool:
        """Say whether all ranks of a host are known to have ended."""
        return all(self.roster.obituary(rank, False) for rank in self._members[label])

    def _bury(self, label: str, silence: float) -> None:
        self._gone.add(label)
        how = (
            f"is gone: its host {self._names[label]} has given no sign of life for "
            f"{silence:.1f} s (it is down, cut off, or its ranks are dead)"
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
        if self._thread is not threading.current_thread():
            self._thread.join(_STORE_TIMEOUT)
        self._write(kind="closed", rank=self.rank)
        if self._is_lost():
            return
        with suppress(StoreError):
            if self._store.add("closed", 1) == self._size:
                self._clear()

    def _clear(self) -> None:
        newest = self._store.add("log", 0)
        for number in range(1, newest + 1):
            entry = json.loads(self._store.get(f"log/{number}"))
            if entry["kind"] == "ask":
                for rank in range(self._size):
                    self._store.delete_key(f"doing/{number}/{rank}")
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
