"""Worlds for the tests of the public functions."""

from functools import partial

import pytest

from phalanx.testing import memory
from phalanx.testing.ranks import run_ranks


@pytest.fixture(params=[memory.MemoryBackend.name, "phalanx"])
def run(request):
    """Run a function on thread ranks: ``run(fn, size, *args)``; return results by rank."""
    return partial(run_ranks, backend=request.param)


@pytest.fixture
def program(tmp_path):
    """Write a program to a file: ``program(source)`` returns its path."""

    def write(source):
        path = tmp_path / "program.py"
        path.write_text(source)
        return path

    return write
