"""A backend on any wire: messages with tags and deadlines, and collectives that are checked.

Each message says how many bytes it has and, in a collective, which one it belongs to: what does not
fit is found before anything is written.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from phalanx import errors, forks
from phalanx.backends import shapes
from phalanx.backends.base import COLLECTIVE
from phalanx.backends.engines import frames, sites
from phalanx.backends.engines.calls import Call, differ, differ_in_shape, running
from phalanx.backends.engines.collectives import Collectives, Part
from phalanx.backends.engines.frames import Frame
from phalanx.backends.engines.mailbox import Arrival, Failure, Mailbox, Pending, Receipt
from phalanx.backends.engines.wire import Wire
from phalanx.backends.registry import BackendOptions
from phalanx.errors import CollectiveMismatch, DistBackendError, DistTimeout, PeerFailed
from phalanx.types import Deadline
from phalanx.work import CompletedWork, Work

# A message that has begun to come may take this much longer than its receiver wanted to wait.
_GRACE = 5.0
_LOOKS, _LOOK = 50, 0.01  # for the cause of a broken connection: how many, seconds in between

Accept = Callable[[int, Frame], Failure | None]

_open_engines: weakref.WeakSet[MessageEngine] = weakref.WeakSet()


class MessageEngine(Collectives):
    """A group on a wire.

    Beyond what every backend does, a message can have a ``label``, at most `frames.LABEL_BYTES`
    bytes that travel with it, and a receive can ``accept`` it: a function that gets the source and
    the frame before anything is written, and returns why the message is refused, or None.

    What both ends know they will exchange next can be ``foreseen`` by both: then its bytes need not
    wait until its frame has been read, and are written before ``accept`` is asked.
    """

    def __init__(
        self, name: str, wire: Wire, options: BackendOptions, failures: dict[int, str]
    ) -> None:
        super().__init__(options.group_rank, options.group_size, options.timeout)
        self.name = name
        self.global_ranks = list(options.global_ranks)
        self._group = options.group_id
        self._failures = failures  # how ranks of the world have failed, told to groups yet to be
        self._wire = wire
        self._mailbox = Mailbox(self.rank, self.size)
        self._locks = [threading.Lock() for _ in range(self.size)]
        self._offers: dict[Pending, int] = {}  # what is sent and not taken yet, with its tag
        self._foreseen_to, self._foreseen_from = [0] * self.size, [0] * self.size  # how many
        self._closed = False
        _open_engines.add(self)
        wire.start(self._deliver, self._lost)

    # Messages

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
        label: bytes = b"",
        foreseen: bool = False,
    ) -> Work | None:
        what = functools.partial(self._title, "send to", dst, tag, sites.here())
        work = self._sent(tensor, dst, tag, timeout, label, what, foreseen)
        if async_op:
            return work
        work.wait()
        return None

    def _sent(
        self,
        tensor: Tensor,
        dst: int,
        tag: int,
        timeout: float | None,
        label: bytes,
        what: Callable[[], str],
        foreseen: bool = False,
    ) -> Work:
        gone = self._mailbox.gone.get(dst)
        failure = self._mailbox.obstacle(tag) or gone  # read after that: it is said before
        if failure is not None:
            raise failure.error(what())
        num_bytes = tensor.nbytes
        if dst == self.rank:
            frame = Frame(frames.MESSAGE, tag, num_bytes, 0, label, frames.read(tensor))
            self._deliver(self.rank, frame)
            return CompletedWork([tensor])
        try:
            number = self._foresee(self._foreseen_to, dst, num_bytes) if foreseen else 0
            if number or not frames.fits(num_bytes, label):
                return self._offer(tensor, dst, tag, label, what, timeout, number)
            data = frames.read(tensor)
            with self._locks[dst]:
                self._post(frames.MESSAGE, dst, tag, num_bytes, 0, label, data)
        except PeerFailed as error:
            raise self._cause(dst, tag, str(error)).error(what()) from error
        except DistTimeout as error:
            raise DistTimeout(f"{what()}: rank {self.global_ranks[dst]} {error}") from error
        return CompletedWork([tensor])

    def _offer(
        self,
        tensor: Tensor,
        dst: int,
        tag: int,
        label: bytes,
        what: Callable[[], str],
        timeout: float | None,
        number: int = 0,
    ) -> Pending:
        """Send a message in two parts: its frame, and the bytes when they are asked for."""
        limit = self.timeout if timeout is None else timeout
        expired = self._step_expired if tag == COLLECTIVE else self._send_expired
        work = Pending(what, tensor, limit, self._wire.stall, expired)
        data = frames.as_bytes(tensor)

        def end(why: str) -> None:
            self._offers.pop(work, None)
            if not why:
                work.finish()
            else:
                work.give_up(self._cause(dst, tag, why))

        with self._locks[dst]:
            number = number or self._wire.number(dst)
            self._post(frames.MESSAGE, dst, tag, data.nbytes, number, label, b"")
            self._offers[work] = tag
            self._wire.offer(data, dst, number, end)
        if (failure := self._mailbox.obstacle(tag)) is not None:
            work.give_up(failure)
        return work

    def _post(self, kind: int, dst: int, *fields: Any) -> None:
        self._wire.send(frames.pack(kind, *fields), dst)

    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
        accept: Accept | None = None,
        foreseen: bool = False,
    ) -> Work | int:
        what = functools.partial(self._title, "recv from", src, tag, sites.here())
        receipt = self._receipt(tensor, src, tag, timeout, accept, what, foreseen)
        if async_op:
            return receipt
        receipt.wait()
        return receipt.source_rank()

    def _receipt(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int,
        timeout: float | None,
        accept: Accept | None,
        what: Callable[[], str],
        foreseen: bool = False,
    ) -> Receipt:
        limit = self.timeout if timeout is None else timeout
        receipt = Receipt(what, tensor.detach(), limit, self._wire.stall, self._recv_expired)
        receipt.source, receipt.tag, receipt.accept = src, tag, accept
        if foreseen and src is not None:
            receipt.number = self._foresee(self._foreseen_from, src, tensor.nbytes)
            if receipt.number:
                self._fetch(receipt, src, receipt.number)
        arrival = self._mailbox.post(receipt)
        if arrival is not None:
            self._bring(arrival, receipt)
        return receipt

    def _foresee(self, counts: list[int], peer: int, num_bytes: int) -> int:
        """Return the number of a foreseen payload; 0 if it travels in its frame, or as others do.

        Nothing but the size decides that: it must be the same at both ends.
        """
        if frames.fits(num_bytes, bytes(frames.LABEL_BYTES)):
            return 0
        counts[peer] += 1
        return self._wire.foreseen(counts[peer], num_bytes)

    def _bring(self, arrival: Arrival, receipt: Receipt) -> None:
        """Bring the bytes of a message where they belong, or refuse it."""
        source, frame = arrival
        tensor = receipt.tensor
        failure = receipt.accept(source, frame) if receipt.accept else None
        if failure is None and frame.num_bytes != tensor.nbytes:
            failure = Failure(
                DistBackendError,
                f"the message of rank {self.global_ranks[source]} has {frame.num_bytes} bytes, "
                f"but there is room for {tensor.nbytes} ({tensor.dtype}{list(tensor.shape)}): "
                "send and receive tensors of one size",
            )
        if failure is not None:
            # Its bytes must be taken all the same: the sender waits for that.
            if frame.number and frame.number != receipt.number:
                waste = torch.empty(frame.num_bytes, dtype=torch.uint8)
                self._wire.take(waste, source, frame.number, lambda why: None)
            receipt.give_up(failure)
            return
        if not frame.number:
            frames.write(tensor, frame.data)
            receipt.finish(source)
            return
        if receipt.number:
            receipt.finish_part(source)
        else:
            self._fetch(receipt, source, frame.number)

    def _fetch(self, receipt: Receipt, source: int, number: int) -> None:
        """Ask for the bytes of a message; it is complete when they, and its frame, are here."""
        tensor = receipt.tensor
        whole = tensor.is_contiguous()
        buffer = frames.as_bytes(tensor if whole else torch.empty(tensor.shape, dtype=tensor.dtype))

        def end(why: str) -> None:
            if why:
                receipt.give_up(self._cause(source, receipt.tag, why))
            else:
                if not whole:
                    with torch.no_grad():
                        tensor.copy_(buffer.view(tensor.dtype).view(tensor.shape))
                receipt.finish_part(source)

        self._wire.take(buffer, source, number, end)

    def unclaimed(self, tag: int) -> list[tuple[int, bytes]]:
        """Return the source and label of each message that has come and was not asked for."""
        return [(source, frame.label) for source, frame in self._mailbox.arrivals(tag)]

    def failed(self) -> list[int]:
        """Return the ranks whose connections are gone, though they have not left."""
        return self._mailbox.failed()

    def withdraw(self, work: Work) -> bool:
        """Take a receive back; False if its message has begun to come."""
        return isinstance(work, Receipt) and self._mailbox.withdraw(work)

    def _title(self, name: str, peer: int | None, tag: int, site: str) -> str:
        who = "any rank" if peer is None else f"rank {self.global_ranks[peer]}"
        tagged = f" (tag {tag})" if tag > 0 else ""
        return f"{name} {who}{tagged} on {self._me()}{f', {site}' if site else ''}"

    def _me(self) -> str:
        return f"rank {self.global_ranks[self.rank]} of group {self._group!r} ({self.name})"

    # What happens when time is over

    # The work ends with it: who waits again is told the same, and nothing else is waited for.

    def _recv_expired(self, work: Pending, limit: float) -> None:
        receipt = cast(Receipt, work)
        if self._mailbox.withdraw(receipt):
            receipt.give_up(Failure(DistTimeout, f"no message has come within {limit:g} s"))
        elif not self._wire.stall(receipt.done, _GRACE):
            self._give_up(receipt, limit, "which had begun to come")

    def _step_expired(self, work: Pending, limit: float) -> None:
        # There are no collectives after this one, so that nobody will get half of a message.
        work.give_up(Failure(DistTimeout, f"what is sent was not taken within {limit:g} s"))

    def _send_expired(self, work: Pending, limit: float) -> None:
        self._give_up(work, limit, "which was not taken")

    def _give_up(self, work: Pending, limit: float, state: str) -> None:
        text = f"gave up the message, {state}, after {limit:g} s; the group cannot be used any more"
        work.give_up(Failure(DistTimeout, text))
        self.abort(f"{work.title()}: {text}")

    # Collectives

    def _issue(
        self,
        outputs: Sequence[Tensor],
        timeout: float | None,
        async_op: bool,
        step: Callable[..., None],
        *args: Any,
    ) -> Work | None:
        call = Call.of(step.__name__, args, self._issued + 1, sites.here())
        limit = self.timeout if timeout is None else timeout

        def checked(deadline: Deadline, *args: Any) -> None:
            with running(self, call, limit):
                step(deadline, *args)

        return super()._issue(outputs, timeout, async_op, checked, *args)

    def _exchange(self, deadline: Deadline, gives: Sequence[Part], takes: Sequence[Part]) -> None:
        call = self.call
        assert call is not None
        accept = functools.partial(self._belongs, call)
        left = deadline.left()
        title = functools.partial(functools.partial, self._waiting, call)
        works: list[Work] = [
            self._receipt(tensor, peer, COLLECTIVE, left, accept, title(peer))
            for tensor, peer in takes
        ]
        label = call.label()
        works += [
            self._sent(tensor, peer, COLLECTIVE, left, label, title(peer)) for tensor, peer in gives
        ]
        for work in works:
            work.wait()

    call: Call | None = None  # the collective that runs, one at a time

    def _waiting(self, call: Call, peer: int) -> str:
        who = f"waiting for rank {self.global_ranks[peer]}"
        return f"{call.what} #{call.number} on {self._me()}{call.place()}, {who}"

    def _belongs(self, call: Call, source: int, frame: Frame) -> Failure | None:
        theirs = Call.read(frame.label)
        me = self.global_ranks[self.rank]
        calls = {me: call, self.global_ranks[source]: theirs}
        if not theirs.matches(call):
            return Failure(CollectiveMismatch, differ(self._group, calls))
        if call.is_to_tell(theirs):
            shapes.tell(me, call.site, differ_in_shape(self._group, calls))
        return None

    # Who is there

    def _deliver(self, source: int, frame: Frame) -> None:
        if frame.kind == frames.MESSAGE:
            arrival = Arrival(source, frame)
            receipt = self._mailbox.deliver(arrival)
            if receipt is not None:
                self._bring(arrival, receipt)
            return
        rank = self.global_ranks[source]
        reason = frame.data.decode(errors="replace")
        if frame.kind == frames.LEAVING:
            if frame.label:  # this may come before the word of who was out of step first
                self._end_collectives(Failure(getattr(errors, frame.label.decode()), reason))
            failure = Failure(PeerFailed, f"rank {rank} has left the group")
            self._mailbox.lose(source, failure)
        elif frame.kind == frames.FAILED:
            self._failures[rank] = f"rank {rank} {reason}"
            self._mailbox.lose(source, Failure(PeerFailed, self._failures[rank], True))
        elif frame.kind == frames.OUT_OF_STEP:
            kind = getattr(errors, frame.label.decode())
            self._end_collectives(Failure(kind, f"rank {rank} is out of step: {reason}"))
        else:
            kind = getattr(errors, frame.label.decode())
            self._break_off(Failure(kind, f"rank {rank} has ended the group: {reason}"))

    def _lost(self, peer: int, why: str) -> None:
        failure = self._gone(peer, why)
        if peer not in self._mailbox.gone:
            self._failures[self.global_ranks[peer]] = failure.text
        self._mailbox.lose(peer, failure)

    def _gone(self, peer: int, why: str) -> Failure:
        rank = self.global_ranks[peer]
        text = f"the connection to rank {rank} is gone: it has died, or cannot be reached ({why})"
        return Failure(PeerFailed, text, True)

    def _cause(self, peer: int, tag: int, why: str) -> Failure:
        """Say why the bytes of a message do not come: a peer may itself have given up over another.

        What it had to say, or the other's end, is known here a little later.
        """
        for _ in range(_LOOKS):
            known = self._mailbox.reason(peer, tag)
            if known is not None:
                return known
            time.sleep(_LOOK)
        return self._gone(peer, why)

    def _break_off(self, failure: Failure) -> None:
        self._mailbox.break_off(failure)
        for work in list(self._offers):
            work.give_up(failure)

    def _end_collectives(self, failure: Failure) -> None:
        self._mailbox.end_collectives(failure)
        for work, tag in list(self._offers.items()):
            if tag == COLLECTIVE:
                work.give_up(failure)

    def _tell(self, kind: int, reason: str = "", label: bytes = b"") -> None:
        data = reason.encode()[: frames.FRAME_BYTES // 2]
        for peer in self._others():
            if peer not in self._mailbox.gone:
                with suppress(DistBackendError), self._locks[peer]:
                    self._post(kind, peer, 0, len(data), 0, label, data)

    def abort(self, reason: str, kind: type[DistBackendError] = DistBackendError) -> None:
        if self._closed or self._mailbox.broken is not None:
            return
        self._break_off(Failure(kind, f"the group was ended: {reason}"))
        self._tell(frames.ABORTED, reason, kind.__name__.encode())

    def end_collectives(self, reason: str, kind: type[DistBackendError] = DistBackendError) -> None:
        """Make all who are in a collective of this group raise, and who comes to one later."""
        if self._closed or self._mailbox.obstacle(COLLECTIVE) is not None:
            return
        text = f"the group has no collectives any more: {reason}"
        self._end_collectives(Failure(kind, text))
        self._tell(frames.OUT_OF_STEP, reason, kind.__name__.encode())

    def fail(self, reason: str) -> None:
        if not self._closed:
            self._tell(frames.FAILED, reason)
            self._break_off(Failure(DistBackendError, f"this rank {reason}"))
            self._wire.flush()

    def describe(self, rank: int) -> str:
        failure = self._mailbox.gone.get(rank)
        return "" if failure is None else failure.text.removeprefix("the connection to ")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open_engines.discard(self)
        if (why := self._mailbox.out_of_step) is not None:
            self._tell(frames.LEAVING, why.text, why.kind.__name__.encode())
        else:
            self._tell(frames.LEAVING)
        self._break_off(Failure(DistBackendError, f"the group was closed on {self._me()}"))
        super().close()
        self._wire.close()


# A forked child is not this rank, and does not speak for it.
@forks.after_fork_in_child
def _leave_to_parent() -> None:
    for engine in list(_open_engines):
        forks.leave_alone(engine)
    _open_engines.clear()


@atexit.register
def _leave_at_exit() -> None:
    # As for the local engine: who ends by an exception (kept in sys.last_value) says so.
    error = getattr(sys, "last_value", None)
    for engine in list(_open_engines):
        if error is not None:
            story = "".join(traceback.format_exception(error)).rstrip()
            engine.fail(f"ended by an uncaught exception\n{story}")
        engine.close()
