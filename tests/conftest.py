"""Worlds for the tests of the public functions."""

from functools import partial

import pytest

from phalanx.testing import memory
from phalanx.testing.ranks import run_ranks


@pytest.fixture(params=[memory.MemoryBackend.name, "phalanx"])
def run(request):
    """Run a function on thread ranks: ``run(fn, size, *args)``; return results by rank."""
    return partial(run_ranks, backend=request.param)
