"""The command line, as a user calls it."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from outside_worlds import PROGRAMS, look_until, running, waits_long
from terminals import ALTERNATE, DOWN, ESCAPE, MAIN, Terminal

from phalanx import cli
from phalanx.debug import outside


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running("hang", tmp_path_factory.mktemp("hang")) as pid:
        look_until(pid, waits_long)
        yield pid


def phalanx(*arguments: object) -> str:
    """Run a command in a process of its own and return what it prints."""
    command = [sys.executable, "-m", "phalanx", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_ps(hanging: int, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = json.loads(phalanx("ps", "--json"))
    pids = look_until(hanging, waits_long).pids
    (mine,) = (job for job in jobs if job["pids"] == pids)
    assert mine["state"] == "waiting for rank 2"
    assert mine["kind"] == "processes"
    assert cli.main(["ps"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if mine["job"] in line)
    for fact in ("4", "processes", "waiting for rank 2", PROGRAMS.name, str(mine["pids"][0])):
        assert fact in line


def test_top_once(hanging: int, capsys: pytest.CaptureFixture[str]) -> None:
    table = phalanx("top", hanging, "--once").splitlines()
    assert table[1].split()[:3] == ["RANK", "PID", "STATE"]
    assert [line.split()[0] for line in table[2:6]] == ["0", "1", "2", "3"]
    assert "ranks 1, 2" in table[2]
    assert "straggler: rank 2" in table[6]
    assert "\x1b" not in "".join(table)
    assert cli.main(["top", str(hanging), "--once", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["straggler"] == 2
    assert [rank["waits_for"] for rank in seen["ranks"]] == [[1, 2], [2], [], [1, 2]]


def test_top_answers_keys(hanging: int) -> None:
    with Terminal("top", hanging, "--interval", "0.1") as terminal:
        terminal.until("waiting for rank 2", "straggler", "sort: rank")
        terminal.press("s")
        terminal.until("sort: wait")
        terminal.press("f")
        terminal.until("show: waiting")
        terminal.press("p")
        terminal.until("paused", "go on")
        terminal.press("f f")  # and on again
        terminal.until("show: all", "pause")
        terminal.press("sss" + "k" * 4 + DOWN + "j")
        terminal.until("\x1b[1mrank 2\x1b[0m  \x1b[36msleeping")  # the line about the selected one
        terminal.press("?")
        terminal.until("select a rank")
        terminal.press(ESCAPE)
        terminal.until("sort:")
        terminal.press("\r")
        terminal.until("why: job", "Look at what keeps rank 2")
        terminal.press("q")
        terminal.until("sort:")
        terminal.press("q")
        assert terminal.end() == 0


def test_top_lets_choose_among_jobs(hanging: int, tmp_path: Path) -> None:
    with running("threads", tmp_path) as other:
        names = [look_until(pid, lambda job: True).name for pid in (hanging, other)]
        with Terminal("top", lines=300) as terminal:  # worlds of other tests are listed too
            terminal.until("watch which one?", *names)
            terminal.press("\r")
            terminal.until("RANK", "sort: rank")  # of one of them, or of another test for a moment
            terminal.press("q")
            assert terminal.end() == 0


def test_top_follows_the_size_of_its_terminal(hanging: int) -> None:
    with Terminal("top", hanging, "--interval", "30") as terminal:
        assert "CALL SITE" in terminal.until("help")
        terminal.resize(70, 12)
        small = terminal.until("RANK", "show")
        assert "CALL SITE" not in small
        assert "WAITS FOR" in small
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_top_gives_the_terminal_back(hanging: int, number: int, code: int) -> None:
    with Terminal("top", hanging) as terminal:
        terminal.until("straggler")
        terminal.process.send_signal(number)
        assert terminal.end() == code


def test_top_can_be_put_aside(hanging: int) -> None:
    with Terminal("top", hanging, "--interval", "0.1") as terminal:
        terminal.until("straggler")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(MAIN)
        _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(ALTERNATE, "straggler")
        terminal.press("q")
        assert terminal.end() == 0


def test_top_says_when_the_job_ends(tmp_path: Path) -> None:
    with ExitStack() as job:
        pid = job.enter_context(running("move", tmp_path))
        look_until(pid, lambda job: True)
        with Terminal("top", pid, "--interval", "0.1") as terminal:
            terminal.until("op/s")
            job.close()
            terminal.until("has ended")
            assert terminal.end() == 0


def test_looking_needs_no_torch(hanging: int) -> None:
    code = (
        "import sys; from phalanx import cli\n"
        f"for command in (['ps'], ['top', '{hanging}', '--once'], ['why', '{hanging}']):\n"
        "    assert cli.main(command) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_why(hanging: int, capsys: pytest.CaptureFixture[str]) -> None:
    page = phalanx("why", hanging)
    for fact in ("anks 0, 3 wait", "rank 2", "#2", "sleeping"):
        assert fact in page
    assert cli.main(["why", str(hanging), "--json"]) == 0
    reason = json.loads(capsys.readouterr().out)
    assert reason["cause"] == "waiting"
    assert reason["ranks"] == [2]
    if reason["no_stacks"]:  # where nobody may look into other processes
        assert reason["stacks"] == {}
        assert all(re.search(r"py-spy|ptrace", why) for why in reason["no_stacks"])
    else:
        (stack,) = reason["stacks"].values()
        assert [*reason["stacks"]] == ["2"]  # the others wait in calls of ours
        assert re.search(r"outside_worlds.py:\d+ in hang", "\n".join(stack))


def test_a_job_has_the_name_that_its_launcher_tells(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, phalanx as dist\ndist.init_process_group()\ndist.barrier()\ntime.sleep(300)\n"
    )
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stderr is not None
            name = launcher.stderr.readline().partition("job ")[2].partition(":")[0]
            job = look_until(launcher.pid, lambda job: job.last_operation(1) is not None)
            assert job.name == name
            assert json.loads(phalanx("top", name[:6], "--once", "--json"))["job"] == name
            (shown,) = (line for line in phalanx("ps").splitlines() if name in line)
            assert f"phalanx run -n 2 {script}" in shown
        finally:
            launcher.terminate()


def test_worlds_of_one_launch_are_told_apart() -> None:
    job = outside.Job("0123456789abcdef", False, 0, 0, "", [], [], launched_as="feedbeef")
    assert job.name == "feedbeef"
    assert job.answers_to("feed")
    assert job.answers_to("0123")
    assert replace(job, is_one_of_several=True).name == "feedbeef/0123"


def test_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("top", "why"):
        assert cli.main([command, "nonsense"]) == 1
        assert "no job 'nonsense'" in capsys.readouterr().err


def test_several_jobs_must_be_told_apart(
    hanging: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gc.collect()  # worlds of earlier tests, which this process would be a part of
    with running("threads", tmp_path / "threads") as other:
        names = [look_until(pid, lambda job: True).name for pid in (hanging, other)]
        for arguments in (["why"], ["top", str(os.getpid())]):  # who started both
            assert cli.main(arguments) == 1
            said = capsys.readouterr().err
            assert all(name in said for name in names)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["top", "--interval", "0"], ["ps", "x"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: phalanx" in capsys.readouterr().err


def test_describing_commands_imports_nothing_large() -> None:
    code = (
        "import importlib, sys\n"
        "from phalanx.commands import COMMANDS\n"
        "for command in COMMANDS.values():\n"
        "    module = importlib.import_module(command.module)\n"
        "    large = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "    assert not large, (module, large)\n"
        "    assert module.__doc__ and module.EXAMPLES\n"
        "    assert all('phalanx ' in line for line, _ in module.EXAMPLES)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("phalanx ")
