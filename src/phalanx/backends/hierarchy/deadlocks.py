"""Deadlocks of ranks on several hosts.

A host whose ranks wait says in the store for whom, again at each look as long as it is so. A set of
waits that forms a deadlock counts once it has been seen in two looks with nothing changed, where
every host has said it anew in between: so all of its ranks stood still at one moment, and nothing
is on its way between them any more.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from phalanx import _native, logs
from phalanx.backends.hierarchy import entries
from phalanx.backends.hierarchy.heart import StoreError
from phalanx.stores.base import Store

_log = logs.area("hosts")

_STILL = 1.5  # seconds for which nothing may have changed


class _Report(NamedTuple):
    """What one host says of its ranks that wait."""

    number: int
    waits: list[tuple[int, int, bytes]]  # rank, since when, facts


class DeadlockSearch:
    """One host's part in the search."""

    def __init__(
        self,
        store: Store,
        roster: _native.Roster,
        members: Mapping[str, Sequence[int]],
        mine: str,
        publish: Callable[..., object],
    ) -> None:
        self._store = store
        self._roster = roster
        self._members = members
        self._mine = mine
        self._publish = publish
        self._size = sum(map(len, members.values()))
        self._number = 0
        self._said = False
        self._malformed: set[str] = set()  # hosts whose reports cannot be read
        self._suspect: tuple[float, dict[str, int], list[tuple[int, int]]] | None = None
        self._say([])

    def look(self) -> None:
        """Say who of this host waits, and see whether that is part of a deadlock."""
        waits = _native.blocked_waits(self._roster)
        if not waits and not self._said:
            return
        try:
            self._say(waits)
            if waits:
                self._judge()
        except StoreError:
            self._suspect = None  # there is no store to meet in

    def _say(self, waits: list[tuple[int, int, bytes]]) -> None:
        self._number += 1
        told = [[rank, since, base64.b64encode(facts).decode()] for rank, since, facts in waits]
        self._store.set(f"stuck/{self._mine}", json.dumps([self._number, told]))
        self._said = bool(waits)

    def _judge(self) -> None:
        reports = self._reports()
        waits = [wait for report in reports.values() for wait in report.waits]
        ended = [rank for rank in range(self._size) if self._roster.obituary(rank, False)]
        ranks, text = _native.deadlock_among(
            self._size, [(rank, facts) for rank, _, facts in waits], ended
        )
        local = set(self._members[self._mine])
        # The host of the first rank speaks; what is within one host is found there.
        if not ranks or ranks[0] not in local or local.issuperset(ranks):
            self._suspect = None
            return
        found = sorted((rank, since) for rank, since, _ in waits if rank in ranks)
        numbers = {label: report.number for label, report in reports.items()}
        if self._suspect is None or self._suspect[2] != found:
            self._suspect = time.monotonic(), numbers, found
            return
        seen, before, _ = self._suspect
        hosts = [label for label, members in self._members.items() if set(members) & set(ranks)]
        if time.monotonic() - seen > _STILL and all(numbers[h] > before[h] for h in hosts):
            self._suspect = None
            self._publish(kind="deadlock", waits=found, text=text)

    def _reports(self) -> dict[str, _Report]:
        """Return what all hosts have said; nothing as long as one has not begun."""
        keys = [f"stuck/{label}" for label in self._members]
        if not self._store.check(keys):
            return {}
        reports = {}
        for label, data in zip(self._members, self._store.multi_get(keys), strict=True):
            try:
                reports[label] = _Report(*entries.waits_of_host(data, self._size))
            except entries.Malformed as error:
                self._say_malformed(label, error)
                return {}  # what the others say is not enough to judge by
        return reports

    def _say_malformed(self, label: str, error: entries.Malformed) -> None:
        if label not in self._malformed:
            self._malformed.add(label)
            _log.warning(
                "what is in the store at 'stuck/%s' is malformed, so that no deadlock with ranks "
                "of other hosts can be found: %s",
                label,
                str(error)[:400],
            )
