"""`spawn`: results, errors, what a function finds in its process, and what is left of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

import phalanx as dist
from phalanx.errors import DistError
from phalanx.launch import parcels, processes
from phalanx.launch.placement import usable_cores
from phalanx.launch.spawn import spawn
from phalanx.machine import Machine


def summed(rank: int, offset: int) -> tuple[int, int, list[float]]:
    dist.init_process_group()
    tensor = torch.full((2,), float(rank + offset))
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.tolist()


def summed_by_torch(rank: int, backends: list[str]) -> list[float]:
    results = []
    for backend in backends:
        torch.distributed.init_process_group(backend)
        tensor = torch.tensor([float(torch.distributed.get_rank() + 1)])
        torch.distributed.all_reduce(tensor)
        results.append(tensor.item())
        torch.distributed.destroy_process_group()
    return results


def fail_on(rank: int, failing: int) -> None:
    dist.init_process_group()
    if rank == failing:
        raise KeyError("lost")
    dist.barrier()


def place(rank: int, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def double(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(2)


def wait_for(rank: int, path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.005)
    return rank


def sleep(rank: int) -> None:
    time.sleep(600)


def take_leave(rank: int, folder: str) -> None:
    def leave(*_: object) -> None:
        Path(folder, f"left{rank}").touch()
        sys.exit()

    signal.signal(signal.SIGTERM, leave)
    Path(folder, f"here{rank}").touch()
    time.sleep(600)


def stay(rank: int, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = subprocess.Popen(["sleep", "600"])
    Path(folder, "part").write_text(str(started.pid))
    Path(folder, "part").rename(Path(folder, "here"))
    time.sleep(600)


def be_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def lock(rank: int) -> threading.Lock:
    return threading.Lock()


def num_threads(rank: int) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_results_by_rank_in_a_world_of_the_environment(start_method: str) -> None:
    results = spawn(summed, (10,), nprocs=2, start_method=start_method)
    assert results == [(rank, 2, [21.0, 21.0]) for rank in range(2)]


def summed_by_both(rank: int) -> tuple[list[float], list[float]]:
    ours = summed(rank, 1)[2]
    dist.destroy_process_group()
    return ours, summed_by_torch(rank, ["phalanx", "gloo"])


def test_torch_meets_in_the_environment_as_well() -> None:
    assert spawn(summed_by_both, nprocs=2) == [([3, 3], [3, 3])] * 2


def in_a_world(offset: int, *, times: int = 1) -> tuple[float, int, str]:
    tensor = torch.tensor([float(dist.get_rank() + offset)]) * times
    dist.all_reduce(tensor)
    return tensor.item(), dist.get_world_size(), os.environ["RANK"]


def test_a_number_in_second_place_makes_a_world_as_run_threads_does() -> None:
    assert spawn(in_a_world, 2, 1, times=2) == [(6.0, 2, "0"), (6.0, 2, "1")]


def only_the_first_waits() -> str:
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()
    return "never"


def test_a_world_takes_what_run_threads_takes() -> None:
    first, second = spawn(only_the_first_waits, 2, return_exceptions=True, timeout=30)
    assert isinstance(first, dist.PeerFailed)
    assert isinstance(second, KeyError)
    with pytest.raises(dist.DistTimeout, match=r"0\.2 s"):
        spawn(time.sleep, 2, 600, deadline=0.2)


def test_the_two_ways_to_call_it_are_not_mixed() -> None:
    with pytest.raises(TypeError, match=r"spawn\(fn, size\) takes no join or nprocs"):
        spawn(place, 2, nprocs=2, join=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"spawn\(fn, args, nprocs\) takes no backend or scale"):
        spawn(place, (), 2, backend="phalanx", scale=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes no 'extra'"):
        spawn(place, (), 2, True, False, "fork", "extra")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        spawn(place, 0)


def speak() -> None:
    for i in range(50):
        for part in ("line ", str(i), "\n"):
            sys.stdout.write(part)
    os.write(2, b"below Python\n")
    subprocess.run(["echo", "child"], check=True)
    print("1%\r99%", end="")


def test_every_line_has_its_rank_if_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    spawn(speak, 3, label=True)
    out, err = (text.splitlines() for text in capsys.readouterr())
    for rank in range(3):
        label = f"[rank {rank}] "
        own = [line.removeprefix(label) for line in out if line.startswith(label)]
        assert own == [*(f"line {i}" for i in range(50)), "child", "99%"]
    assert len(out) == 3 * 52
    assert sorted(err) == [f"[rank {rank}] below Python" for rank in range(3)]


def speak_and_be_killed(rank: int) -> None:
    print("last words of", rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_what_a_rank_that_died_has_printed_is_there(
    start_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DistError, match="rank 1 was killed"):
        spawn(speak_and_be_killed, (), 2, start_method=start_method, label=True)
    assert "[rank 1] last words of 1" in capsys.readouterr().out.splitlines()


def leave_somebody_who_speaks() -> int:
    print("a word of the rank's own", flush=True)
    return subprocess.Popen(["sh", "-c", "while :; do echo more; done"]).pid


def test_output_of_what_is_left_behind_is_not_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (pid,) = spawn(leave_somebody_who_speaks, 1, label=True)
    limit = time.monotonic() + 30
    while Path(f"/proc/{pid}/exe").exists():  # the pipe is gone, which ends it
        assert time.monotonic() < limit, "its output still has a reader"
        time.sleep(0.01)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[rank 0] a word of the rank's own"
    assert {*lines[1:]} <= {"[rank 0] more"}  # as much of it as had come by then


def test_an_output_that_nobody_reads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    unread = open(writer, "w")  # noqa: SIM115  (what cannot be written makes closing it fail)
    monkeypatch.setattr(sys, "stdout", unread)
    with pytest.raises(BrokenPipeError):
        spawn(speak, 1, label=True)
    with pytest.raises(BrokenPipeError):
        unread.close()


def test_one_process_is_the_default() -> None:
    assert spawn(place, ("RANK", "WORLD_SIZE")) == [["0", "1"]]


def test_the_variables_of_a_job_around_it_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("RANK", "7"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("PHALANX_TEST_VARIABLE", "here"),
    ):
        monkeypatch.setenv(name, value)
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "PHALANX_SECRET"
    own = "TORCHELASTIC_USE_AGENT_STORE", "PHALANX_TEST_VARIABLE"
    first, second = spawn(place, (*names, *own), nprocs=2)
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3] == second[3] != "1"
    assert first[4] == second[4] is not None
    assert first[5:] == ["False", "here"]


def test_tensors_travel_by_value() -> None:
    tensor = torch.ones(3)
    (doubled,) = spawn(double, (tensor,))
    assert doubled.tolist() == [2, 2, 2]
    assert tensor.tolist() == [1, 1, 1]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert spawn(num_threads) == [3]
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = usable_cores(Machine())
    assert spawn(num_threads, nprocs=cores) == [1] * cores


def test_the_first_real_error_is_raised_with_its_rank() -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        spawn(fail_on, (1,), nprocs=3)
    notes = "".join(caught.value.__notes__)
    assert "rank 1 of 3" in notes
    assert "in fail_on" in notes


def test_a_kill_is_reported() -> None:
    with pytest.raises(DistError, match="rank 1 was killed by SIGKILL"):
        spawn(be_killed, nprocs=2)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(TypeError, match=r"result.*lock") as caught:
        spawn(lock)
    assert "rank 0 of 1" in "".join(caught.value.__notes__)


class Stubborn:
    """Can be pickled, but not be rebuilt."""

    def __reduce__(self):
        return int, ("no number",)


def stubborn(rank: int) -> Stubborn:
    return Stubborn()


def test_a_result_that_cannot_be_rebuilt_is_an_error_of_its_rank() -> None:
    with pytest.raises(DistError, match=r"rank 0 .*ValueError.*no number"):
        spawn(stubborn)


@pytest.mark.parametrize("nprocs", [0, -1, True, 2.0])
def test_unfit_numbers_of_processes_are_refused(nprocs: int) -> None:
    with pytest.raises(ValueError, match=f"nprocs.*{nprocs}"):
        spawn(place, nprocs=nprocs)


def test_unfit_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"tuple.*list"):
        spawn(place, ["RANK"])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"'thread' \(known: .*forkserver"):
        spawn(place, start_method="thread")
    with pytest.raises(TypeError, match="lock"):
        spawn(place, (threading.Lock(),))


class TestContext:
    def test_join_waits_so_long_and_then_there_are_results(self, tmp_path: Path) -> None:
        context = spawn(wait_for, (str(tmp_path / "go"),), nprocs=2, join=False)
        assert context.join(0) is False
        with pytest.raises(RuntimeError, match="join"):
            _ = context.results
        assert context.pids() == [process.pid for process in context.processes]
        (tmp_path / "go").touch()
        assert context.join(60) is True
        assert context.results == [0, 1]
        assert context.join() is True

    def test_a_failure_is_raised_by_each_join_alike(self) -> None:
        context = spawn(fail_on, (0,), nprocs=2, join=False)
        for _ in range(2):
            with pytest.raises(KeyError, match="lost") as caught:
                context.join()
            assert len(caught.value.__notes__) == 1
        with pytest.raises(KeyError, match="lost"):
            _ = context.results

    def test_ending_it_leaves_no_process(self) -> None:
        context = spawn(sleep, nprocs=2, join=False)
        pids = context.pids()
        context.end()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        with pytest.raises(DistError, match="rank 0 was ended"):
            context.join()

    def test_daemons_are_told_so(self) -> None:
        for told in (True, False):
            context = spawn(sleep, nprocs=2, join=False, daemon=told)
            assert [process.daemon for process in context.processes] == [told] * 2
            context.end()

    def test_daemons_end_with_the_program_that_started_them(self, tmp_path: Path) -> None:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from phalanx.launch.spawn import spawn; from test_spawn import sleep\n"
            "if __name__ == '__main__':\n"
            "    print(spawn(sleep, join=False, daemon=True).pids()[0])\n"
        )
        program = tmp_path / "program.py"
        program.write_text(code)
        command = [sys.executable, str(program), str(Path(__file__).parent)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        pid = int(ran.stdout)
        limit = time.monotonic() + 30
        while Path(f"/proc/{pid}/exe").exists():
            assert time.monotonic() < limit, "the rank outlives the program"
            time.sleep(0.01)

    def test_ranks_are_asked_to_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "_ASKED", 60)
        context = spawn(take_leave, (str(tmp_path),), nprocs=2, join=False)
        for rank in range(2):
            wait_for(0, str(tmp_path / f"here{rank}"))
        context.end()
        assert sorted(path.name for path in tmp_path.glob("left*")) == ["left0", "left1"]

    def test_those_that_do_not_are_killed_with_what_they_have_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "_ASKED", 0.05)
        context = spawn(stay, (str(tmp_path),), join=False)
        wait_for(0, str(tmp_path / "here"))
        pids = [*context.pids(), int((tmp_path / "here").read_text())]
        assert all(Path(f"/proc/{pid}/exe").exists() for pid in pids)
        context.end()
        assert not Path(f"/proc/{pids[0]}").exists()
        with pytest.raises(DistError, match="rank 0 was ended"):
            context.join()
        limit = time.monotonic() + 30
        while Path(f"/proc/{pids[1]}/exe").exists():
            assert time.monotonic() < limit, "what the rank has started is left"
            time.sleep(0.01)


def test_nothing_is_left() -> None:
    spawn(place)  # what the first run sets up may stay
    gc.collect()  # what others have left goes before it is counted
    files, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    spawn(summed, (1,), nprocs=2, label=True)
    with pytest.raises(KeyError):
        spawn(fail_on, (0,), nprocs=2)
    for thread in {*threading.enumerate()} - threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left"
    assert len(os.listdir("/proc/self/fd")) <= files
    assert multiprocessing.active_children() == []


PROMPT = """
import torch
import phalanx as dist
from phalanx.launch.spawn import spawn

class Point:
    def __init__(self, x):
        self.x = x

class Odd(Exception):
    pass

def work(rank, point):
    dist.init_process_group()
    if point.x == 3:
        raise Odd(rank)
    return Point(point.x + rank)

results = spawn(work, (Point(1),), nprocs=2)
assert [type(result) for result in results] == [Point, Point]
print(*(result.x for result in results), *spawn(lambda rank: rank + 5, nprocs=2))
try:
    spawn(work, (Point(3),))
except Odd as error:
    print("odd", error.__notes__)
"""


def run_python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    source = Path(dist.__file__).parents[1]
    paths = os.pathsep.join([*options.pop("path", ()), str(source)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **options,
    )


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_functions_of_a_prompt_travel_by_value(how: str) -> None:
    pytest.importorskip("cloudpickle", reason="functions without a module need cloudpickle")
    done = run_python("-c", PROMPT) if how == "-c" else run_python(input=PROMPT)
    assert done.stdout.splitlines()[0] == "1 2 5 6", done.stderr
    assert "in work" in done.stdout


def test_what_is_missing_for_a_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    done = run_python("-c", PROMPT, path=[str(tmp_path)])
    assert 'pip install "phalanx[notebook]"' in done.stderr.splitlines()[-1]


def test_parcels_are_pickles_where_names_can_be_found() -> None:
    assert b"cloudpickle" not in parcels.pack((summed, torch.ones(2)))


SCRIPT = """
import os, subprocess, sys, time
from phalanx.launch.spawn import spawn

def live(rank, seconds):
    if seconds:
        sleeper = subprocess.Popen(["sleep", str(seconds)])
        os.write(1, b"%d\\n" % sleeper.pid)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(seconds)
    return bytes(1_000_000)  # more than a pipe holds

if __name__ == "__main__":
    if sys.argv[1] == "leave":
        context = spawn(live, (0,), nprocs=2, join=False)
    else:
        spawn(live, (600,), nprocs=2)
"""


def test_a_program_may_end_without_a_join(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python("-W", "error", str(script), "leave")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 2


def test_ranks_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = Path(dist.__file__).parents[1]
    program = subprocess.Popen(
        [sys.executable, script, "stay"],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(source)},
    )
    try:
        assert program.stdout is not None
        pids = [int(program.stdout.readline()) for _ in range(4)]
    finally:
        program.kill()
        program.communicate()
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        time.sleep(0.01)


UNGUARDED = """
from phalanx.launch.spawn import spawn

def live(rank):
    return rank

spawn(live, nprocs=2)
"""


def test_a_missing_guard_is_named_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = run_python(str(script))
    assert done.returncode == 1
    assert done.stderr.count('if __name__ == "__main__":') == 1
    assert done.stderr.count("Traceback") == 1


INTERRUPTED = """
import multiprocessing, os, signal
from multiprocessing import forkserver
from phalanx.launch import processes
from phalanx.launch.spawn import spawn

def live(rank):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return signal.SIGINT not in blocked and signal.getsignal(signal.SIGINT).__name__

if __name__ == "__main__":
    processes._start_fork_server(multiprocessing.get_context("forkserver"))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)
    print(*spawn(live, nprocs=2))
"""


def test_an_interrupt_is_not_for_what_ranks_are_forked_from(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = run_python(str(script))
    assert done.stderr == ""
    assert done.stdout.split() == ["default_int_handler"] * 2
