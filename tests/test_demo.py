"""phalanx demo: that the tour works, and shows what really happens."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
from terminals import Terminal

from phalanx import cli
from phalanx.demo import programs, training


def test_the_whole_tour() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "demo", "--fast"],
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "\x1b" not in text
    for rank in range(4):
        assert f"rank {rank} of 4 has [6.0, 6.0, 6.0]" in text
    for kind, program in (("CollectiveMismatch", "forgetful"), ("Deadlock", "impatient")):
        message = text.partition(f"{kind} on all 3 ranks")[2].partition(">>>")[0]
        (line,) = set(re.findall(rf"rank 0 .*phalanx_tour.py:(\d+) in {program}", message)[:1])
        assert f"{line}  {lines(program)[int(line)]}" in text  # the line is one that was shown
    assert re.search(r"4 B +[\d.]+ µs|This torch has no Gloo", text)
    assert "100% of the points" in text
    first, second = re.search(r"bit for bit the same: (\w+) and (\w+)\.", text).groups()  # type: ignore[union-attr]
    assert first == second


def lines(program: str) -> dict[int, str]:
    source, first = inspect.getsourcelines(getattr(programs, program))
    return {first + i: line.rstrip() for i, line in enumerate(source)}


def test_whoever_has_seen_enough_can_go() -> None:
    with Terminal("demo") as terminal:
        terminal.until("rank 3 of 4", "any key goes on")
        terminal.press("\n")
        terminal.until("CollectiveMismatch", "Deadlock", "any key goes on")
        terminal.press("q")
        assert terminal.end() == 0
    assert "Gloo" not in terminal.seen


def test_sparkline() -> None:
    assert training.sparkline([], 10) == ""
    assert training.sparkline([1, 1], 10) == "▁▁"
    assert training.sparkline(range(8), 10) == "▁▂▃▄▅▆▇█"
    assert training.sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(training.sparkline(range(1000), 60)) <= 60


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "slowly"])
    assert caught.value.code == 2
    assert "usage: phalanx" in capsys.readouterr().err
