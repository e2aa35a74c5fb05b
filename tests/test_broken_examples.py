"""Every broken example fails soon, and says what the text beside it says.

`python tests/test_broken_examples.py --write` writes these texts anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "broken"
SCRIPTS = sorted(FOLDER.glob("*.py"))

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in .*')


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def normal(output: str) -> str:
    """Replace what differs from run to run, and leave out stack frames that are not the user's."""
    lines = []
    hidden = False
    for line in output.splitlines():
        if frame := _FRAME.fullmatch(line.rstrip()):
            hidden = not frame["file"].startswith(str(FOLDER))
        elif not line.startswith("    "):
            hidden = False
        elif not line.strip(" ^~"):
            continue
        if not hidden:
            lines.append(line.rstrip())
    text = "\n".join(lines) + "\n"
    text = text.replace(f"{FOLDER}{os.sep}", "")
    text = re.sub(r"\bpid \d+ on host [^)]+", "pid PID on host HOST", text)
    return re.sub(r"\b\d+(\.\d+)? (ms|s|min) ago\b", "N s ago", text)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_says_what_is_wrong(script: Path) -> None:
    ended = run(script)
    assert ended.returncode == 1, ended.stdout
    assert normal(ended.stdout) == script.with_suffix(".txt").read_text()


def test_all_are_explained() -> None:
    explained = re.findall(r"\[(\w+)\.py\]\(\1\.py\)", (FOLDER / "README.md").read_text())
    assert sorted(explained) == [script.stem for script in SCRIPTS]
    assert len(SCRIPTS) == 10
    for script in SCRIPTS:
        assert 10 <= len(script.read_text().splitlines()) <= 30, script.name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for each in SCRIPTS:
        each.with_suffix(".txt").write_text(normal(run(each).stdout))
