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
