"""Which algorithm is worth it among how many hosts, for how many bytes."""

from __future__ import annotations

SMALL = 32 << 10  # bytes up to which one rank per host speaks for all
_SHORTEST_CHUNK, LONGEST_CHUNK = 2 << 20, 4 << 20  # bytes
_MESSAGE = 64 << 10  # bytes that take about as long to pass as a message has latency


def chunk_bytes(num_bytes: int) -> int:
    """Return how much of a slice with so many bytes passes between two hosts at a time.

    Several chunks let the network and the memory work at the same time; each costs messages.
    """
    return min(max(num_bytes // 4, _SHORTEST_CHUNK), LONGEST_CHUNK)


def doubling_messages(hosts: int) -> int:
    """Return how many messages follow each other in recursive doubling.

    If the hosts are no power of two, some stand aside: they give first, and get last.
    """
    power = 1 << (hosts.bit_length() - 1)
    return power.bit_length() - 1 + (2 if power < hosts else 0)


def is_doubling_worth_it(hosts: int, num_bytes: float) -> bool:
    """Say whether fewer messages are worth more bytes: recursive doubling, not a ring."""
    messages = doubling_messages(hosts)
    fewer = 2 * (hosts - 1) - messages
    more = messages - 2 * (hosts - 1) / hosts  # each of doubling's has all bytes
    return more * num_bytes <= fewer * _MESSAGE
