"""pdb in tests that run on ranks."""

from __future__ import annotations

import io
import re
import threading

import pytest
from plugin_runs import HEAD, OPTIONS, PLUGIN

pytest_plugins = ["pytester"]

STOPS = """
@pytest.mark.world(2, timeout=2)
def test_it(rank):
    value = 40 + rank
    print("said by", rank)
    dist.barrier()
    if rank in {ranks}:
        breakpoint()
    dist.barrier()
    value += 100
    print("later", rank)
"""


class Typist(io.StringIO):
    """Standard input from somebody who thinks longer than any timeout of the tests, and types."""

    def readline(self, *args):
        if self.tell() == 0:
            threading.Event().wait(2.5)
        return super().readline(*args)


class Session:
    """A run of pytest, in this process, at whose prompts commands are typed."""

    def __init__(self, pytester, source, commands, *arguments):
        pytester.makepyfile(test_one=HEAD + source)
        with pytest.MonkeyPatch.context() as patch:
            screen = io.StringIO()
            patch.setattr("sys.stdin", Typist("\n".join(commands) + "\n"))
            patch.setattr("sys.stdout", screen)
            options = [*PLUGIN, *OPTIONS, "--capture=sys", *arguments]
            self.record = pytester.inline_run(*options, no_reraise_ctrlc=True)
        self.screen = screen.getvalue()
        self.lines = pytest.LineMatcher(self.screen.splitlines())
        self.answers = re.findall(r"^\((rank \d|Pdb)\) (.*)$", self.screen, re.MULTILINE)

    def assert_passed(self):
        print(self.screen)
        self.record.assertoutcome(passed=1)


def test_breakpoint_stops_one_rank_and_no_time_runs_out(pytester):
    commands = ["p value", "n", "n", "p value", "c"]
    result = Session(pytester, STOPS.replace("{ranks}", "(1,)"), commands, "-rP")
    result.assert_passed()
    assert ("rank 1", "41") in result.answers
    assert ("rank 1", "141") in result.answers
    # What the others print is captured all the while.
    result.lines.fnmatch_lines(["*Captured stdout call (rank 0)*", "said by 0", "later 0"])
    result.lines.fnmatch_lines(["*Captured stdout call (rank 1)*", "said by 1", "later 1"])


def test_ranks_come_to_the_prompt_one_after_the_other(pytester):
    commands = ["p value", "c", "p value", "c"]
    result = Session(pytester, STOPS.replace("{ranks}", "(0, 1)"), commands)
    result.assert_passed()
    answers = [entry for entry in result.answers if entry[1].isdigit()]
    assert sorted(answers) == [("rank 0", "40"), ("rank 1", "41")]


def test_a_step_that_waits_for_others_lets_them_come_to_the_prompt(pytester):
    commands = ["n", "n", "c", "c"]
    result = Session(pytester, STOPS.replace("{ranks}", "(0, 1)"), commands)
    result.assert_passed()
    assert {who for who, _ in result.answers} == {"rank 0", "rank 1"}


def test_quitting_ends_the_run(pytester):
    result = Session(pytester, STOPS.replace("{ranks}", "(0, 1)"), ["q"])
    result.lines.fnmatch_lines("*Quitting debugger*")
    assert len(result.answers) == 1


def test_post_mortem_is_in_the_frame_of_the_rank(pytester):
    source = """
@pytest.mark.world(3)
def test_it(rank):
    value = 40 + rank
    if rank == 2:
        assert value == 0
    dist.barrier()
"""
    result = Session(pytester, source, ["p value", "q"], "--pdb")
    assert ("Pdb", "42") in result.answers
    result.lines.fnmatch_lines("E*raised by rank 2 of 3")


def test_post_mortem_of_a_mismatch_is_in_the_test(pytester):
    source = """
@pytest.mark.world(2)
def test_it(rank):
    value = 40
    dist.all_reduce(torch.ones(1 + rank))
"""
    result = Session(pytester, source, ["p value", "q"], "--pdb")
    assert ("Pdb", "40") in result.answers


def test_trace_follows_rank_0(pytester):
    commands = ["n", "p value", "c"]
    result = Session(pytester, STOPS.replace("{ranks}", "()"), commands, "--trace")
    result.assert_passed()
    assert ("rank 0", "40") in result.answers


@pytest.mark.parametrize("call", ["pdb.set_trace()", "pytest.set_trace()"])
def test_set_trace(pytester, call):
    source = STOPS.replace("{ranks}", "(1,)").replace("breakpoint()", call)
    result = Session(pytester, "import pdb\n" + source, ["p value", "c"])
    result.assert_passed()
    assert ("rank 1", "41") in result.answers


def test_the_breakpoint_of_all_ranks(pytester):
    source = """
@pytest.mark.world(2, timeout=2)
def test_it(rank):
    value = 40 + rank
    dist.breakpoint(1)
    print("later")
"""
    result = Session(pytester, source, ["p value", "c"])
    result.assert_passed()
    assert ("rank 1", "41") in result.answers
