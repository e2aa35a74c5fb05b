"""What is told of a process that dies in the body of a test."""

from __future__ import annotations

from plugin_runs import run_apart

pytest_plugins = ["pytester"]


def test_a_crash_says_where_it_happened_and_who_noticed(pytester, monkeypatch):
    result = run_apart(
        pytester,
        monkeypatch,
        """
import ctypes

@pytest.mark.world(2, ranks="processes")
def test(rank):
    if rank == 1:
        ctypes.string_at(0)
    dist.barrier()
""",
        "--pdb",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 was killed by SIGSEGV",
            "seen by rank 0: barrier #1 *",
            "* Captured stderr call (rank 1) *",
            "Fatal Python error: Segmentation fault",
            "*test_one.py*, line 10 in test",
        ]
    )
    result.stdout.no_fnmatch_line("*rank_process.py*")
    result.stdout.no_fnmatch_line("*_hookexec*")
    result.stdout.no_fnmatch_line("*(Pdb)*")


def test_fixtures_of_the_main_process_are_refused_with_the_reason(pytester, monkeypatch):
    names = ["caplog", "recwarn", "subtests", "record_property", "request", "pytestconfig"]
    source = "pytestmark = pytest.mark.world(1, ranks='processes')\n"
    result = run_apart(
        pytester,
        monkeypatch,
        source + "".join(f"def test_{name}({name}): pass\n" for name in names),
    )
    result.assert_outcomes(failed=len(names))
    for name in names:
        result.stdout.fnmatch_lines(
            [f"the fixture '{name}' * in the main process", "*monkeypatch*"]
        )
    result.stdout.no_fnmatch_line("*in the body*")


def test_an_interrupt_shows_where_ranks_were(pytester, monkeypatch):
    result = run_apart(
        pytester,
        monkeypatch,
        """
import os, signal, time

@pytest.mark.world(2, ranks="processes")
def test(rank):
    dist.barrier()
    if rank == 1:
        os.kill(int(os.environ["MAIN"]), signal.SIGINT)
    time.sleep(600)

@pytest.fixture(autouse=True)
def main(monkeypatch):
    monkeypatch.setenv("MAIN", str(os.getpid()))
""",
    )
    for rank in range(2):
        result.stdout.fnmatch_lines([f"rank {rank} of 2 was here:", "*line 12 in test*"])
    result.stdout.fnmatch_lines("*KeyboardInterrupt*")
