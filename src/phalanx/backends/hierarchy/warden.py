"""What the hosts of a world tell each other beside the data: who lives, and what has failed.

Each rank raises its host's count in the store about once a second, from a thread of the native
core. A second thread, the warden's, watches the count of the next host and the ranks of its own,
and writes into a log in the store whose end it has seen; whoever waits long for another host reads
that log. So a rank or host that dies is named everywhere within five seconds, and nobody pays for
it while all is well.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from phalanx import _native, bystanders, errors
from phalanx.backends.hierarchy.deadlocks import DeadlockSearch
from phalanx.backends.hierarchy.hosts import Host
from phalanx.errors import DistBackendError, DistError, PeerFailed
from phalanx.stores.base import Store

_BEAT = 0.8  # seconds between two signs of life
_LOOK = 0.4  # between two looks of the warden
_DEAD = 3.2  # without a sign of life
_STORE_TIMEOUT = 3.0  # of one request


class Warden:
    """One rank's view of the other hosts of its world."""

    def __init__(self, store: Store, roster: _native.Roster, hosts: Sequence[Host], rank: int):
        self._store = store.clone()
        self._store.set_timeout(_STORE_TIMEOUT)
        self.roster = roster
        self.rank = rank
        self._names = {host.id: host.name for host in hosts}
        self._order = list(self._names)
        self._members = {
            label: [each for each, host in enumerate(hosts) if host.id == label]
            for label in self._order
        }
        self._mine = hosts[rank].id
        self._read = 0  # entries of the log
        self._published: set[int] = set()  # ranks of this host whose end has been told
        self._gone: set[str] = set()  # hosts
        self._broken: dict[str, tuple[str, str]] = {}  # groups: class and text of the error
        self._left: dict[str, set[int]] = {}  # ranks that have left a group
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._deadlocks = DeadlockSearch(
            self._store, roster, self._members, self._mine, self._write
        )
        core, key = _core(self._store, f"beat/{self._mine}")
        self._heart = _native.Heart(core, key, _BEAT)
        thread = threading.Thread(target=self._watch, name="phalanx-warden", daemon=True)
        self._thread = bystanders.mark(thread)
        self._thread.start()

    # What it is told

    def say_broken(self, group: str, error: DistBackendError) -> None:
        """Tell the other hosts that an operation of a group has failed for all of it."""
        self._write(kind="broken", group=group, error=type(error).__name__, text=str(error))

    def say_ended(self, rank: int, how: str) -> None:
        """Tell the other hosts how a rank of this one has ended."""
        self._published.add(rank)
        self._write(kind="ended", rank=rank, text=how)

    def say_left(self, group: str, rank: int) -> None:
        """Tell the other hosts that a rank has left a group."""
        self._write(kind="left", group=group, rank=rank)

    def _write(self, **entry: Any) -> None:
        # A store that is gone cannot be told anything: others find that out themselves.
        with suppress(DistError):
            number = self._store.add("log", 1)
            self._store.set(f"log/{number}", json.dumps(entry))

    # What it knows

    def check(self, group: str, needs: Sequence[int]) -> None:
        """Raise what is known to keep a group, or a wait for these ranks, from going on."""
        if group in self._broken:
            name, text = self._broken[group]
            raise getattr(errors, name, DistBackendError)(text)
        for rank in needs:
            end = self.roster.obituary(rank, True)
            if not end and rank in self._left.get(group, ()):
                end = (
                    f"rank {rank} has left this group (destroy_process_group, or the end of its "
                    "program) and will not come"
                )
            if end:
                raise PeerFailed(end)
        silence = self._heart.silence()
        if silence > _DEAD:
            raise PeerFailed(
                f"the store has not answered for {silence:.1f} s: rank 0 and its host, "
                f"{self._names[self._order[0]]}, are down, or {self._names[self._mine]} is cut off "
                "from them"
            )

    def read(self) -> None:
        """Take notice of what is new in the log."""
        with self._lock, suppress(DistError):
            newest = self._store.add("log", 0)
            while self._read < newest:
                entry = json.loads(self._store.get(f"log/{self._read + 1}"))
                self._read += 1
                self._heed(entry)

    def _heed(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "ended" and entry["rank"] not in self._members[self._mine]:
            self.roster.fail(entry["rank"], entry["text"])
        elif entry["kind"] == "broken":
            self._broken.setdefault(entry["group"], (entry["error"], entry["text"]))
        elif entry["kind"] == "deadlock":
            # Those that still wait as they did when it was found.
            now = {(rank, since) for rank, since, _ in _native.blocked_waits(self.roster)}
            told = {rank for rank, since in entry["waits"] if (rank, since) in now}
            _native.sentence(self.roster, sorted(told), entry["text"])
        elif entry["kind"] == "left":
            self._left.setdefault(entry["group"], set()).add(entry["rank"])

    # Its watch

    def _watch(self) -> None:
        count, since = -1, time.monotonic()
        watched = ""
        while not self._closing.wait(_LOOK):
            if self._speaks_for_host():
                self._deadlocks.look()
            following = self._next_host()
            if following != watched:
                watched, count, since = following, -1, time.monotonic()
            if not watched:
                continue
            try:
                seen = self._store.add(f"beat/{watched}", 0)
            except DistError:
                continue  # the heart's silence tells
            now = time.monotonic()
            if seen != count:
                count, since = seen, now
            elif now - since > _DEAD:
                self._bury(watched, now - since)
            self.read()

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
        """Tell the other hosts which ranks of this one have ended, if this is the first that lives.

        Return whether it is.
        """
        ends = {rank: self.roster.obituary(rank, True) for rank in self._members[self._mine]}
        living = [rank for rank, end in ends.items() if not end]
        if not living or living[0] != self.rank:
            return False
        for rank, end in ends.items():
            if end and rank not in self._published:
                self.say_ended(rank, _predicate(rank, end))
        return True

    def close(self) -> None:
        """Watch no longer."""
        self._closing.set()
        self._heart.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_STORE_TIMEOUT)


def _predicate(rank: int, obituary: str) -> str:
    """Return what an obituary says, without whom it is about."""
    head, separator, text = obituary.partition(") ")
    return text if separator and head.startswith(f"rank {rank} (") else obituary


def _core(store: Store, key: str) -> tuple[_native.Store, str]:
    """Return the native store below others, and what a key is called there."""
    from phalanx.stores import PrefixStore
    from phalanx.stores.core import CoreStore

    while isinstance(store, PrefixStore):
        key, store = f"{store.prefix}/{key}", store.underlying_store
    if not isinstance(store, CoreStore):
        raise DistError(f"{type(store).__name__} cannot serve ranks on several hosts")
    return store._core, key
