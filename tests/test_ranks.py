"""`run_ranks` on threads and on processes; what only processes can do to a launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import phalanx as dist
from phalanx.errors import DistError, DistTimeout
from phalanx.launch.outcomes import spell
from phalanx.testing.ranks import run_ranks

both = pytest.mark.parametrize("ranks", ["threads", "processes"])


class Picky(Exception):
    """Cannot be rebuilt from its pickle."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


def place(factor: int, *, offset: int) -> tuple[int, int]:
    return dist.get_rank() * factor + offset, dist.get_world_size()


def gathered() -> torch.Tensor:
    x = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("lost")
    dist.barrier()


def be_picky() -> None:
    raise Picky(1, 2)


def exit_with(code: int) -> None:
    os._exit(code)


def kill_one(victim: int) -> int:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def sleep_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def unpicklable() -> threading.Lock:
    return threading.Lock()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@both
@pytest.mark.parametrize("size", [1, 3])
def test_results_by_rank(ranks: str, size: int) -> None:
    results = run_ranks(place, size, 10, offset=5, ranks=ranks)
    assert results == [(10 * r + 5, size) for r in range(size)]


@both
def test_ranks_communicate(ranks: str) -> None:
    for x in run_ranks(gathered, 3, ranks=ranks):
        assert x.tolist() == [3.0, 3.0]


@both
def test_the_first_real_error_is_raised_with_its_rank(ranks: str) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(fail_on, 3, 1, ranks=ranks)
    assert "rank 1 of 3" in "".join(caught.value.__notes__)


@both
def test_a_deadline_shows_where_ranks_stand(ranks: str) -> None:
    # Long enough for a process to get there on a busy machine.
    timeout = 0.5 if ranks == "threads" else 4
    with pytest.raises(DistTimeout, match="rank 1 of 2") as caught:
        run_ranks(sleep_on, 2, 1, ranks=ranks, timeout=timeout)
    assert "in sleep_on" in str(caught.value)


@both
def test_exit_is_an_error(ranks: str) -> None:
    with pytest.raises(DistError, match=r"sys\.exit\(3\)") as caught:
        run_ranks(sys.exit, 1, 3, ranks=ranks)
    assert "rank 0 of 1" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([5, 0, 2, 1, 7], "ranks 0-2, 5, 7")],
)
def test_ranks_are_spelled_briefly(ranks: list[int], name: str) -> None:
    assert spell(ranks) == name


def test_unknown_kinds_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'fibers'.*threads, processes"):
        run_ranks(gathered, 2, ranks="fibers")  # type: ignore[arg-type]


class TestProcesses:
    def test_an_error_brings_its_traceback(self) -> None:
        with pytest.raises(KeyError) as caught:
            run_ranks(fail_on, 2, 0, ranks="processes")
        assert "in fail_on" in "".join(caught.value.__notes__)

    def test_an_error_that_cannot_travel_comes_as_text(self) -> None:
        with pytest.raises(DistError, match="Picky: 1 is not 2") as caught:
            run_ranks(be_picky, 1, ranks="processes")
        assert "in be_picky" in "".join(caught.value.__notes__)

    def test_a_function_that_cannot_travel_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"lock.*top level"):
            run_ranks(threading.Lock().acquire, 2, ranks="processes")

    def test_a_result_that_cannot_travel_is_an_error_of_its_rank(self) -> None:
        with pytest.raises(TypeError, match="lock") as caught:
            run_ranks(unpicklable, 1, ranks="processes")
        assert "rank 0 of 1" in "".join(caught.value.__notes__)

    def test_a_kill_is_reported(self) -> None:
        with pytest.raises(DistError, match="rank 2 was killed by SIGKILL"):
            run_ranks(kill_one, 3, 2, ranks="processes")

    def test_others_may_survive_a_kill(self) -> None:
        first, killed, last = run_ranks(kill_one, 3, 1, ranks="processes", return_exceptions=True)
        assert (first, last) == (0, 2)
        assert "SIGKILL" in str(killed)

    def test_a_silent_exit_is_reported(self) -> None:
        with pytest.raises(DistError, match="rank 0 exited with code 4"):
            run_ranks(exit_with, 1, 4, ranks="processes")

    def test_the_environment_is_the_callers_plus_the_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PHALANX_TEST_VARIABLE", "here")
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PHALANX_TEST_VARIABLE"
        results = run_ranks(environment, 2, *names, ranks="processes")
        assert results == [[str(rank), "2", str(rank), "2", "here"] for rank in range(2)]

    def test_nothing_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        run_ranks(place, 1, 1, offset=0, ranks="processes")  # what the first run sets up may stay
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        run_ranks(gathered, 2, ranks="processes")
        with pytest.raises(KeyError):
            run_ranks(fail_on, 2, 1, ranks="processes")
        with pytest.raises(DistTimeout):
            run_ranks(sleep_on, 2, 1, ranks="processes", timeout=0.5)
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        assert multiprocessing.active_children() == []
        assert list(tmp_path.glob("phalanx-*")) == []

    def test_ranks_end_with_their_launcher(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                """
                import os, time
                from phalanx.testing.ranks import run_ranks

                def live():
                    os.write(1, b"%d\\n" % os.getpid())
                    time.sleep(600)

                if __name__ == "__main__":
                    run_ranks(live, 2, ranks="processes", timeout=600)
                """
            )
        )
        launcher = subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        try:
            assert launcher.stdout is not None
            pids = [int(launcher.stdout.readline()) for _ in range(2)]
        finally:
            launcher.kill()
            launcher.communicate()
        while any(map(is_running, pids)):
            time.sleep(0.01)
        assert list(tmp_path.glob("phalanx-*")) == []
