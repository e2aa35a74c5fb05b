"""The pytest plugin on ranks that are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from plugin_runs import HEAD, OPTIONS, PLUGIN, run, run_apart, summary

import phalanx

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _found_from_everywhere(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(phalanx.__file__).parents[1]), os.pathsep)


def test_bodies_run_in_warm_processes(pytester):
    """What they get, and that it is theirs."""
    result = run(
        pytester,
        """
import os, pathlib, random

class Point:
    def __init__(self, x):
        self.x = x

@pytest.fixture
def point():
    return Point(7)

@pytest.fixture
def here(tmp_path_factory):
    return tmp_path_factory.getbasetemp()

in_processes = pytest.mark.world(2, ranks="processes")

@in_processes
def test_first(rank, world, point, here):
    (here / f"pid{rank}").write_text(str(os.getpid()))
    assert (world.rank, world.size, world.ranks) == (rank, 2, "processes")
    assert world.group is dist.group.WORLD
    assert type(point) is Point and point.x == 7
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    assert tensor.item() == 1
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT"] = "behind"

@in_processes
@pytest.mark.parametrize("value", [1, torch.ones(2), None], ids=repr)
def test_again(rank, here, value):
    assert (here / f"pid{rank}").read_text() == str(os.getpid())
    assert torch.get_default_dtype() is torch.float32
    assert "LEFT" not in os.environ

@pytest.mark.world([1, 3], ranks="processes")
def test_sizes(world):
    assert dist.get_world_size() == world.size

class TestClass:
    limit = 3

    def setup_method(self):
        self.value = [5]

    @in_processes
    def test_method(self, rank):
        self.value.append(rank)
        assert self.value == [5, rank] and self.limit == 3

class TestOuter:
    class TestInner:
        @in_processes
        def test_inner(self): pass

@in_processes
def test_own_monkeypatch(monkeypatch, rank):
    monkeypatch.setattr(os, "sep", rank)
    monkeypatch.setenv("PATCHED", "yes")
    assert os.sep == rank

@in_processes
def test_patched_no_more():
    assert os.sep == "/" and "PATCHED" not in os.environ

@in_processes
def test_own_output(capfd, rank):
    print("out", rank)
    os.write(2, b"err")
    assert capfd.readouterr() == (f"out {rank}\\n", "err")
    assert capfd.readouterr() == ("", "")

@pytest.fixture
def from_main(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_MAIN", "yes")
    monkeypatch.chdir(tmp_path)

@in_processes
def test_surroundings(from_main, tmp_path):
    assert os.environ["FROM_MAIN"] == "yes" and pathlib.Path.cwd() == tmp_path

@pytest.fixture
def seeds():
    torch.manual_seed(3)
    random.seed(4)

@pytest.mark.world(2)
def test_draw_in_threads(seeds, rank, here):
    (here / f"threads{rank}").write_text(str(torch.rand(3).tolist()))

@in_processes
def test_draw_in_processes(seeds, rank, here):
    assert (here / f"threads{rank}").read_text() == str(torch.rand(3).tolist())
    assert random.random() == random.Random(4).random()

def test_nobody_else_was_here(here):
    pids = [int((here / f"pid{rank}").read_text()) for rank in range(2)]
    assert os.getpid() not in pids
""",
        f"--basetemp={pytester.path / 'base'}",
    )
    result.assert_outcomes(passed=15)
    for rank in range(2):
        pid = int((pytester.path / "base" / f"pid{rank}").read_text())
        assert not Path(f"/proc/{pid}").exists()  # the pool ends with the session


def test_failures_are_told_as_pytest_tells_them(pytester):
    result = run(
        pytester,
        """
import logging, os, signal, time
pytestmark = pytest.mark.world(3, ranks="processes")

def helper(value):
    __tracebackhide__ = True
    raise ValueError(f"bad {value}")

class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

def test_assertion(rank):
    print("said by", rank)
    os.write(2, b"written by %d\\n" % rank)
    logging.getLogger("mine").warning("logged by %d", rank)
    x = [rank, 2]
    if rank == 1:
        assert x == [1, 3]
    dist.barrier()

def test_chained(rank):
    if rank == 2:
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("outer") from error
    dist.barrier()

def test_hidden(rank):
    helper(5)

def test_unpicklable(rank):
    raise Unpicklable("this", "that")

def test_killed(rank):
    print("last words")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_exits_hard(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()

def test_exits(rank):
    raise SystemExit(4)

@pytest.mark.world(2, ranks="processes", timeout=3)
def test_hangs(rank):
    if rank == 1:
        time.sleep(100)

def test_skips(rank):
    if rank == 2:
        pytest.skip("not for two")
    dist.barrier()

def test_expects(rank):
    pytest.xfail("known")

def test_fails(rank):
    pytest.fail("as asked", pytrace=False)

@pytest.fixture
def lock():
    import threading
    return threading.Lock()

def test_fixture(lock):
    pass

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_marked(rank):
    1 / 0

def test_after_all(rank):
    dist.barrier()
""",
        "-rA",
    )
    result.assert_outcomes(passed=1, failed=10, skipped=1, xfailed=2)
    result.stdout.fnmatch_lines_random(
        [
            ">           assert x == [[]1, 3[]]",
            "E           assert [[]1, 2[]] == [[]1, 3[]]",
            "E             At index 1 diff: 2 != 3",
            "E           raised by rank 1 of 3",
            "test_one.py:*: AssertionError",
            "*Captured stdout call (rank 2)*",
            "said by 2",
            "*Captured stderr call (rank 0)*",
            "written by 0",
            "*Captured log call (rank 1)*",
            "WARNING  mine:test_one.py:* logged by 1",
            '> *{}[[]"key"[]]',
            "The above exception was the direct cause of the following exception:",
            "E * RuntimeError: outer",
            "E * ValueError: bad 5",
            "E * test_one.Unpicklable: this and that",
            "last words",
            "*rank 1 was killed by SIGKILL*",
            "*rank 1 exited with code 3 before its function ended*",
            "rank 1 of 2 did not return within 3 s*",
            '*test_one.py", line * in test_hangs',
            "*fixture 'lock' of test_one.py::test_fixture, of type lock, cannot be sent*",
            "*ranks='threads'*",
        ]
    )
    lines = summary(result)
    assert any("test_assertion - rank 1 of 3: " in line for line in lines)
    assert any(line.startswith("SKIPPED") and line.endswith("not for two") for line in lines)
    output = result.stdout.str()
    assert "PeerFailed" not in output
    assert "rank_process.py" not in output
    assert output.count("AssertionError") == 1


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_modules_are_imported_as_pytest_imports_them(pytester, mode):
    """In packages or not, with the conftest files of their directories."""
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(
        **{
            "outer/conftest": """
                import pytest, sys
                from pathlib import Path
                pytest.register_assert_rewrite("checks")
                sys.path.insert(0, str(Path(__file__).parent / "helpers"))

                def pytest_configure(config):
                    sys.configured_here = True
                """,
            "outer/helpers/checks": """
                def check(value):
                    assert value == 5
                """,
            "outer/deep/test_flat": """
                import pytest, sys
                from checks import check

                class Thing:
                    pass

                @pytest.fixture
                def thing():
                    return Thing()

                @pytest.mark.world(2, ranks="processes")
                def test(thing):
                    assert isinstance(thing, Thing)
                    assert sys.configured_here
                    with pytest.raises(AssertionError, match="assert 4 == 5"):
                        check(4)
                    with pytest.raises(AssertionError, match="At index 1 diff"):
                        assert [1, 2] == [1, 3]
                """,
            "package/__init__": "",
            "package/test_in_package": """
                import pytest

                @pytest.mark.world(2, ranks="processes")
                def test():
                    assert __name__.endswith("test_in_package")
                    with pytest.raises(AssertionError, match="assert 1 == 2"):
                        assert 1 == 2
                """,
        }
    )
    command = [sys.executable, "-m", "pytest", *PLUGIN, *OPTIONS, f"--import-mode={mode}"]
    result = pytester.run(*command)
    result.assert_outcomes(passed=2)


def test_warnings_of_ranks_are_reported_once(pytester):
    source = """
import warnings

@pytest.mark.world(2, ranks="processes")
def test_warns():
    warnings.warn("look out")

@pytest.mark.world(2, ranks="processes")
@pytest.mark.filterwarnings("error:look out")
def test_is_strict():
    warnings.warn("look out")

@pytest.mark.world(2, ranks="processes")
def test_returns():
    return 5
"""
    result = run(pytester, source)
    result.assert_outcomes(passed=2, failed=1, warnings=2)
    result.stdout.fnmatch_lines(["*test_one.py:*: UserWarning: look out"])
    result.stdout.fnmatch_lines(["*test_returns returned a value on a rank*"])


def test_bodies_may_use_torch_distributed(pytester):
    source = """
import torch.distributed

@pytest.mark.world(2, ranks="processes", torch=True)
def test_torch(rank):
    assert torch.distributed.get_backend() == "phalanx"
    tensor = torch.tensor([rank + 1])
    torch.distributed.all_reduce(tensor)
    assert tensor.item() == 3

@pytest.mark.world(2, ranks="processes", torch=True, backend="gloo")
def test_gloo():
    assert torch.distributed.get_backend() == "gloo"
    torch.distributed.barrier()

@pytest.mark.world(2, ranks="processes", torch=True)
def test_fails(rank):
    assert rank == 0
    torch.distributed.barrier()

@pytest.mark.world(2, ranks="processes")
def test_after():
    assert not torch.distributed.is_initialized()
    dist.barrier()
"""
    result = run(pytester, source)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*raised by rank 1 of 2"])


def test_lines_are_labelled_where_nothing_is_captured(pytester, monkeypatch):
    result = run_apart(
        pytester,
        monkeypatch,
        """
import os

@pytest.mark.world(2, ranks="processes")
def test(rank):
    print("said", end=" ")
    print("so")
    os.write(2, b"rough\\n")
    if rank == 1:
        os.kill(os.getpid(), 9)
""",
        "-s",
    )
    for rank in range(2):
        assert any(line.endswith(f"[rank {rank}] said so") for line in result.outlines)
        assert f"[rank {rank}] rough" in result.errlines


def test_the_first_failure_can_be_the_last(pytester):
    source = """
pytestmark = pytest.mark.world(2, ranks="processes")
def test_one(): assert False
def test_two(): pass
"""
    run(pytester, source, "-x").assert_outcomes(failed=1)


DEBUGGED = """
@pytest.mark.world(2, ranks="processes")
def test_fails(rank):
    value = rank + 5
    if rank == 1:
        assert value == 7
    dist.barrier()

@pytest.mark.world(2, ranks="processes")
def test_stops(rank):
    value = rank + 50
    if rank == 0:
        breakpoint()
        value += 100
    dist.barrier()

@pytest.mark.world(2, ranks="processes")
def test_stops_together(rank):
    value = rank + 70
    dist.breakpoint(1)
"""


def test_pdb_is_in_the_process_of_the_rank(pytester, monkeypatch):
    commands = b"p value * 1000\ncontinue\nnext\np value * 1000\ncontinue\np value * 1000\nc\n"
    result = run_apart(pytester, monkeypatch, DEBUGGED, "--pdb", stdin=commands)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*PDB on rank 1 of 2*",
            "-> assert value == 7",
            "(rank 1) 6000",
            "*PDB on rank 0 of 2*",
            "-> value += 100",
            "(rank 0) *",
            "(rank 0) 150000",
            "*PDB on rank 1 of 2*",
            "(rank 1) 71000",
        ]
    )


def test_quitting_pdb_ends_the_session(pytester, monkeypatch):
    result = run_apart(pytester, monkeypatch, DEBUGGED, "--pdb", stdin=b"q\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Quitting debugger*"])
    result = run_apart(pytester, monkeypatch, DEBUGGED, "-k", "stops", stdin=b"q\n")
    result.stdout.fnmatch_lines(["!!*Quitting debugger !!*"])


def test_a_body_can_be_followed_from_its_first_line(pytester, monkeypatch):
    commands = b"next\np value * 1000\nc\n"
    options = "--trace", "-k", "stops_together"
    source = DEBUGGED.replace("dist.breakpoint(1)", "")
    result = run_apart(pytester, monkeypatch, source, *options, stdin=commands)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["-> value = rank + 70", "(rank 0) 70000"])


def test_another_limit_is_told_with_where_ranks_stand(pytester):
    source = """
import time

@pytest.mark.world(2, ranks="processes")
def test_warms_up(): pass

@pytest.mark.timeout(3)
@pytest.mark.world(2, ranks="processes")
def test_hangs(rank):
    if rank == 1:
        time.sleep(600)

@pytest.mark.world(2, ranks="processes")
def test_goes_on(): pass
"""
    result = run(pytester, source)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["rank 1:", '*test_one.py", line * in test_hangs'])
    assert "rank 0:" not in result.outlines


def test_xdist_workers_have_a_pool_each(pytester, monkeypatch):
    source = """
import os

@pytest.mark.world(2, ranks="processes")
@pytest.mark.parametrize("n", range(4))
def test(rank, n, tmp_path_factory):
    base = tmp_path_factory.getbasetemp().parent
    (base / f"{n}-{rank}").write_text(str(os.getpid()))
"""
    base = pytester.path / "base"
    result = run_apart(pytester, monkeypatch, source, "-n2", f"--basetemp={base}")
    result.assert_outcomes(passed=4)
    pids = {path.read_text() for path in base.glob("*-*") if path.is_file()}
    assert len(pids) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def files():
    """Return a directory with a short name: sockets must fit in."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield Path(directory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_session_that_is_ended(pytester, monkeypatch, files, number):
    pytester.makepyfile(
        test_one=HEAD
        + """
import os, pathlib, time

@pytest.mark.world(2, ranks="processes")
def test(rank):
    pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(600)
"""
    )
    monkeypatch.setenv("TMPDIR", str(files))
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", *PLUGIN, *OPTIONS], stdout=subprocess.PIPE, text=True
    )
    paths = [pytester.path / f"pid{rank}" for rank in range(2)]
    with session:
        while not all(path.exists() and path.read_text() for path in paths):
            assert session.poll() is None
            time.sleep(0.01)
        session.send_signal(number)
        output, _ = session.communicate()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in output
    limit = time.monotonic() + 30
    left = [Path(f"/proc/{path.read_text()}") for path in paths]
    while time.monotonic() < limit and (any(map(_lives, left)) or any(files.glob("phalanx*"))):
        time.sleep(0.01)
    assert not any(map(_lives, left))
    assert list(files.glob("phalanx*")) == []


def _lives(process):
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
