"""Gloo as a wire.

A wait that expires makes Gloo close all connections of the group, so nothing here waits for Gloo
with a deadline; deadlines are kept above. A receive that is too small for its message ends the
process, so frames come first and say how long a payload is.

Gloo sends a payload when its receiver has said that it is ready. On the connection on which that
one's own payloads travel, this word would wait for them: each direction has connections of its own.

If a connection breaks, Gloo tells all who wait but those whose bytes it has begun to send or has
queued behind such: nothing here waits for a send alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from phalanx import bystanders
from phalanx.backends.engines import frames
from phalanx.backends.engines.helpers import Helpers
from phalanx.backends.engines.wire import Deliver, End, Lose, Wire
from phalanx.errors import DistTimeout, PeerFailed

FOR_EVER = timedelta(days=365)
_FRAMES = 0  # the tag of frames; payloads have their numbers, from 1
_CLOSING = 0x7FFFFFFF  # the tag of a message that nobody sends
# The tag of a payload that its receiver foresees: this bit, its size, and six bits of its count.
_FORESEEN = 1 << 30
_LONGEST_FORESEEN = 1 << 23
_AHEAD = 2  # frames that a peer can send before the first of them is read
_IN_FLIGHT = 64  # frames to one peer before somebody looks whether it takes them
_CLOSE_SECONDS = 5.0  # for peers to take the last frames


class GlooWire(Wire):
    """The connections of two ProcessGroupGloo; a thread per peer takes its frames.

    What goes to a higher rank travels ``forth``, and ``back`` what goes to a lower one.
    """

    def __init__(self, back: Any, forth: Any, rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._groups = [back, forth]
        self._timeout = timeout  # for a peer to take frames
        self._peers = [peer for peer in range(size) if peer != rank]
        self._sent: dict[int, deque[Any]] = {peer: deque() for peer in self._peers}
        self._numbers = dict.fromkeys(self._peers, 0)
        self._offered: dict[int, dict[int, End]] = {peer: {} for peer in self._peers}
        self._helpers = Helpers("phalanx-gloo")
        self._closed = False
        self._readers: list[threading.Thread] = []

    def start(self, deliver: Deliver, lose: Lose) -> None:
        for peer in self._peers:
            thread = threading.Thread(
                target=self._read,
                args=(peer, deliver, lose),
                name=f"phalanx-gloo-{peer}",
                daemon=True,
            )
            self._readers.append(bystanders.mark(thread))
            thread.start()

    def _read(self, peer: int, deliver: Deliver, lose: Lose) -> None:
        try:
            buffers = [torch.empty(frames.FRAME_BYTES, dtype=torch.uint8) for _ in range(_AHEAD)]
            ahead = deque(
                (self._from(peer).recv([buffer], peer, _FRAMES), buffer, buffer.numpy().data)
                for buffer in buffers
            )
            while not self._closed:
                work, buffer, memory = ahead.popleft()
                work.wait(FOR_EVER)
                deliver(peer, frames.unpack(memory))
                ahead.append((self._from(peer).recv([buffer], peer, _FRAMES), buffer, memory))
        except RuntimeError as error:
            if not self._closed:
                why = _first_line(error)
                lose(peer, why)
                with suppress(KeyError):  # when there are no more
                    while True:
                        self._offered[peer].popitem()[1](why)

    def _to(self, peer: int) -> Any:
        return self._groups[peer > self._rank]

    def _from(self, peer: int) -> Any:
        return self._groups[peer < self._rank]

    def send(self, frame: Tensor, dst: int) -> None:
        sent = self._sent[dst]
        try:
            sent.append(_unseen(partial(self._to(dst).send, [frame], dst, _FRAMES)))
        except RuntimeError as error:
            raise PeerFailed(_first_line(error)) from error
        if len(sent) > _IN_FLIGHT:
            oldest = [sent.popleft() for _ in range(_IN_FLIGHT // 2)]
            if not self._wait_for(oldest, FOR_EVER).wait(self._timeout):
                raise DistTimeout(
                    f"has taken nothing for {self._timeout:g} s: it is stopped, or cannot be "
                    "reached"
                )

    def _wait_for(self, works: list[Any], most: timedelta) -> threading.Event:
        """Return an event that comes when all works have ended, well or not."""
        done = threading.Event()

        def wait() -> None:
            for work in works:
                with suppress(RuntimeError):
                    work.wait(most)
            done.set()

        self._helpers.run(wait)
        return done

    def number(self, dst: int) -> int:
        self._numbers[dst] = self._numbers[dst] % (_FORESEEN - 1) + 1
        return self._numbers[dst]

    def foreseen(self, count: int, num_bytes: int) -> int:
        if num_bytes > _LONGEST_FORESEEN:
            return 0
        return _FORESEEN | num_bytes << 6 | count % 64

    def offer(self, payload: Tensor, dst: int, number: int, end: End) -> None:
        offered = self._offered[dst]
        offered[number] = end

        def end_once(why: str) -> None:
            if offered.pop(number, None) is not None:
                end(why)

        self._start(partial(self._to(dst).send, [payload], dst, number), end_once)

    def take(self, payload: Tensor, src: int, number: int, end: End) -> None:
        if payload.numel() == 0:
            end("")
            return
        self._start(partial(self._from(src).recv, [payload], src, number), end)

    def _start(self, start: Callable[[], Any], end: End) -> None:
        try:
            work = _unseen(start)
        except RuntimeError as error:
            end(_first_line(error))
            return

        def wait() -> None:
            try:
                work.wait(FOR_EVER)
            except RuntimeError as error:
                end(_first_line(error))
            else:
                end("")

        self._helpers.run(wait)

    def flush(self) -> None:
        # Taken out: of two that wait for one operation, Gloo lets only one go on.
        sent = [works.popleft() for works in self._sent.values() for _ in range(len(works))]
        # One that expires ends the connections, as it should: this is said last.
        self._wait_for(sent, timedelta(seconds=_CLOSE_SECONDS)).wait(_CLOSE_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self.flush()
        self._closed = True
        for group in self._groups:
            end_waits(group, self._peers)
        for thread in self._readers:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_SECONDS)
        self._helpers.close(_CLOSE_SECONDS)
        # Operations that outlive their group free its memory twice.
        for sent in self._sent.values():
            sent.clear()
        self._groups.clear()


def end_waits(group: Any, peers: Iterable[int]) -> None:
    """End the waits of other threads for anything of a group, and its connections with them."""
    for peer in peers:
        # Nothing but a wait that expires does. One with a peer that is gone fails at once.
        with suppress(RuntimeError):
            waited = group.recv([torch.empty(1)], peer, _CLOSING)
            waited.wait(timedelta(milliseconds=1))


def _unseen(start: Callable[[], Any]) -> Any:
    """Start an operation without torch's profiler, which must not end before it does."""
    if not profiler._is_profiler_enabled:
        return start()
    record: Callable[[bool], None] = torch._C._autograd._enable_record_function
    record(False)
    try:
        return start()
    finally:
        record(True)


def _first_line(error: RuntimeError) -> str:
    """Return what Gloo says, without its source lines and advice."""
    text = str(error).partition("\n")[0]
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is")[0]
