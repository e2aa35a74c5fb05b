"""MPI as a wire, by mpi4py.

Nothing here blocks in MPI: operations are started, and looked after by whoever waits and by a
thread of the process's own. All calls are made under one lock, so a library that lets only one
thread at a time in (MPI_THREAD_SERIALIZED) will do.

The groups of a process share one communicator. A frame says which group it is for, by a key that
the group's first rank has drawn and that is mixed with the job's secret; payloads are told apart by
numbers that serve as tags. A frame with a key that nobody here has is not delivered. Who may take
part in MPI's world at all is decided by the launcher.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import bystanders
from phalanx.backends.engines import addresses, frames
from phalanx.backends.engines.mailbox import Gate
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.engines.wire import Deliver, End, Lose, Wire
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistBackendError
from phalanx.stores import secret
from phalanx.stores.over_mpi import mpi

_FRAMES = 0  # the tag of frames; payloads have their numbers, from 1
_KEY_BYTES = 16
_AHEAD = 4  # frames that MPI can put where they belong before the first is looked at
_SPIN = 0.0002  # seconds in which a waiting rank looks without a pause
_PAUSES = (0.00002, 0.0005)  # seconds between looks after that, at first and at last
_BACKGROUND = (0.0001, 0.005)  # the same for the thread that looks when nobody waits
_CLOSE_SECONDS = 5.0  # for the last frames to be on their way


def create(options: BackendOptions) -> MessageEngine:
    """Make one rank's end of a group whose messages MPI carries."""
    port = _port()
    if options.group_rank == 0:
        options.store.set("mpi/key", secret.token())
    options.store.set(f"mpi/{options.group_rank}", str(port.rank))
    told = addresses.gathered(options, "mpi")
    key = bytes.fromhex(secret.mixed(options.store.get("mpi/key").decode()))[:_KEY_BYTES]
    wire = MpiWire(port, key, [int(number) for number in told])
    return MessageEngine("mpi", wire, options, addresses.failures(options))


class MpiPort:
    """This process's way into MPI: what has been started, and who gets what comes."""

    def __init__(self) -> None:
        self._mpi = mpi()
        level = self._mpi.Query_thread()
        if level < self._mpi.THREAD_SERIALIZED:
            raise DistBackendError(
                "MPI was initialised for one thread only, and Phalanx calls it from several, one "
                "at a time: leave mpi4py.rc.thread_level at 'multiple', or set it to 'serialized'"
            )
        self._world = self._mpi.COMM_WORLD.Dup()
        self._tags = self._world.Get_attr(self._mpi.TAG_UB)
        self.rank = self._world.Get_rank()
        self.lock = threading.RLock()
        self._started: list[tuple[Any, Callable[[], None], Any]] = []
        self._frames: deque[tuple[Any, Tensor]] = deque()
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._groups: dict[bytes, Callable[[int, frames.Frame], None]] = {}
        self._early: defaultdict[bytes, list[tuple[int, frames.Frame]]] = defaultdict(list)
        self._past: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def join(self, key: bytes, deliver: Callable[[int, frames.Frame], None]) -> None:
        """Begin to take the frames of a group."""
        with self.lock:
            self._groups[key] = deliver
            for source, frame in self._early.pop(key, ()):
                deliver(source, frame)
            if self._thread is None:
                while len(self._frames) < _AHEAD:
                    self._expect()
                self._stop.clear()
                thread = threading.Thread(target=self._look, name="phalanx-mpi", daemon=True)
                self._thread = bystanders.mark(thread)
                thread.start()

    def leave(self, key: bytes) -> None:
        """Forget a group; with the last one, take no more frames."""
        with self.lock:
            self._groups.pop(key, None)
            self._past.add(key)
            thread = self._thread
            if self._groups or thread is None:
                return
            self._thread = None
            self._stop.set()
            while self._frames:
                request, buffer = self._frames.pop()
                request.Cancel()
                status = self._mpi.Status()
                request.Wait(status)
                if not status.Is_cancelled():
                    self._sort(status.Get_source(), buffer)
        thread.join(_CLOSE_SECONDS)

    def number(self, peer: int) -> int:
        with self.lock:
            self._numbers[peer] = self._numbers[peer] % (self._tags - 1) + 1
            return self._numbers[peer]

    def send(self, data: Tensor, peer: int, tag: int, end: Callable[[], None]) -> None:
        with self.lock:
            request = self._world.Isend([data.numpy(), self._mpi.BYTE], peer, tag)
            self._started.append((request, end, data))

    def receive(self, data: Tensor, peer: int, tag: int, end: Callable[[], None]) -> None:
        with self.lock:
            request = self._world.Irecv([data.numpy(), self._mpi.BYTE], peer, tag)
            self._started.append((request, end, data))

    def progress(self) -> bool:
        """Bring on what has been started; say whether something came to its end."""
        if not self.lock.acquire(blocking=False):
            return False  # somebody is at it
        try:
            moved = False
            while self._frames:
                request, buffer = self._frames[0]
                status = self._mpi.Status()
                if not request.Test(status):
                    break
                self._frames.popleft()
                self._expect()
                self._sort(status.Get_source(), buffer)
                moved = True
            if self._started:
                done = self._mpi.Request.Testsome([request for request, _, _ in self._started])
                if done:
                    ended = [self._started[i][1] for i in done]
                    gone = set(done)
                    self._started = [each for i, each in enumerate(self._started) if i not in gone]
                    for end in ended:
                        end()
                    moved = True
            return moved
        finally:
            self.lock.release()

    def _expect(self) -> None:
        buffer = torch.empty(_KEY_BYTES + frames.FRAME_BYTES, dtype=torch.uint8)
        source = self._mpi.ANY_SOURCE
        request = self._world.Irecv([buffer.numpy(), self._mpi.BYTE], source, _FRAMES)
        self._frames.append((request, buffer))

    def _sort(self, source: int, buffer: Tensor) -> None:
        memory = buffer.numpy().data
        key = bytes(memory[:_KEY_BYTES])
        frame = frames.unpack(memory[_KEY_BYTES:])
        deliver = self._groups.get(key)
        if deliver is not None:
            deliver(source, frame)
        elif key not in self._past:
            self._early[key].append((source, frame))

    def _look(self) -> None:
        pause = _BACKGROUND[0]
        while not self._stop.wait(pause):
            pause = _BACKGROUND[0] if self.progress() else min(2 * pause, _BACKGROUND[1])


_port = functools.cache(MpiPort)


class MpiWire(Wire):
    """The part of the port that belongs to one group."""

    def __init__(self, port: MpiPort, key: bytes, ranks: Sequence[int]) -> None:
        self._port = port
        self._key = torch.frombuffer(bytearray(key), dtype=torch.uint8)
        self._ranks = list(ranks)  # MPI's, by group rank
        self._unsent = 0
        self._closed = False

    def start(self, deliver: Deliver, lose: Lose) -> None:
        places = {rank: place for place, rank in enumerate(self._ranks)}
        self._port.join(
            self._key.numpy().tobytes(), lambda source, frame: deliver(places[source], frame)
        )

    def send(self, frame: Tensor, dst: int) -> None:
        with self._port.lock:
            self._unsent += 1
        self._port.send(torch.cat([self._key, frame]), self._ranks[dst], _FRAMES, self._sent)

    def _sent(self) -> None:
        self._unsent -= 1

    def number(self, dst: int) -> int:
        return self._port.number(self._ranks[dst])

    def offer(self, payload: Tensor, dst: int, number: int, end: End) -> None:
        self._port.send(payload, self._ranks[dst], number, functools.partial(end, ""))

    def take(self, payload: Tensor, src: int, number: int, end: End) -> None:
        self._port.receive(payload, self._ranks[src], number, functools.partial(end, ""))

    def stall(self, gate: Gate, seconds: float) -> bool:
        if gate.is_set():
            return True
        start = time.monotonic()
        pause = 0.0
        while True:
            self._port.progress()
            if gate.is_set():
                return True
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            if waited > _SPIN:
                pause = min(max(2 * pause, _PAUSES[0]), _PAUSES[1])
                gate.wait(min(pause, seconds - waited))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        limit = time.monotonic() + _CLOSE_SECONDS
        while self._unsent and time.monotonic() < limit:
            self._port.progress()
            time.sleep(_PAUSES[0])
        self._port.leave(self._key.numpy().tobytes())
