"""How a job of ``phalanx run`` ends: by failures, signals, deadlines; and what is left of it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from launches import Written, command, default_signals, run, started

from phalanx.process import Stat


def alive(pid: int) -> bool:
    return Stat(f"/proc/{pid}").alive


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


# Each rank starts a process that would outlive it, says their ids, and waits.
WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
try:
    print("pids", os.getpid(), child.pid, flush=True)
    time.sleep(1000)
finally:
    print("put in order", flush=True)
    child.kill()
"""


def pids_of(process: subprocess.Popen[str], size: int) -> list[int]:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(size)]
    return [int(pid) for line in lines for pid in re.findall(r"\d+", line.split("pids")[1])]


def test_the_first_failure_is_told_last(program: Written) -> None:
    path = program(
        "import phalanx, sys\n"
        "phalanx.init_process_group()\n"
        "phalanx.barrier()\n"
        "if phalanx.get_rank() == 1:\n"
        "    raise ValueError('of no value')\n"
        "phalanx.barrier()\n"
    )
    done = run("-n", 3, path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    told = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert told[1].strip() == f'File "{path}", line 5, in <module>'
    assert told[-2] == "ValueError: of no value"
    assert "rank 1 of 3" in told[-1]
    assert "code 1" in told[-1]
    assert "ranks 0, 2" in done.stderr


def test_a_killed_rank_is_the_cause_and_others_say_what_they_saw(program: Written) -> None:
    path = program(
        "import os, phalanx, signal\n"
        "phalanx.init_process_group()\n"
        "if phalanx.get_rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "phalanx.barrier()\n"
    )
    done = run("-n", 2, path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by SIGKILL" in done.stderr.splitlines()[-1]
    assert "PeerFailed" in done.stderr
    assert f"{path.name}:5" in done.stderr


def test_crashes_and_exit_codes(program: Written) -> None:
    path = program(
        "import ctypes, os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    ctypes.string_at(0) if 'crash' in sys.argv else sys.exit(5)\n"
        "time.sleep(1000)\n"
    )
    done = run("-n", 2, path, "crash")
    assert done.returncode == 128 + signal.SIGSEGV
    told = done.stderr[done.stderr.rindex("Fatal Python error") :]
    assert f'"{path}", line 3' in told
    assert "keeper" not in told
    assert "SIGSEGV" in told.splitlines()[-1]
    done = run("-n", 2, path)
    assert done.returncode == 5
    assert "rank 1 of 2 exited with code 5" in done.stderr.splitlines()[-1]


def test_other_ranks_that_fail_alike_are_folded(program: Written) -> None:
    done = run("-n", 3, program("def f(:\n"))
    assert done.returncode == 1
    assert done.stderr.count("def f(:") == 1
    assert re.search(r"ranks \d(, |-)\d failed too", done.stderr)


def test_a_hook_for_exceptions_is_called(program: Written) -> None:
    path = program(
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('hook:', error, trace.tb_lineno)\n"
        "1 / 0\n"
    )
    done = run(path)
    assert done.stdout == "[rank 0] hook: division by zero 3\n"
    assert "ZeroDivisionError" in done.stderr


def test_interrupted_once_ranks_put_their_things_in_order(program: Written) -> None:
    with started("-n", 2, program(WAITS)) as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert output.count("put in order") == 2
        assert "Traceback" not in errors
        assert not any(map(alive, pids))


def test_interrupted_twice_ranks_are_killed_at_once(program: Written) -> None:
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAITS
    with started("-n", 2, program(stubborn)) as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "SIGINT" not in process.stderr.readline():
            pass
        assert all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert "put in order" not in output
        assert not any(map(alive, pids))


def test_a_terminal_interrupts_ranks_once(program: Written) -> None:
    """The terminal sends Ctrl-C to ranks as well: the launcher must not add another."""
    source = """
import signal, time
def handle(*_):
    global count
    count += 1
count = 0
signal.signal(signal.SIGINT, handle)
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.5)
print("interrupted", count, "times", flush=True)
"""
    child, terminal = pty.fork()
    if child == 0:
        default_signals()
        os.execv(sys.executable, command("-n", 2, program(source)))
    seen = b""
    with suppress(OSError):  # the other side is closed
        while data := os.read(terminal, 1 << 16):
            before, seen = seen.count(b"ready\r\n"), seen + data
            if before < 2 == seen.count(b"ready\r\n"):
                os.write(terminal, b"\x03")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert seen.count(b"interrupted 1 times") == 2
    assert b"\x1b[" in seen  # colours


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_nothing_is_left_when_a_launcher_is_killed(program: Written, victim: str) -> None:
    with started("-n", 2, program(WAITS)) as process:
        pids = pids_of(process, 2)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (keeper,) = map(int, listed)
        os.kill(process.pid if victim == "launcher" else keeper, signal.SIGKILL)
        process.wait(60)
        wait_until(lambda: not any(map(alive, [*pids, keeper])))
        if victim == "keeper":
            assert process.returncode == 1
            assert process.stderr is not None
            assert "SIGKILL" in process.stderr.read()


def test_restarts(program: Written, tmp_path: Path) -> None:
    path = program(
        "import os, sys\n"
        "attempt, rank = int(os.environ['TORCHELASTIC_RESTART_COUNT']), os.environ['RANK']\n"
        "import phalanx; phalanx.init_process_group(); phalanx.barrier()\n"
        "print('attempt', attempt, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "assert attempt == 1 or rank == '0'\n"
    )
    done = run("-n", 2, "--max-restarts", 3, "--log-dir", tmp_path / "logs", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 0 of 3") == done.stdout.count("attempt 1 of 3") == 2
    assert "AssertionError" in done.stderr
    (job,) = (tmp_path / "logs").iterdir()
    for attempt in range(2):
        for rank in range(2):
            log = job / f"attempt_{attempt}" / str(rank) / "stdout.log"
            assert log.read_text() == f"attempt {attempt} of 3\n"
    assert "AssertionError" in (job / "attempt_0" / "1" / "stderr.log").read_text()
    done = run("-n", 2, "--max-restarts", 1, "--", "false")
    assert done.returncode == 1
    assert done.stderr.count("of 2 exited with code 1") == 2


def test_timeout_says_where_ranks_stand(program: Written) -> None:
    path = program(
        "import phalanx, time\n"
        "phalanx.init_process_group()\n"
        "if phalanx.get_rank() == 1:\n"
        "    time.sleep(1000)\n"
        "phalanx.barrier()\n"
    )
    done = run("-n", 2, "--timeout", "20s", path)
    assert done.returncode == 124
    assert f'[rank 1]   File "{path}", line 4' in done.stderr
    assert f"{path.name}:5" in done.stderr  # where rank 0 waits
    assert "ranks 0, 1 did not end within 20 s" in done.stderr.splitlines()[-1]


# What a rank does to the process that keeps it, its parent.
STOPPING = {
    "once": "kill -STOP $PPID; echo $$; exec sleep 1000",
    "again and again": "trap '' TERM; echo $$; while :; do kill -STOP $PPID; sleep 0.01; done",
}


@pytest.mark.parametrize("how", ["once", pytest.param("again and again", marks=pytest.mark.slow)])
def test_timeout_ends_a_job_whose_keeper_is_stopped(how: str) -> None:
    done = run("-n", 2, "--timeout", "1", "--", "sh", "-c", STOPPING[how])
    assert done.returncode == 124
    assert "ranks 0, 1 did not end within 1 s" in done.stderr.splitlines()[-1]
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_processes_left_behind_are_ended_and_named() -> None:
    done = run("-n", 1, "--", "sh", "-c", "sleep 1000 & echo $!")
    assert done.returncode == 0
    assert not alive(int(done.stdout.split()[-1]))
    assert "sleep 1000" in done.stderr


def test_a_failure_counts_when_it_is_raised(program: Written) -> None:
    """Threads may keep the process of a rank alive after its program has failed."""
    path = program(
        "import os, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    raise ValueError('of no value')\n"
        "time.sleep(1000)\n"
    )
    done = run("-n", 2, path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2] == "ValueError: of no value"
    assert "rank 1 of 2 exited with code 1" in done.stderr.splitlines()[-1]


def test_what_a_forked_child_raises_is_its_own(program: Written) -> None:
    path = program(
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    raise ValueError('of the child')\n"
        "os.wait()\n"
        "raise RuntimeError('of the rank: \\udcff')\n"
    )
    done = run(path)
    assert done.returncode == 1
    assert "[rank 0] ValueError: of the child" in done.stderr
    assert done.stderr.splitlines()[-2] == "RuntimeError: of the rank: \\udcff"


def test_outputs_that_nobody_reads(program: Written) -> None:
    path = program("import time\nwhile True:\n    print('line' * 1000)\n")
    with started("-q", path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command("true")], timeout=60)
    assert done.returncode == 0


def test_an_interrupt_while_torch_is_imported_starts_nothing(tmp_path: Path) -> None:
    slow = tmp_path / "torch.py"
    slow.write_text("import os, time; os.write(2, b'importing\\n'); time.sleep(1000)")
    (tmp_path / "program.py").write_text("import torch; print('started')")
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ, PYTHONPATH=places)
    with started("-n", 2, tmp_path / "program.py", env=environment) as process:
        assert process.stderr is not None
        while "importing" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert output == ""


def test_children_that_are_not_the_jobs_are_spared() -> None:
    script = 'sleep 1000 > /dev/null & echo $!; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command("-q", "true")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    (pid,) = map(int, done.stdout.split())
    assert done.returncode == 0
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
