"""Which mark holds for a test, and what marks are refused."""

from __future__ import annotations

from plugin_runs import run

pytest_plugins = ["pytester"]


def test_a_subclass_chooses_another_world(pytester):
    result = run(
        pytester,
        """
@pytest.mark.world(2)
class TestBase:
    size = 2

    def test_size(self, world):
        assert world.size == self.size

@pytest.mark.world(3)
class TestMore(TestBase):
    size = 3

class TestSame(TestMore):
    pass
""",
    )
    result.assert_outcomes(passed=3)


def test_two_marks_on_a_function_are_refused(pytester):
    result = run(
        pytester,
        """
@pytest.mark.world(2)
@pytest.mark.world(3)
def test_it(world): pass
""",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*::test_it has 2 marks `world`*world([[]2, 3])*")


def test_the_size_can_be_named(pytester):
    result = run(pytester, "@pytest.mark.world(size=2)\ndef test(world): assert world.size == 2")
    result.assert_outcomes(passed=1)


def test_a_wrong_mark_is_told_of_once(pytester):
    result = run(pytester, "@pytest.mark.world(0)\ndef test(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.no_fnmatch_line("*another exception*")


def test_a_test_that_cannot_run_on_ranks_leaves_the_others(pytester):
    result = run(
        pytester,
        """
import hypothesis

@pytest.mark.world(2)
async def test_async(): pass

@pytest.mark.world(2, ranks="processes")
@hypothesis.given(hypothesis.strategies.integers())
def test_drawn(number): pass

@pytest.mark.world(2)
def test_plain(): pass
""",
    )
    result.assert_outcomes(errors=2, passed=1)
    result.stdout.fnmatch_lines(["*an async test cannot*", "*Hypothesis would draw*"])
