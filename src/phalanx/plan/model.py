"""The cost of all_reduce and of training steps on H hosts with M ranks each.

An alpha-beta-gamma model (Hockney 1994; Thakur, Rabenseifner and Gropp 2005): a message costs a
constant, its bytes, and what is added up of them. Here the constants are those of an engine and of
a local group, the link adds its latency and its rate, and all ranks of a host share that link.
What is left out: congestion beyond the hosts' own links, stragglers, and lost packets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.backends.hierarchy.choices import (
    SMALL,
    chunk_bytes,
    doubling_messages,
    is_doubling_worth_it,
)

# As in backends/hierarchy, which a test holds these against.

BUCKET = 25 << 20  # bytes of gradients that DDP reduces at a time
FIRST_BUCKET = 1 << 20


@dataclass(frozen=True)
class Engine:
    """What carries messages between hosts, without the link: seconds each, and for each byte."""

    message: float
    byte: float


@dataclass(frozen=True)
class Machine:
    """What was measured on one machine; all in seconds."""

    flat: Engine  # Gloo's ring over all ranks, per step
    between: Engine  # Phalanx's messages between hosts
    local: float  # a small collective of a host's ranks
    local_byte: float  # for each byte that a host's ranks reduce and share
    add_byte: float  # for each byte that is added to another

    def shared(self, ranks: int, cores: int) -> Machine:
        """Return what is left of it for each of more ranks than it has cores."""
        turns = max(1.0, ranks / cores)
        return Machine(
            Engine(self.flat.message * turns, self.flat.byte * turns),
            Engine(self.between.message * turns, self.between.byte * turns),
            self.local * turns,
            self.local_byte * turns,
            self.add_byte * turns,
        )


@dataclass(frozen=True)
class Link:
    """What connects each host to the others: bytes per second each way, and seconds of delay."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Layout:
    """How many hosts, two or more, and how many ranks on each."""

    hosts: int
    ranks_per_host: int

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host


# The machine that docs/scale.md was measured on.
MEASURED = Machine(
    flat=Engine(message=5.2e-05, byte=1.41e-09),
    between=Engine(message=0.000446, byte=2.91e-09),
    local=1.96e-05,
    local_byte=2.18e-10,
    add_byte=7.23e-11,
)


@dataclass(frozen=True)
class Model:
    """Predicts how long operations take."""

    machine: Machine
    link: Link
    layout: Layout

    def _step(self, num_bytes: float, flows: int) -> float:
        """Return the time of a message to another host, of `flows` at once from each host."""
        engine, carried = self.machine.between, flows * num_bytes / self.link.rate
        return engine.message + self.link.latency + carried + num_bytes * engine.byte

    def flat_ring(self, num_bytes: float) -> float:
        """Return the time of a ring over all ranks, neighbours beside each other: flat Gloo."""
        size, engine = self.layout.size, self.machine.flat
        part = num_bytes / size
        # Gloo cuts its messages, so that a part is copied while another is on the link.
        carried = max(part / self.link.rate, part * engine.byte)
        step = engine.message + self.link.latency + carried
        return (size - 1) * (2 * step + part * self.machine.add_byte)

    def small(self, num_bytes: float) -> float:
        """Return the time if one rank per host speaks for all, by recursive doubling."""
        near = 2 * self._local() + num_bytes * self._local_byte()
        return near + self._doubling(num_bytes, 1)

    def sliced(self, num_bytes: float) -> float:
        """Return the time if each rank of a host leads a slice, as Phalanx does with large ones.

        Between two hosts slices pass in chunks: one crosses while the next is reduced.
        """
        hosts, flows = self.layout.hosts, self.layout.ranks_per_host
        part = num_bytes / flows
        num_chunks = max(1, math.ceil(part / chunk_bytes(int(part)))) if hosts == 2 else 1
        part /= num_chunks
        near = 2 * self._local() + flows * part * self._local_byte()
        if hosts == 2:
            far = self._step(part, flows) + part * self.machine.add_byte
            return near + far + (num_chunks - 1) * max(near, far)
        exchange = self._doubling if is_doubling_worth_it(hosts, part) else self._ring
        return near + exchange(part, flows)

    def phalanx(self, num_bytes: float) -> float:
        """Return the time of what Phalanx chooses."""
        return self.small(num_bytes) if num_bytes <= SMALL else self.sliced(num_bytes)

    def limit(self, num_bytes: float) -> float:
        """Return what no algorithm can go below: each host's link, and the latency of a tree."""
        hosts = self.layout.hosts
        carried = 2 * (hosts - 1) / hosts * num_bytes / self.link.rate
        return max(carried, math.ceil(math.log2(hosts)) * self.link.latency)

    def _local(self) -> float:
        return self.machine.local if self.layout.ranks_per_host > 1 else 0.0

    def _local_byte(self) -> float:
        return self.machine.local_byte if self.layout.ranks_per_host > 1 else 0.0

    def _doubling(self, num_bytes: float, flows: int) -> float:
        rounds = self.layout.hosts.bit_length() - 1
        messages = doubling_messages(self.layout.hosts) * self._step(num_bytes, flows)
        return messages + rounds * num_bytes * self.machine.add_byte

    def _ring(self, num_bytes: float, flows: int) -> float:
        hosts = self.layout.hosts
        part = num_bytes / hosts
        step = self._step(part, flows)
        return (hosts - 1) * (2 * step + part * self.machine.add_byte)

    def training_step(
        self, num_bytes: float, compute: float, all_reduce: Callable[[float], float]
    ) -> float:
        """Return the time of a step of DDP: `compute` seconds, of which backward is two thirds.

        Buckets of gradients are reduced one after the other while backward goes on.
        """
        sizes = [min(FIRST_BUCKET, num_bytes)]
        while (left := num_bytes - sum(sizes)) > 0:
            sizes.append(min(BUCKET, left))
        backward = compute * 2 / 3
        ready = done = 0.0
        for size in sizes:
            ready += backward * size / num_bytes
            done = max(ready, done) + all_reduce(size)
        return compute - backward + done


ALGORITHMS: dict[str, Callable[[Model, float], float]] = {
    "flat ring": Model.flat_ring,
    "one rank per host": Model.small,
    "a slice per rank": Model.sliced,
}


def best(model: Model, num_bytes: float) -> str:
    """Return the algorithm that takes the least time."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name](model, num_bytes))
