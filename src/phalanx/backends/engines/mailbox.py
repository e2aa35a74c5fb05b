"""Who gets which message: those that have arrived, those that are waited for, and who is gone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from phalanx import forks
from phalanx.backends.base import COLLECTIVE
from phalanx.backends.engines.frames import Frame
from phalanx.errors import DistBackendError, DistTimeout
from phalanx.types import Deadline, Timeout, seconds
from phalanx.work import Work, check_not_forked


class Failure(NamedTuple):
    """Why nothing more will come. Whoever waits makes an error of it, in its own thread."""

    kind: type[DistBackendError]
    text: str
    ends_collectives: bool = False  # whoever is gone has not left, but failed

    def error(self, title: str) -> DistBackendError:
        """Return it as an error of an operation; ``reason`` is for those who name another one."""
        error = self.kind(f"{title}: {self.text}")
        error.reason = self.text
        return error


class Arrival(NamedTuple):
    """A message that is here, or whose bytes can be asked for."""

    source: int
    frame: Frame


class Gate:
    """An event in as little as that takes: it is set once, from any thread."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._open = True
        self._lock.release()

    def is_set(self) -> bool:
        return self._open

    def wait(self, seconds: float) -> bool:
        if not self._open and self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self._lock.release()  # to the next who waits
        return self._open


class Pending(Work):
    """A message on its way, until somebody calls ``finish`` or ``give_up``.

    ``title()`` says what it is, ``stall(event, seconds)`` waits for an event, and ``expired(work,
    limit)`` gives the work up when that has taken too long.
    """

    def __init__(
        self,
        title: Callable[[], str],
        tensor: Tensor,
        limit: float,
        stall: Callable[[Gate, float], bool],
        expired: Callable[[Pending, float], None],
    ) -> None:
        self.title = title
        self.tensor = tensor
        self._limit = limit
        self._deadline = Deadline(limit)
        self._stall = stall
        self._expired = expired
        self._failure: Failure | None = None
        self._error: BaseException | None = None
        self._source = -1
        self._ending = threading.Lock()
        self._origin = forks.Origin()
        self.done = Gate()

    def finish(self, source: int = -1) -> None:
        with self._ending:
            if not self.done.is_set():
                self._source = source
                self.done.set()

    def give_up(self, failure: Failure) -> None:
        with self._ending:
            if not self.done.is_set():
                self._failure = failure
                self.done.set()

    def wait(self, timeout: Timeout | None = None) -> bool:
        if not self.done.is_set():
            check_not_forked(self._origin)
        if timeout is not None:
            limit = seconds(timeout)
            if not self.done.is_set() and not self._stall(self.done, limit):
                raise DistTimeout(f"{self.title()}: still under way after a wait of {limit:g} s")
        while not self.done.is_set() and not self._stall(self.done, self._deadline.left()):
            self._expired(self, self._limit)
        error = self.exception()
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        if not self.ended(0) and self._deadline.left() <= 0:
            self._expired(self, self._limit)  # who only looks must learn of it as well
        return self.done.is_set()

    def ended(self, within: float) -> bool:
        """Say whether it ends, well or not, in so many seconds."""
        return self.done.is_set() or self._stall(self.done, within)

    def is_awaited(self) -> bool:
        """Say whether nothing has come of it yet."""
        return False

    def exception(self) -> BaseException | None:
        if self._failure is not None and self._error is None:
            self._error = self._failure.error(self.title())
        return self._error

    def result(self) -> list[Tensor]:
        return [self.tensor]


class Receipt(Pending):
    """A message that is waited for."""

    source: int | None = None  # whom it must come from
    tag: int = 0
    accept: Callable[[int, Frame], Failure | None] | None = None
    matched = False  # its message has begun to come
    number = 0  # of its payload, if that is foreseen
    _parts = 0  # that have come: the frame of a foreseen payload, and the payload

    def finish_part(self, source: int) -> None:
        """Finish when all parts are here, in whichever order."""
        with self._ending:
            self._parts += 1
            is_whole = self._parts == (2 if self.number else 1)
        if is_whole:
            self.finish(source)

    def is_awaited(self) -> bool:
        return not (self.matched or self.done.is_set())

    def source_rank(self) -> int:
        return super().source_rank() if self._source < 0 else self._source

    def fits(self, arrival: Arrival) -> bool:
        return self.source is None or self.source == arrival.source


class Mailbox:
    """Matches messages and receipts, in the order in which each came, per tag."""

    def __init__(self, rank: int, size: int) -> None:
        self._lock = threading.Lock()
        self._arrivals: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._receipts: defaultdict[int, list[Receipt]] = defaultdict(list)
        self._others = set(range(size)) - {rank}
        self.gone: dict[int, Failure] = {}
        self.broken: Failure | None = None
        self.out_of_step: Failure | None = None  # why there are no collectives any more

    def deliver(self, arrival: Arrival) -> Receipt | None:
        """Return who waits for a message; if nobody does, keep it."""
        tag = arrival.frame.tag
        with self._lock:
            waiting = self._receipts[tag]
            for i, receipt in enumerate(waiting):
                if receipt.fits(arrival):
                    del waiting[i]
                    receipt.matched = True
                    return receipt
            self._arrivals[tag].append(arrival)
        return None

    def post(self, receipt: Receipt) -> Arrival | None:
        """Return the message that a receipt is for, or keep the receipt; it may be given up."""
        with self._lock:
            if self.obstacle(receipt.tag) is None:
                here = self._arrivals[receipt.tag]
                for i, arrival in enumerate(here):
                    if receipt.fits(arrival):
                        del here[i]
                        receipt.matched = True
                        return arrival
            failure = self.obstacle(receipt.tag) or self._hopeless(receipt)
            if failure is None:
                self._receipts[receipt.tag].append(receipt)
        if failure is not None:
            receipt.give_up(failure)
        return None

    def arrivals(self, tag: int) -> list[Arrival]:
        """Return the messages of a tag that nobody has asked for yet."""
        with self._lock:
            return list(self._arrivals[tag])

    def withdraw(self, receipt: Receipt) -> bool:
        """Take a receipt back; False if its message has come."""
        with self._lock:
            waiting = self._receipts[receipt.tag]
            if receipt not in waiting:
                return False
            waiting.remove(receipt)
        return True

    def lose(self, peer: int, failure: Failure) -> None:
        """Give up what can only come from a rank that is gone, and for a collective all."""
        with self._lock:
            self.gone.setdefault(peer, failure)
            lost = [
                (receipt, why)
                for waiting in self._receipts.values()
                for receipt in waiting
                if (why := self._hopeless(receipt)) is not None
            ]
            for receipt, _ in lost:
                self._receipts[receipt.tag].remove(receipt)
        for receipt, why in lost:
            receipt.give_up(why)

    def obstacle(self, tag: int) -> Failure | None:
        """Return why there are no messages of a tag any more, if so."""
        return self.broken or (self.out_of_step if tag == COLLECTIVE else None)

    def end_collectives(self, failure: Failure) -> None:
        """Give up the messages of collectives, now and from now on."""
        with self._lock:
            self.out_of_step = self.out_of_step or failure
            lost = self._receipts.pop(COLLECTIVE, [])
        for receipt in lost:
            receipt.give_up(failure)

    def break_off(self, failure: Failure) -> None:
        """Give up everything, now and from now on."""
        with self._lock:
            self.broken = self.broken or failure
            lost = [receipt for waiting in self._receipts.values() for receipt in waiting]
            self._receipts.clear()
        for receipt in lost:
            receipt.give_up(failure)

    def failed(self) -> list[int]:
        """Return the peers that have not left, but failed."""
        with self._lock:
            return [peer for peer, why in self.gone.items() if why.ends_collectives]

    def reason(self, peer: int, tag: int) -> Failure | None:
        """Return what is known to keep a message of a peer from coming."""
        with self._lock:
            return self.obstacle(tag) or self._failed(tag) or self.gone.get(peer)

    def _failed(self, tag: int) -> Failure | None:
        """Return the failure of a rank, whichever, that no collective can be without."""
        failures = self.gone.values() if tag == COLLECTIVE else ()
        return next((failure for failure in failures if failure.ends_collectives), None)

    def _hopeless(self, receipt: Receipt) -> Failure | None:
        if failed := self._failed(receipt.tag):
            return failed
        if receipt.source is not None:
            return self.gone.get(receipt.source)
        if self._others and self._others <= self.gone.keys():
            return next(iter(self.gone.values()))
        return None
