"""Which algorithm is worth it among how many hosts, for how many bytes."""

from __future__ import annotations

_MESSAGE = 64 << 10  # bytes that take about as long to pass as a message has latency


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
