"""The training example runs, alone and under a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = ["--steps=4", "--batch=2", "--context=16", "--width=16", "--layers=1", "--sample=8"]
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("environment", "ranks"), [({}, 2), (LAUNCHED, 1)], ids=["alone", "launched"]
)
def test_trains(environment: dict[str, str], ranks: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLE, *SMALL, "--out", tmp_path],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert f"{ranks} ranks" in run.stdout
    assert "4/4" in run.stdout
    assert "def read(self, " in run.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
