"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside_worlds import PROGRAMS, look_until, running, waits_long

from phalanx import cli
from phalanx.debug import top


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


def test_top_refreshes_a_terminal_in_place(hanging: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "phalanx", "top", str(hanging), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        seen = b""
        while seen.count(top.HOME.encode()) < 3:
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                if not (more := os.read(ours, 1 << 16)):
                    break
            except OSError:  # the other side is closed
                break
            seen += more
    os.close(ours)
    assert process.returncode == 0
    assert b"straggler: rank 2" in seen
    assert seen.rstrip().endswith(top.SHOW_CURSOR.encode())


def test_why(hanging: int, capsys: pytest.CaptureFixture[str]) -> None:
    page = phalanx("why", hanging)
    for fact in ("anks 0, 3 wait", "rank 2", "#2", "sleeping"):
        assert fact in page
    assert cli.main(["why", str(hanging), "--json"]) == 0
    reason = json.loads(capsys.readouterr().out)
    assert reason["cause"] == "waiting"
    assert reason["ranks"] == [2]
    assert reason["stacks"] or reason["no_stacks"]


def test_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("top", "why"):
        assert cli.main([command, "nonsense"]) == 1
        assert "no job 'nonsense'" in capsys.readouterr().err


def test_several_jobs_must_be_told_apart(
    hanging: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("phalanx ")
