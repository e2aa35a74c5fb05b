"""Thread ranks that take each other for ranks on other hosts, and a wire between them."""

import os
import threading
from unittest.mock import patch
from uuid import uuid4

from phalanx.backends.engines import frames
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.engines.wire import Wire
from phalanx.backends.hierarchy import create, hosts
from phalanx.backends.hierarchy.hosts import Host
from phalanx.backends.registry import Backend
from phalanx.testing.ranks import run_ranks


class Switchboard:
    """Connects the wires of one group."""

    def __init__(self, size):
        self.lock = threading.Lock()
        self.deliver = [None] * size
        self.early = [[] for _ in range(size)]  # frames for wires that have not started
        self.halves = {}  # payloads that were offered or asked for: source, destination, number

    def connect(self, rank, deliver):
        with self.lock:
            for source, frame in self.early[rank]:
                deliver(source, frame)
            self.deliver[rank] = deliver

    def pass_on(self, source, dst, frame):
        with self.lock:
            deliver = self.deliver[dst]
            if deliver is None:
                self.early[dst].append((source, frame))
        if deliver is not None:
            deliver(source, frame)

    def meet(self, key, payload, end, copy):
        with self.lock:
            other = self.halves.pop(key, None)
            if other is None:
                self.halves[key] = payload, end
        if other is not None:
            their_payload, their_end = other
            copy(payload, their_payload)
            end("")
            their_end("")


class MemoryWire(Wire):
    """A wire between threads."""

    def __init__(self, board, rank):
        self._board = board
        self._rank = rank
        self._numbers = {}

    def start(self, deliver, lose):
        self._board.connect(self._rank, deliver)

    def send(self, frame, dst):
        self._board.pass_on(self._rank, dst, frames.unpack(frame.numpy().data))

    def number(self, dst):
        self._numbers[dst] = self._numbers.get(dst, 0) + 1
        return self._numbers[dst]

    def offer(self, payload, dst, number, end):
        self._board.meet((self._rank, dst, number), payload, end, lambda a, b: b.copy_(a))

    def take(self, payload, src, number, end):
        self._board.meet((src, self._rank, number), payload, end, lambda a, b: a.copy_(b))

    def close(self):
        pass


_boards: dict[str, Switchboard] = {}


def _connect(options, pg_options=None):
    """Make one rank's end of an engine on a `MemoryWire`."""
    if options.group_rank == 0:
        name = uuid4().hex
        _boards[name] = Switchboard(options.group_size)
        options.store.set("board", name)
    board = _boards[options.store.get("board").decode()]
    wire = MemoryWire(board, options.group_rank)
    return MessageEngine("wire", wire, options, failures={})


Backend.register_backend("wire", _connect, extended_api=True, devices="cpu")


def on_hosts(fn, layout, *args, engine="wire", **options):
    """Do `run_ranks` with thread ranks on hosts: a letter per rank, the same for one host."""
    found = [Host(letter, f"host-{letter}", 100 + rank) for rank, letter in enumerate(layout)]
    told = patch.object(hosts, "meet", lambda options: found)
    with told, patch.dict(os.environ, {create.ENGINE: engine}):
        try:
            return run_ranks(fn, len(layout), *args, **options)
        finally:
            _boards.clear()
