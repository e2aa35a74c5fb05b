"""Messages between any two ranks of a group that spans hosts.

Between ranks of one host they are the local engine's, to another host the engine's that works
between hosts. A receive from any source looks at both in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import cast

from torch import Tensor

from phalanx import bystanders
from phalanx.backends.base import GroupBackend
from phalanx.backends.engines import sites
from phalanx.backends.engines.calls import dtype_name, shown
from phalanx.backends.engines.frames import Frame
from phalanx.backends.engines.mailbox import Failure, Pending, Receipt
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.hierarchy.topology import Topology
from phalanx.backends.hierarchy.vigil import SLICE, Vigil
from phalanx.errors import (
    CollectiveMismatch,
    Deadlock,
    DistBackendError,
    DistTimeout,
    PeerFailed,
    expected,
)
from phalanx.types import Deadline, Timeout
from phalanx.work import ThreadWork, Work

_WORTH_ASKING = 1.0  # seconds of waiting in vain, after which it matters what the other rank does
_LOOK = 0.001  # seconds between looks for a message from any source


class Letters:
    """One rank's messages."""

    def __init__(
        self,
        local: GroupBackend,
        engine: MessageEngine,
        topology: Topology,
        vigil: Vigil,
        ask: Callable[[int], str],
    ) -> None:
        self._local = local
        self._engine = engine
        self._topology = topology
        self._vigil = vigil
        self._ask = ask
        self._global_ranks = vigil.global_ranks

    def send(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, async_op: bool
    ) -> Work | None:
        if self._topology.is_local(dst):
            seat = self._topology.places[dst].seat
            return self._local.send(tensor, seat, tag, timeout=timeout, async_op=async_op)
        doing = f"send({shown(tensor)}, tag={tag}) to rank {self._global_ranks[dst]}"
        deadline, label = Deadline(timeout), dtype_name(tensor.dtype).encode()
        with self._titled(doing), self._vigil.explained([dst]):
            self._vigil.look([dst], 0)
            work = self._engine.send(tensor, dst, tag, timeout=timeout, async_op=True, label=label)
        if not isinstance(work, Pending):
            return work if async_op else None
        finish = partial(self._finish, work, deadline, dst, doing, sites.here())
        if async_op:
            return _in_background(finish, tensor)
        finish()
        return None

    def _finish(self, work: Pending, deadline: Deadline, peer: int, doing: str, site: str) -> None:
        with self._titled(doing, site):
            # Of a large message nobody can tell from here whether it is about to be taken.
            shown = "" if doing.startswith("send") else doing
            try:
                self._vigil.wait(work, deadline, [peer], shown)
            except DistTimeout as error:
                if deadline.limit < _WORTH_ASKING:
                    raise
                raise DistTimeout(f"{error}\n  {self._ask(peer)}") from None

    def _titled(self, doing: str, site: str = "") -> AbstractContextManager[None]:
        me = self._global_ranks[self._topology.rank]
        where = site or sites.here()
        return _titled(f"{doing} on group {self._vigil.group!r}, rank {me}, at {where}")

    def recv(
        self, tensor: Tensor, src: int | None, tag: int, timeout: float, async_op: bool
    ) -> Work | int:
        deadline = Deadline(timeout)
        if src is None:
            receive = partial(self._receive_any, tensor, tag, deadline, sites.here())
            return _in_background(receive, tensor) if async_op else receive()
        if self._topology.is_local(src):
            seat = self._topology.places[src].seat
            got = self._local.recv(tensor, seat, tag, timeout=timeout, async_op=async_op)
            return _Receipt(cast(Work, got), src) if async_op else src
        doing = f"recv({shown(tensor)}, tag={tag}) from rank {self._global_ranks[src]}"
        with self._titled(doing):
            work = self._post(tensor, src, tag, timeout)
        finish = partial(self._received, work, deadline, src, doing, sites.here())
        return _in_background(finish, tensor) if async_op else finish()

    def _received(
        self, work: Pending, deadline: Deadline, source: int, doing: str, site: str
    ) -> int:
        self._finish(work, deadline, source, doing, site)
        return source

    def _post(self, tensor: Tensor, src: int | None, tag: int, timeout: float) -> Receipt:
        """Ask for a message of another host."""
        accept = partial(_accept, tensor)
        work = self._engine.recv(tensor, src, tag, timeout=timeout, async_op=True, accept=accept)
        return cast(Receipt, work)

    def _receive_any(self, tensor: Tensor, tag: int, deadline: Deadline, site: str) -> int:
        doing = f"recv({shown(tensor)}, tag={tag}) from any rank"
        others = [each for each in range(self._engine.size) if each != self._engine.rank]
        waiting = self._vigil.shown(doing, deadline, others, True)
        with self._titled(doing, site), waiting as check:
            looked = time.monotonic()
            while True:
                if (seat := self._try(self._local, tensor, tag)) is not None:
                    return self._topology.mine[seat]
                if (source := self._try(self._engine, tensor, tag)) is not None:
                    return source
                now = time.monotonic()
                if deadline.left() <= 0:
                    raise DistTimeout(f"nothing came within {deadline.limit:g} s")
                if now - looked > SLICE:
                    looked = now
                    self._vigil.look([], 0, check)
                time.sleep(_LOOK)

    def _try(self, backend: GroupBackend, tensor: Tensor, tag: int) -> int | None:
        """Take a message that has arrived; return its source, None if there is none."""
        try:
            with expected():
                return cast(int, backend.recv(tensor, None, tag, timeout=0))
        except DistTimeout:
            return None


def _accept(tensor: Tensor, source: int, frame: Frame) -> Failure | None:
    name = frame.label.decode()
    if name == dtype_name(tensor.dtype):
        return None
    return Failure(
        CollectiveMismatch,
        f"rank {source} of the group sent {name}: send and receive tensors of one dtype",
    )


@contextmanager
def _titled(title: str) -> Iterator[None]:
    """Have errors of a block say which message they are about."""
    try:
        with expected():
            yield
    except Deadlock:
        raise  # the same on all ranks
    except DistBackendError as error:
        reason = getattr(error, "reason", str(error))
        kind = PeerFailed if isinstance(error, PeerFailed) else type(error)
        raise kind(f"{title}: {reason}") from None


def _in_background(call: Callable[[], int | None], tensor: Tensor) -> ThreadWork:
    work = ThreadWork(call, [tensor])
    thread = threading.Thread(target=work.run, name="phalanx-letter", daemon=True)
    bystanders.mark(thread).start()
    return work


class _Receipt(Work):
    """A receive from this host, whose source is named as the whole group does."""

    def __init__(self, work: Work, source: int) -> None:
        self._work = work
        self._source = source

    def wait(self, timeout: Timeout | None = None) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        self._work.source_rank()  # raises if it is too early to ask
        return self._source
