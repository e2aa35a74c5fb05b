"""How short and how plain the report of a failure is."""

from __future__ import annotations

from plugin_runs import run

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
