"""How short and how plain the report of a failure is."""

from __future__ import annotations

from plugin_runs import run, summary

pytest_plugins = ["pytester"]


def test_tracebacks_end_in_the_program(pytester):
    source = """
import torch.distributed

@pytest.mark.world(2)
def test_faults(rank, world):
    with world.faults(kill=7, at="all_reduce#1"):
        pass

@pytest.mark.world(2, torch=True)
def test_torch(rank):
    if rank:
        torch.distributed.barrier()
    torch.distributed.all_reduce(torch.ones(1))
"""
    result = run(pytester, source)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["E*no rank 7*", "test_one.py:*", "E*does not match across ranks"])
    for file in ("injection", "contextlib", "distributed_c10d"):
        result.stdout.no_fnmatch_line(f"*{file}.py:*")
    whole = run(pytester, source, "--full-trace", "-k", "test_faults")
    whole.stdout.fnmatch_lines("*injection.py:*")


def test_the_summary_spends_no_room_on_the_package(pytester):
    result = run(
        pytester, "@pytest.mark.world(2)\ndef test(rank): dist.recv(torch.ones(1), 1 - rank)"
    )
    assert summary(result)[0].startswith("FAILED test_one.py::test - ranks 0, 1 of 2: Deadlock")


def test_a_missing_mark_is_hinted_at(pytester):
    result = run(
        pytester,
        """
import torch.distributed

@pytest.mark.world(2)
def test_torch():
    torch.distributed.barrier()

def test_plain():
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["E*@pytest.mark.world(2, torch=True)", "E*@pytest.mark.world(4)"])


def test_a_warning_of_a_result_is_placed_in_the_test(pytester):
    result = run(pytester, "@pytest.mark.world(2)\ndef test(): return 5")
    result.stdout.fnmatch_lines("*test_one.py:4: PytestReturnNotNoneWarning*")


def test_ranks_take_turns_to_ask_for_fixtures(pytester):
    result = run(
        pytester,
        """
made = []

@pytest.fixture
def slow():
    made.append(1)
    threading.Event().wait(0.05)
    return made

@pytest.mark.world(4)
def test(request):
    assert request.getfixturevalue("slow") == [1]
""",
    )
    result.assert_outcomes(passed=1)


def test_who_comes_after_a_timeout_has_not_failed_too(pytester):
    result = run(
        pytester,
        """
late = threading.Event()

@pytest.mark.world(2, group_timeout=2)
def test(rank):
    if rank == 1:
        late.wait()
    try:
        dist.barrier()
    finally:
        late.set()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*raised by rank 0 of 2", "E*world(2, group_timeout=...)"])
    result.stdout.no_fnmatch_line("*also failed*")
