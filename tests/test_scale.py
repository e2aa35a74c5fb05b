"""The benchmarks of scale: what they measure, and what they write."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_ranks_meet_and_clients_crowd(tmp_path):
    out = tmp_path / "numbers.json"
    words = ["--clients", "8", "--ranks", "16", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "benchmarks.control_plane", *words], cwd=ROOT, check=True)
    data = json.loads(out.read_text())
    assert data["clients"][0]["requests"] > 0
    assert data["ranks"][0]["ranks"] == 16
    for name in ("connect", "check_in", "world", "new_group", "detection", "memory"):
        assert data["ranks"][0][name] > 0


SCALE = {
    "seconds": 60,
    "command": "python -m benchmarks.scale",
    "machine": {
        **dict.fromkeys(("processor", "system", "python", "torch", "numpy"), "?"),
        "cores": 2,
        "memory_gib": 4,
        "load_before": 0.1,
    },
    "fit": {
        "flat": {"message": 1e-4, "byte": 1e-9},
        "between": {"message": 2e-4, "byte": 2e-9},
        "local": 1e-5,
        "local_byte": 1e-10,
        "add_byte": 1e-10,
    },
    "checks": [
        {
            "library": library,
            "hosts": 2,
            "ranks_per_host": 1,
            "rate": "1gbit",
            "num_bytes": 1 << 20,
            "seconds": 0.01,
        }
        for library in ("phalanx", "gloo")
    ],
    "training": [{"layout": "2x1", "rate": "1gbit", "alone": 0.1, "together": 0.25}],
    "control_plane": {"clients": [], "ranks": []},
}


def test_the_model_is_written_up_with_its_errors(benchmark, tmp_path):
    scale = benchmark("scale")
    scale.REPORT.write(SCALE, tmp_path)
    document = (tmp_path / "scale.md").read_text()
    (sample, predicted), _ = scale.checked(SCALE)
    assert f"{predicted / sample.seconds - 1:+.0%}" in document
    assert "2 x 1, 1gbit" in document
    assert "1250 (10,000)" in document
    assert "![" in document
    assert (tmp_path / "scale.png").stat().st_size > 1000
