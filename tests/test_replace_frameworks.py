"""Scripts of Accelerate and Lightning, unchanged, with Gloo replaced: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

EXAMPLES = Path(__file__).parents[1] / "examples" / "frameworks"
LINE = "gloo is replaced by phalanx"
LAUNCHED = ["-m", "phalanx", "run", "-n", "2"]


def report(name, output, launcher, replaced):
    """Run a script and return what it reports; `launcher` are arguments of Python."""
    output.mkdir()
    source = Path(phalanx.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"}
    if replaced and not launcher:
        environment["PHALANX_REPLACE"] = "gloo"
    options = ["--replace", "gloo"] if replaced and launcher else []
    done = subprocess.run(
        [sys.executable, *launcher, *options, str(EXAMPLES / name), str(output)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == int(replaced), done.stderr
    return json.loads((output / "report.json").read_text())


@pytest.mark.timeout(300)
def test_accelerate(tmp_path):
    pytest.importorskip("accelerate", reason='needs pip install "phalanx[frameworks]"')
    ours = report("with_accelerate.py", tmp_path / "ours", LAUNCHED, True)
    theirs = report("with_accelerate.py", tmp_path / "theirs", LAUNCHED, False)
    assert ours == theirs
    assert ours["kind"] == "DistributedType.MULTI_CPU"
    assert ours["objects"] == ["from 0", "from 1"]


@pytest.mark.timeout(300)
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason='needs pip install "phalanx[frameworks]"')
    theirs = report("with_lightning.py", tmp_path / "theirs", LAUNCHED, False)
    assert report("with_lightning.py", tmp_path / "ours", LAUNCHED, True) == theirs
    # Without a launcher Lightning starts the second process.
    assert report("with_lightning.py", tmp_path / "alone", [], True) == theirs
    assert theirs["backend"] == "gloo"
