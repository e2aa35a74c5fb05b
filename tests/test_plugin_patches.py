"""Tests that are decorated with patches of unittest.mock."""

from __future__ import annotations

from plugin_runs import run

pytest_plugins = ["pytester"]

HEAD = """
from unittest import mock
import functools

K, TABLE = 1, {}

def look():
    return K
"""


def test_patches_are_made_once_around_all_ranks(pytester):
    result = run(
        pytester,
        HEAD
        + """
@pytest.mark.world(3)
@mock.patch(f"{__name__}.look", return_value=7)
def test_function(looked, rank):
    assert look() == 7
    dist.barrier()
    assert looked.call_count == 3

class TestMethods:
    @pytest.mark.world(2, interleavings=3)
    @mock.patch.dict(TABLE, a=1)
    @mock.patch(f"{__name__}.look")
    @mock.patch(f"{__name__}.K", 7)
    def test_method(self, looked, rank, tmp_path):
        look()
        dist.barrier()
        assert (K, TABLE, looked.call_count) == (7, {"a": 1}, 2)

def test_nothing_is_left():
    assert (look(), K, TABLE) == (1, 1, {})
""",
    )
    result.assert_outcomes(passed=3)


def test_a_patch_below_another_decorator_is_refused(pytester):
    result = run(
        pytester,
        HEAD
        + """
def timed(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

@pytest.mark.world(2)
@timed
@mock.patch(f"{__name__}.look")
def test(looked, rank):
    pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("mock.patch is below another decorator (*inner)*")
