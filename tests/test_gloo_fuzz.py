"""Random right calls of torch.distributed: the same on Gloo and on the backend "phalanx"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz_gloo"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_what_gloo_computes_is_computed(seed):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seed", str(seed), "--count", "200"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 cases" in done.stdout
