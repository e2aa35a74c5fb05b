"""For testing programs that run on several ranks, and stores and backends of your own."""

from phalanx.testing.ranks import run_ranks

__all__ = ["run_ranks"]
