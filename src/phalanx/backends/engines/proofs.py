"""Proofs that the other ends of Gloo's connections are the ranks of the group.

Gloo gives a connection to whoever comes first and sends a small number. So the first messages on
every connection are a challenge and its answer, in both directions: an HMAC of who answers whom and
of both challenges, under a token that came through the group's store, where only the job's ranks
are let in, and under the job's secret, if it has one. Nothing else is read before. Then all tell
each other that they found nothing wrong. If one did, Gloo has no way to take the stranger's place
back: all connect anew.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any

import torch
from torch import Tensor

from phalanx import bystanders, logs
from phalanx.backends.engines.gloo import FOR_EVER, end_waits
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistError, DistNetworkError
from phalanx.stores import secret
from phalanx.types import Deadline

_log = logs.area("engines")

_TRIES = 3
_TAG = 0x7FFFFFFE  # of the messages here: no frame or payload has it
_BYTES = 32
_PROOF_SECONDS = 20.0  # for proofs to come once all are connected
_LOOK = 0.2  # seconds between looks at what others have said
_ANSWER_SECONDS = 3.0  # for a rank to say that it is there, although its connection is gone


class Stranger(Exception):
    """Says who does not find whom at the other end of a connection."""


def connect(
    options: BackendOptions, make: Callable[[int], list[Any]], hang_up: Callable[[], str]
) -> list[Any]:
    """Return the groups that ``make(attempt)`` connects, once all members have proved themselves.

    ``hang_up`` ends connections that others have made to this rank, and says from where somebody
    has connected who is no member, if that is known.
    """
    if options.group_size == 1:
        return make(0)
    if options.group_rank == 0:
        options.store.set("proof/token", secret.token())
    token = secret.mixed(options.store.get("proof/token").decode()).encode()
    for attempt in range(_TRIES):
        groups = make(attempt)
        proofs = _Proofs(options, token, attempt, groups, hang_up)
        try:
            proofs.exchange()
        except Stranger as error:
            told = f"group {options.group_id!r}: {error}{proofs.strangers}"
            groups.clear()
        else:
            return groups
        if attempt + 1 < _TRIES:
            _log.log(
                logging.WARNING if proofs.is_first else logging.INFO,  # said once is enough
                "%s; the connections are dropped, and all ranks connect again",
                told,
                extra={"rank": options.global_ranks[options.group_rank]},
            )
    raise DistNetworkError(
        f"{told}; after {_TRIES} tries: something that is not of this job connects to the ports of "
        "its ranks, or ranks have different secrets; use a network, or an interface "
        f"(GLOO_SOCKET_IFNAME), that others cannot reach, and set {secret.VARIABLE} to the same "
        "value everywhere"
    )


class _Proofs:
    """One rank's part in the proofs of one attempt."""

    strangers = ""  # from where those are who cannot be members
    is_first = False  # of all ranks, to find that something is wrong

    def __init__(
        self,
        options: BackendOptions,
        token: bytes,
        attempt: int,
        groups: list[Any],
        hang_up: Callable[[], str],
    ) -> None:
        self._hang_up = hang_up
        self._store = options.store
        self._timeout = options.timeout
        self._rank, self._size = options.group_rank, options.group_size
        self._ranks = options.global_ranks
        self._token = token
        self._groups = groups
        self._keys = f"proof/{attempt}"
        self._again = f"{self._keys}/again"
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._ways = list(product(range(len(groups)), self._peers))
        # In the order of sending. What has been started must end before its group does.
        self._works: list[tuple[Any, Tensor]] = []
        self._waiting_for = self._rank  # the rank whose message is waited for
        self._done = threading.Event()

    def exchange(self) -> None:
        """Return when all members have proved themselves to each other; Stranger if one cannot."""
        watch = threading.Thread(target=self._watch, name="phalanx-proofs", daemon=True)
        bystanders.mark(watch).start()
        try:
            self._prove()
        except Stranger as error:
            self._call_off(str(error))
            self._break_off()
            raise
        except RuntimeError:
            if why := self._called_off():
                self._break_off()
                raise Stranger(why) from None
            raise
        finally:
            self._done.set()
            watch.join()
            self._works.clear()

    def _prove(self) -> None:
        if self._store.add(f"{self._keys}/connected", 1) == self._size:
            self._store.set(f"{self._keys}/all", b"1")
        mine = {way: secrets.token_bytes(_BYTES) for way in self._ways}
        # All that will come is asked for now: then no message waits until another has been read.
        coming = [{way: self._ask(way) for way in self._ways} for _ in range(2)]
        last = {way: self._ask(way) for way in self._ways if way[0] == 0}
        for way, challenge in mine.items():
            self._send(way, challenge)
        theirs = {way: self._take(way, coming[0]) for way in self._ways}
        for way in self._ways:
            answer = self._answer(way[0], self._rank, way[1], mine[way], theirs[way])
            self._send(way, answer)
        for way in self._ways:
            expected = self._answer(way[0], way[1], self._rank, theirs[way], mine[way])
            if not hmac.compare_digest(self._take(way, coming[1]), expected):
                raise Stranger(
                    f"on a connection of rank {self._ranks[self._rank]}, somebody else speaks as "
                    f"rank {self._ranks[way[1]]}: the proof that it belongs to the job is wrong, "
                    f"or its {secret.VARIABLE} is another"
                )
        for way in last:
            self._send(way, bytes(_BYTES))
        for way in last:
            self._take(way, last)
        for work, _ in self._works:
            with suppress(RuntimeError):  # who has gone by now is missed by those who need it
                work.wait(FOR_EVER)

    def _answer(self, group: int, who: int, whom: int, own: bytes, other: bytes) -> bytes:
        text = f"phalanx gloo {self._keys} connection {group}: {who} to {whom} of {self._size}"
        return hmac.digest(self._token, text.encode() + own + other, "sha256")

    def _send(self, way: tuple[int, int], message: bytes) -> None:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._works.append((self._groups[way[0]].send([data], way[1], _TAG), data))

    def _ask(self, way: tuple[int, int]) -> tuple[Any, Tensor]:
        room = torch.zeros(_BYTES, dtype=torch.uint8)
        return self._groups[way[0]].recv([room], way[1], _TAG), room

    def _take(
        self, way: tuple[int, int], coming: dict[tuple[int, int], tuple[Any, Tensor]]
    ) -> bytes:
        work, room = coming[way]
        self._waiting_for = way[1]
        work.wait(FOR_EVER)
        return bytes(room.tolist())

    def _watch(self) -> None:
        """Break waits off, as Gloo's cannot be given up: when others have, or nothing comes."""
        patience = Deadline(self._timeout)
        all_are_connected = False
        own = self._ranks[self._rank]
        while not self._done.wait(_LOOK):
            with suppress(DistError):
                if not all_are_connected and self._store.check([f"{self._keys}/all"]):
                    all_are_connected = True
                    patience = Deadline(min(_PROOF_SECONDS, patience.left()))
                if self._store.check([f"{self._keys}/lost/{self._rank}"]):
                    self._call_off(
                        f"another rank has lost a connection to rank {own}, which is there: "
                        "somebody else has spoken as that rank, and left"
                    )
                if patience.left() <= 0 and all_are_connected:
                    other = self._ranks[self._waiting_for]
                    self._call_off(
                        f"rank {own} waited {_PROOF_SECONDS:g} s for rank {other} to prove that "
                        "it belongs to the job: perhaps somebody else has taken its connection"
                    )
                if not self._store.check([self._again]) and patience.left() > 0:
                    continue
            self._break_off()
            return

    def _call_off(self, why: str) -> None:
        """Tell all members that these connections cannot be used; what is told first stays."""
        self.is_first = self._store.compare_set(self._again, b"", why.encode()) == why.encode()

    def _called_off(self) -> str:
        """Return why a connection has been lost, if not by the end of who should be there."""
        with suppress(DistError):
            self._store.set(f"{self._keys}/lost/{self._waiting_for}", b"1")
            self._store.wait([self._again], timedelta(seconds=_ANSWER_SECONDS))
            return str(self._store.get(self._again).decode())
        return ""

    def _break_off(self) -> None:
        # Before a stranger is asked for anything more: what it sends may end the process.
        self.strangers = self._hang_up() or self.strangers
        for group in self._groups:
            end_waits(group, self._peers)
