"""For testing programs that run on several ranks, and stores and backends of your own."""

from phalanx.testing.backend_kit import check_backend
from phalanx.testing.injection import faults
from phalanx.testing.interleavings import explore, schedule
from phalanx.testing.ranks import run_ranks
from phalanx.testing.store_kit import check_store

__all__ = ["check_backend", "check_store", "explore", "faults", "run_ranks", "schedule"]
