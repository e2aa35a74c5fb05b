"""Tests of Hypothesis on ranks."""

from __future__ import annotations

# Imported here, so that runs within this process find it and do not import it anew.
import hypothesis  # noqa: F401
from plugin_runs import run

pytest_plugins = ["pytester"]

HEAD = """
from hypothesis import HealthCheck, assume, given, settings, strategies
from hypothesis.strategies import integers

settings.register_profile("quick", deadline=None, max_examples=20, database=None)
settings.load_profile("quick")
"""


def test_all_ranks_get_the_same_examples(pytester):
    result = run(
        pytester,
        HEAD
        + """
drawn = []

@pytest.mark.world([1, 3])
@given(n=integers(0, 9))
def test_it(rank, world, n):
    x = torch.full((n,), rank)
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(world.size))] * n
    if rank == 0:
        drawn.append(n)

class TestClass:
    @pytest.mark.world(2)
    @given(n=integers(0, 9))
    def test_method(self, n, rank):
        both = [None, None]
        dist.all_gather_object(both, n)
        assert both == [n, n]

def test_several_were_drawn():
    assert len(set(drawn)) > 3
""",
    )
    result.assert_outcomes(passed=4)


def test_a_failure_is_reported_with_example_and_rank(pytester):
    result = run(
        pytester,
        HEAD
        + """
@pytest.mark.world(2)
@given(n=integers(0, 5000))
def test_it(rank, n):
    print("n is", n)
    dist.barrier()
    assert n < 100 or rank == 0
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [">*assert n < 100*", "E*raised by rank 1 of 2", "E*n=100,", "*(rank 0)*", "n is 100"]
    )
    assert result.stdout.str().count("n is") == 3  # in the source, and by each rank


def test_assume_works_in_bodies(pytester):
    result = run(
        pytester,
        HEAD
        + """
@pytest.mark.world(2)
@given(n=integers(0, 50))
def test_it(n):
    assume(n % 2)
    assert n % 2 == 1
""",
        "-W",
        "error::hypothesis.errors.HypothesisDeprecationWarning",
    )
    result.assert_outcomes(passed=1)


def test_processes_are_refused(pytester):
    result = run(
        pytester,
        HEAD
        + """
@pytest.mark.world(2, ranks="processes")
@given(n=integers(0, 50))
def test_it(n): pass
""",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*::test_it: Hypothesis would draw other examples*")
