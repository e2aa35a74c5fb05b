"""Worlds for the tests of the public functions."""

import signal
from functools import partial

import pytest
import pytest_timeout
import torch
from _pytest.pytester import SysModulesSnapshot

from phalanx.testing import memory
from phalanx.testing.ranks import run_ranks

# Tests of whole programs, and on hosts: `make test-slow`.
SLOW = frozenset(
    {
        "test_bench",
        "test_benchmarks",
        "test_broken_examples",
        "test_demo",
        "test_doctor_hosts",
        "test_engine_mpi",
        "test_example",
        "test_hierarchy_hosts",
        "test_hosts",
        "test_plugin_processes",
        "test_pytorch_suite",
        "test_reach",
        "test_reach_launchers",
        "test_scale",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _same_number_of_threads():
    """Leave torch's number of threads, on which the last bits of sums depend, to the next test.

    A rank's `torch.set_num_threads` holds for threads that come later, not for this one.
    """
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


@pytest.fixture
def pytester(pytester, monkeypatch):
    """Runs of pytest that print the same everywhere, and stop no clock but their own."""
    for name in ("CI", "BUILD_NUMBER"):  # with these, whole messages are in the short summary
        monkeypatch.delenv(name, raising=False)
    yield pytester
    pytest_timeout.SUPPRESS_TIMEOUT = False  # a debugger in this process has ended all timeouts


def _keep_libraries() -> None:
    """Have pytester forget its own test files after a run, and no library: none bears a copy."""
    take = SysModulesSnapshot.__init__

    def take_kindly(self: SysModulesSnapshot, preserve: object = None) -> None:
        take(self, lambda name: not name.startswith(("test_", "conftest")))

    SysModulesSnapshot.__init__ = take_kindly  # type: ignore[method-assign]


_keep_libraries()


def _take_signals() -> None:
    """Let signals end what tests start, also where a shell or nohup has had them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


_take_signals()
