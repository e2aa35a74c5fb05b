"""What a shell completes, and what help says; nothing here needs torch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside_worlds import look_until, running

from phalanx import cli
from phalanx.commands import COMMANDS


def completions(line: str) -> list[str]:
    """Return how a shell would let a line go on."""
    environment = dict(
        os.environ,
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME="/dev/stdout",
        _ARGCOMPLETE_IFS="\n",
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
    )
    command = [sys.executable, "-m", "phalanx"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return [word.strip() for word in done.stdout.splitlines()]


def test_commands_and_their_options_are_completed() -> None:
    pytest.importorskip("argcomplete")
    assert completions("phalanx w") == ["why"]
    assert "--max-restarts" in completions("phalanx run --m")
    assert set(completions("phalanx run --pin ")) >= {"auto", "cores", "numa", "none"}
    assert completions("phalanx completion z") == ["zsh"]


def test_jobs_are_completed(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    with running("threads", tmp_path) as pid:
        job = look_until(pid, lambda job: True)
        assert job.name in completions("phalanx top ")
        assert completions(f"phalanx why {job.name[:7]}") == [job.name]


def test_directories_of_records_are_completed(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    (tmp_path / "records").mkdir()
    (tmp_path / "records.txt").touch()
    assert completions(f"phalanx trace {tmp_path}/re") == [f"{tmp_path}/records/"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert cli.main(["completion", shell]) == 0
    assert "phalanx" in capsys.readouterr().out


def test_a_missing_extra_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["completion", "bash"]) == 1
    assert 'pip install "phalanx[completion]"' in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    examples = importlib.import_module(COMMANDS[name].module).EXAMPLES
    assert examples
    for line, effect in examples:
        assert line in text
        assert effect in text


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from phalanx import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        loaded = set(done.stderr.split())
        assert "phalanx.cli" in loaded
        assert not loaded & {"torch", "numpy", "rich", "matplotlib"}, words
