"""For tests that need several hosts: a mark that skips them where hosts cannot be made."""

import pytest

from phalanx.testing.hosts import Hosts

needs_hosts = pytest.mark.skipif(
    Hosts.unavailable() != "", reason=Hosts.unavailable() or "hosts can be made"
)
