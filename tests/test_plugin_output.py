"""What ranks print and log in a test: kept apart, and where tests find it."""

from __future__ import annotations

import pytest
from plugin_runs import run

pytest_plugins = ["pytester"]

TALKS = """
import logging

@pytest.mark.world(3)
def test_it(rank):
    for i in range(20):
        for piece in (f"out {rank}", " ", str(i), chr(10)):
            sys.stdout.write(piece)
    print(f"err {rank}", file=sys.stderr)
    logging.getLogger("mine").warning("log %d", rank)
    dist.barrier()
    assert not {fails}
"""


def sections(result):
    """Return the sections of captured output by their titles."""
    found, title = {}, None
    for line in result.outlines:
        if line.startswith("--") and "Captured" in line:
            title = line.strip("- ")
            found[title] = []
        elif line.startswith(("__", "==")):
            title = None
        elif title:
            found[title].append(line)
    return found


class TestSections:
    def test_each_rank_has_its_own(self, pytester):
        found = sections(run(pytester, TALKS.replace("{fails}", "True")))
        assert sorted(found) == [
            f"Captured {name} call (rank {rank})"
            for name in ("log", "stderr", "stdout")
            for rank in range(3)
        ]
        for rank in range(3):
            out = found[f"Captured stdout call (rank {rank})"]
            assert out == [f"out {rank} {i}" for i in range(20)]
            assert found[f"Captured stderr call (rank {rank})"] == [f"err {rank}"]
            [line] = found[f"Captured log call (rank {rank})"]
            assert line.endswith(f"log {rank}")

    def test_of_tests_that_pass(self, pytester):
        found = sections(run(pytester, TALKS.replace("{fails}", "False"), "-rP"))
        assert "Captured stdout call (rank 2)" in found

    def test_some_can_be_left_out(self, pytester):
        found = sections(run(pytester, TALKS.replace("{fails}", "True"), "--show-capture=stderr"))
        assert sorted(found) == [f"Captured stderr call (rank {rank})" for rank in range(3)]

    def test_fixtures_and_bodies_are_told_apart(self, pytester):
        result = run(
            pytester,
            """
@pytest.fixture
def talks():
    print("before")
    yield
    print("after")

@pytest.mark.world(1)
def test_it(talks):
    print("within")
    assert 0
""",
        )
        assert sections(result) == {
            "Captured stdout setup": ["before"],
            "Captured stdout call (rank 0)": ["within"],
            "Captured stdout teardown": ["after"],
        }

    def test_without_the_logging_plugin(self, pytester):
        found = sections(run(pytester, TALKS.replace("{fails}", "True"), "-p", "no:logging"))
        assert "Captured stdout call (rank 0)" in found
        assert not any("log" in title for title in found)


@pytest.mark.parametrize("option", ["-s", "--capture=tee-sys"])
def test_lines_are_labelled_where_nothing_is_captured(pytester, option):
    result = run(pytester, TALKS.replace("{fails}", "False"), option)
    result.assert_outcomes(passed=1)
    # The first follows the name of the file, which pytest has printed.
    lines = [line.removeprefix("test_one.py ") for line in result.outlines]
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] out {rank} {i}" for i in range(20)]
    result.stderr.fnmatch_lines("[[]rank 1[]] err 1")


class TestFixtures:
    @pytest.mark.parametrize("option", ["--capture=fd", "-s"])
    def test_capsys_reads_what_the_rank_has_written(self, pytester, option):
        result = run(
            pytester,
            """
@pytest.mark.world(3)
def test_it(rank, capsys):
    print("mine", rank)
    dist.barrier()
    print("trouble", rank, file=sys.stderr)
    assert capsys.readouterr() == (f"mine {rank}\\n", f"trouble {rank}\\n")
    assert capsys.readouterr().out == ""
""",
            option,
        )
        result.assert_outcomes(passed=1)

    def test_capsysbinary_reads_bytes(self, pytester):
        result = run(
            pytester,
            """
@pytest.mark.world(2)
def test_it(rank, capsysbinary):
    sys.stdout.buffer.write(b"%d" % rank)
    assert capsysbinary.readouterr().out == b"%d" % rank
""",
        )
        result.assert_outcomes(passed=1)

    def test_capsys_can_be_disabled_by_some_ranks(self, pytester):
        result = run(
            pytester,
            """
from contextlib import nullcontext

@pytest.mark.world(3)
def test_it(rank, capsys):
    with capsys.disabled() if rank else nullcontext():
        dist.barrier()
        print("first", rank)
        dist.barrier()
    print("then", rank)
    expected = f"then {rank}\\n" if rank else "first 0\\nthen 0\\n"
    assert capsys.readouterr().out == expected
""",
        )
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines_random(["*first 1", "*first 2"])
        result.stdout.no_fnmatch_line("*first 0")

    @pytest.mark.parametrize("fixture", ["capfd", "wraps"])
    def test_others_read_the_lines_of_all(self, pytester, fixture):
        result = run(
            pytester,
            f"""
@pytest.fixture
def wraps(capsys):
    return capsys

@pytest.mark.world(3)
def test_it(rank, {fixture}):
    for piece in ("line ", str(rank), chr(10)):
        sys.stdout.write(piece)
    dist.barrier()
    if rank == 0:
        read = {fixture}.readouterr().out
        assert sorted(read.splitlines()) == ["line 0", "line 1", "line 2"]
""",
        )
        result.assert_outcomes(passed=1)

    def test_caplog_has_the_records_of_all(self, pytester):
        result = run(
            pytester,
            """
import logging

@pytest.mark.world(3)
def test_it(rank, caplog):
    logging.getLogger("mine").warning("from %d", rank)
    dist.barrier()
    assert sorted(caplog.messages) == ["from 0", "from 1", "from 2"]
""",
        )
        result.assert_outcomes(passed=1)
