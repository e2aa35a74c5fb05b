"""The pytest plugin: marks, fixtures, and what is reported of a world."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from plugin_runs import run, run_apart, summary

pytest_plugins = ["pytester"]


class TestBodies:
    def test_run_once_per_rank(self, pytester):
        result = run(
            pytester,
            """
seen = []

@pytest.fixture
def tensor():
    seen.append("fixture")
    return torch.ones(2)

@pytest.mark.world(3)
def test_sum(rank, world, tensor):
    seen.append(rank)
    x = tensor * rank
    dist.all_reduce(x)
    assert x.tolist() == [3, 3]
    assert (world.rank, world.size, world.ranks) == (rank, 3, "threads")
    assert world.group is dist.group.WORLD

def test_before():
    assert seen[0] == "fixture" and sorted(seen[1:]) == [0, 1, 2]
""",
            "--strict-markers",
        )
        result.assert_outcomes(passed=2)

    def test_need_neither_rank_nor_world(self, pytester):
        run(pytester, "@pytest.mark.world(2)\ndef test(): assert dist.get_world_size() == 2"
        ).assert_outcomes(passed=1)  # fmt: skip

    def test_of_classes_and_modules(self, pytester):
        result = run(
            pytester,
            """
pytestmark = pytest.mark.world(2)

def test_of_module(world):
    assert world.size == 2

@pytest.mark.world(3)
class TestClass:
    def setup_method(self):
        self.value = 7

    def test_of_class(self, world):
        assert (world.size, self.value) == (3, 7)

    @pytest.mark.world(1)
    def test_closest(self, world):
        assert world.size == 1
""",
        )
        result.assert_outcomes(passed=3)

    def test_have_the_group_that_the_mark_asks_for(self, pytester):
        result = run(
            pytester,
            """
from phalanx.testing.memory import MemoryBackend

@pytest.mark.world(2, backend=MemoryBackend.name, group_timeout=7)
def test(world):
    assert dist.get_backend() == MemoryBackend.name
    assert world.group.backend.timeout == 7
""",
        )
        result.assert_outcomes(passed=1)

    @pytest.mark.parametrize("rng", [True, False])
    def test_have_random_streams_of_their_own(self, pytester, rng):
        result = run(
            pytester,
            f"""
@pytest.mark.world(2, rng={rng})
def test():
    mine = torch.rand(3)
    both = [torch.empty(3) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both) == {rng}
""",
        )
        result.assert_outcomes(passed=1)

    def test_that_return_something_are_warned_of(self, pytester):
        result = run(pytester, "@pytest.mark.world(2)\ndef test(): return dist.get_rank()")
        result.assert_outcomes(passed=1, warnings=1)
        result.stdout.fnmatch_lines("*PytestReturnNotNoneWarning*returned a value on a rank*")


SIZES = """
@pytest.mark.world([1, 3])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_it(world, letter):
    assert dist.get_world_size() == world.size
"""


class TestSizes:
    def test_make_a_test_of_each(self, pytester):
        result = run(pytester, SIZES, "-v")
        result.assert_outcomes(passed=4)
        for size in (1, 3):
            for letter in "ab":
                result.stdout.fnmatch_lines(f"*::test_it[[]world{size}-{letter}[]] PASSED*")

    def test_can_be_selected(self, pytester):
        run(pytester, SIZES, "-k", "world3-a").assert_outcomes(passed=1, deselected=3)

    def test_are_collected_without_being_run(self, pytester):
        result = run(pytester, SIZES, "--collect-only", "-q")
        result.stdout.fnmatch_lines(["*::test_it[[]world1-a[]]", "*::test_it[[]world3-b[]]"])

    def test_of_a_range(self, pytester):
        run(pytester, "@pytest.mark.world(range(1, 4))\ndef test(rank): pass"
        ).assert_outcomes(passed=3)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("", "one argument is needed*got 0"),
        ("2, 3", "one argument is needed*got 2"),
        ("0", "at least 1*got 0"),
        ("True", "got True"),
        ("'two'", "got 'two'"),
        ("[]", "at least one"),
        ("[2, -1]", "got -1"),
        ("2, size=3", "unknown keyword 'size' (known: ranks, timeout, *"),
        ("2, ranks='fibers'", "'fibers' (known: threads, processes)"),
        ("2, timeout=0", "timeout*got 0"),
        ("2, timeout='1 s'", "timeout*got '1 s'"),
        ("2, group_timeout='1 s'", "group_timeout*got '1 s'"),
        ("2, backend=3", "backend*got 3"),
        ("2, rng='none'", "rng*got 'none'"),
        ("2, torch=1", "torch*got 1"),
        ("2, interleavings=-1", "interleavings*got -1"),
        ("2, interleavings=3, ranks='processes'", "interleavings needs ranks='threads'"),
    ],
)
def test_a_wrong_mark_is_an_error_at_collection(pytester, arguments, fact):
    result = run(pytester, f"@pytest.mark.world({arguments})\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    fact = fact.replace("[", "[[]")
    result.stdout.fnmatch_lines(
        f"*.py::test_it: @pytest.mark.world({arguments.replace('[', '[[]')}): *{fact}*"
    )


class TestRefusals:
    def test_rank_without_the_mark(self, pytester):
        result = run(pytester, "def test_it(rank): pass")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines("*::test_it asks for 'rank'*@pytest.mark.world(4)*")
        result.stdout.no_fnmatch_line("*hidden*")

    def test_fixtures_that_use_the_rank(self, pytester):
        result = run(
            pytester,
            """
@pytest.fixture
def offset(rank):
    return rank + 1

@pytest.mark.world(2)
def test_it(offset): pass
""",
        )
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines([">*return rank + 1", "E*'rank' was used*set up once*"])

    def test_unittest(self, pytester):
        result = run(
            pytester,
            """
import unittest

@pytest.mark.world(2)
class Test(unittest.TestCase):
    def test_it(self): pass
""",
        )
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines("*::test_it is marked with world*unittest.TestCase*")

    def test_async(self, pytester):
        result = run(pytester, "@pytest.mark.world(2)\nasync def test_it(): pass")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines("*::test_it: an async test*asyncio.run*")


def test_own_fixtures_named_as_ours_are_left_alone(pytester):
    result = run(
        pytester,
        """
@pytest.fixture
def rank():
    return "mine"

@pytest.mark.world(2)
def test_marked(rank, world): assert rank == "mine" and world.size == 2

def test_not_marked(rank): assert rank == "mine"

@pytest.mark.world(2)
@pytest.mark.parametrize("world", [5])
def test_parametrised(world): assert world == 5
""",
    )
    result.assert_outcomes(passed=3)


class TestFailures:
    def test_are_reported_once_with_rank_and_rewritten_assertion(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.world(4)
def test_it(rank):
    numbers = [rank, rank + 1]
    if rank == 2:
        assert numbers == [2, 4]
    dist.barrier()
""",
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "rank = 2",
                "    @pytest.mark.world(4)",
                ">*assert numbers == [[]2, 4[]]",
                "E*assert [[]2, 3[]] == [[]2, 4[]]",
                "E*At index 1 diff: 3 != 4",
                "E*raised by rank 2 of 4",
                "test_one.py:9: AssertionError",
            ]
        )
        for noise in ("*PeerFailed*", "*run_threads*", "*in_threads.py*", "*Captured*"):
            result.stdout.no_fnmatch_line(noise)
        assert summary(result)[0].endswith("::test_it - rank 2 of 4: assert [2, 3] == [2, 4]")

    def test_of_others_are_told_briefly(self, pytester):
        result = run(
            pytester,
            """
all_here = threading.Barrier(2)

@pytest.mark.world(2)
def test_it(rank):
    all_here.wait()
    raise ValueError("too large") if rank else KeyError("lost")
""",
        )
        result.assert_outcomes(failed=1)
        text = result.stdout.str()
        told = [
            "also failed: rank 0: KeyError: 'lost'",
            "also failed: rank 1: ValueError: too large",
        ]
        assert sum(line in text for line in told) == 1

    def test_that_the_package_diagnoses_point_at_the_test(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.world(2)
def test_it(rank):
    dist.all_reduce(torch.ones(1 + rank))
""",
        )
        result.stdout.fnmatch_lines(
            [">*dist.all_reduce*", "E*CollectiveMismatch: *", "E*raised by ranks 0, 1 of 2"]
        )
        result.stdout.no_fnmatch_line("*local.py*")
        result.stdout.no_fnmatch_line("*Captured log*")

    def test_in_helpers_show_the_way_there(self, pytester):
        result = run(
            pytester,
            """
def check(x):
    assert x == 0

@pytest.mark.world(2)
def test_it(rank):
    check(rank)
""",
        )
        result.stdout.fnmatch_lines([">*check(rank)", ">*assert x == 0", "E*raised by rank 1 of 2"])

    def test_of_ranks_that_hang_show_where_they_stand(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.world(2, timeout=2)
def test_it(rank):
    while rank == 1:
        threading.Event().wait(0.01)
    dist.barrier()
""",
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["ranks 0, 1 of 2 did not return within 2 s*", "  rank 0:", "*dist.barrier()"]
        )
        result.stdout.no_fnmatch_line("*in_threads.py*")

    def test_before_the_body_are_told_without_frames(self, pytester):
        result = run(pytester, "@pytest.mark.world(2, backend='nonsense')\ndef test(): pass")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines("*nonsense*")
        result.stdout.no_fnmatch_line("*threads.py*")

    def test_all_frames_on_request(self, pytester):
        source = "@pytest.mark.world(2)\ndef test(): assert 0"
        run(pytester, source, "--full-trace").stdout.fnmatch_lines("*threads.py*")

    def test_sys_exit(self, pytester):
        result = run(pytester, "@pytest.mark.world(2)\ndef test(rank): sys.exit(3)")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([">*sys.exit(3)", "E*SystemExit: 3"])

    def test_first_one_stops_the_run(self, pytester):
        result = run(pytester, "@pytest.mark.world([2, 3])\ndef test(rank): assert rank != 1", "-x")
        result.assert_outcomes(failed=1)


OUTCOMES = {
    "skipped": "if rank == 1: pytest.skip('no luck')\n    dist.barrier()",
    "xfailed": "if rank == 1: pytest.xfail('known')\n    dist.barrier()",
    "failed": "if rank == 1: pytest.fail('told so')\n    dist.barrier()",
    "passed": "with pytest.raises(ZeroDivisionError): 1 / 0",
}


class TestOutcomes:
    @pytest.mark.parametrize("outcome", OUTCOMES)
    def test_of_bodies(self, pytester, outcome):
        source = f"@pytest.mark.world(3)\ndef test_it(rank):\n    {OUTCOMES[outcome]}"
        run(pytester, source).assert_outcomes(**{outcome: 1})

    def test_a_skip_says_where_and_why(self, pytester):
        source = f"@pytest.mark.world(3)\ndef test_it(rank):\n    {OUTCOMES['skipped']}"
        result = run(pytester, source, "-rs")
        assert summary(result)[0].startswith("SKIPPED [1] test_one.py:6: no luck")

    def test_importorskip(self, pytester):
        source = "@pytest.mark.world(2)\ndef test(): pytest.importorskip('no_such_module_here')"
        run(pytester, source).assert_outcomes(skipped=1)

    def test_a_failure_counts_more_than_a_skip(self, pytester):
        result = run(
            pytester,
            """
skipped = threading.Event()

@pytest.mark.world(2)
def test_it(rank):
    if rank == 1:
        try:
            pytest.skip("no luck")
        finally:
            skipped.set()
    skipped.wait()
    assert rank == 1
""",
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines("E*raised by rank 0 of 2")
        result.stdout.no_fnmatch_line("*no luck")

    def test_marks_of_pytest(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.xfail(raises=ValueError, strict=True)
@pytest.mark.world(2)
def test_xfail(rank):
    raise ValueError

@pytest.mark.skipif(True, reason="not now")
@pytest.mark.world(2)
def test_skip(rank):
    assert False
""",
        )
        result.assert_outcomes(xfailed=1, skipped=1)

    def test_exit_ends_the_run(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.world(2)
def test_it(rank):
    if rank == 1:
        pytest.exit("enough", returncode=7)
    dist.barrier()

def test_next(): pass
""",
        )
        assert result.ret == 7
        result.stdout.fnmatch_lines("*enough*")
        result.assert_outcomes()


def test_the_mark_and_the_fixtures_are_described(pytester):
    run(pytester, "", "--markers").stdout.fnmatch_lines("@pytest.mark.world(size, *")
    run(pytester, "", "--fixtures").stdout.fnmatch_lines(["rank [[]session scope[]]*", "world *"])


def test_the_plugin_can_be_left_out(pytester):
    pytester.makepyfile("import pytest\ndef test_it(rank): pass")
    result = pytester.runpytest_inprocess("-p", "no:phalanx")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*fixture 'rank' not found")


def test_the_plugin_does_not_import_torch():
    code = "import sys, phalanx.testing.plugin; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_an_interrupt_ends_all_ranks(pytester, monkeypatch):
    result = run_apart(
        pytester,
        monkeypatch,
        """
import os, signal

all_here = threading.Barrier(3)

@pytest.mark.world(3)
def test_it(rank):
    try:
        all_here.wait()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            threading.Event().wait(0.001)
    finally:
        os.write(2, b"ended %d;" % rank)
""",
        "-s",
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert sorted(re.findall(r"ended \d", result.stderr.str())) == ["ended 0", "ended 1", "ended 2"]
    result.stdout.fnmatch_lines("*KeyboardInterrupt*")


def test_with_other_plugins(pytester, monkeypatch):
    """xdist, and pytest-timeout's limit, which comes before the world's."""
    result = run_apart(
        pytester,
        monkeypatch,
        """
@pytest.mark.world([1, 2, 3])
def test_fine(world): dist.barrier()

@pytest.mark.timeout(1)
@pytest.mark.world(2)
def test_slow(rank):
    while rank == 0:
        threading.Event().wait(0.01)
    dist.barrier()

@pytest.mark.world(2)
def test_wrong(rank):
    assert rank == 0
""",
        "-n",
        "2",
    )
    result.assert_outcomes(passed=3, failed=2)
    told = "\n".join(summary(result))
    assert "test_slow - Failed: Timeout" in told
    assert "test_wrong - rank 1 of 2: assert 1 == 0" in told
