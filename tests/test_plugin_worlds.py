"""Marks that ask for more than a world: torch's programs, orders."""

from __future__ import annotations

import re

from plugin_runs import run, summary

# Imported here, so that runs within this process find them and do not import them anew.
from phalanx.testing import explore, torch_world  # noqa: F401

pytest_plugins = ["pytester"]


class TestTorch:
    def test_bodies_call_torch_distributed(self, pytester):
        result = run(
            pytester,
            """
import torch.distributed

@pytest.mark.world([1, 3], torch=True)
def test_it(rank, world):
    x = torch.full((2,), float(rank))
    torch.distributed.all_reduce(x)
    assert x.tolist() == [sum(range(world.size))] * 2
    assert torch.distributed.get_rank() == rank
""",
        )
        result.assert_outcomes(passed=2)

    def test_failures_have_their_rank(self, pytester):
        result = run(
            pytester,
            """
import torch.distributed

@pytest.mark.world(3, torch=True)
def test_it(rank):
    print("said by", rank)
    assert rank != 2
    torch.distributed.barrier()
""",
        )
        result.assert_outcomes(failed=1)
        assert summary(result) == ["FAILED test_one.py::test_it - rank 2 of 3: assert 2 != 2"]
        result.stdout.fnmatch_lines(["*Captured stdout call (rank 1)*", "said by 1"])
        result.stdout.no_fnmatch_line("*Captured log*")


RACE = """
@pytest.mark.world(2, interleavings=40)
def test_it(rank):
    x = torch.full((1,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    print("said by", rank)
    assert x.item() == 1  # too early
    work.wait()
"""


class TestInterleavings:
    def test_an_order_that_fails_is_found_and_replayed(self, pytester):
        result = run(pytester, RACE)
        result.assert_outcomes(failed=1)
        text = result.stdout.str()
        assert text.count("said by 0") == 1  # on the run that failed
        [command] = re.findall(r"pytest (--world-seed=\d+) test_one.py::test_it", text)
        again = run(pytester, RACE, command)
        again.assert_outcomes(failed=1)
        assert command in again.stdout.str()

    def test_a_body_that_is_right_in_all(self, pytester):
        source = RACE.replace("    assert", "    work.wait()\n    assert")
        run(pytester, source).assert_outcomes(passed=1)

    def test_of_torch_distributed(self, pytester):
        torch = RACE.replace("dist.", "torch.distributed.").replace("=40", "=40, torch=True")
        result = run(pytester, "import torch.distributed\n" + torch)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines("E*to run it again: pytest --world-seed=*")
