"""The benchmarks run, check what they measure, and judge the targets honestly."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def run(directory, *options):
    """Run a tiny benchmark and return what it wrote."""
    out = directory / "numbers.json"
    tiny = ["--budget", "0.01", "--rounds", "1", "--out", str(out), *options]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.collectives", *tiny],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_gloo_and_bare_memory_are_measured_and_written_up(tmp_path):
    data = run(
        tmp_path,
        *("--impl", "gloo,bare", "--processes", "2", "--threads", ""),
        *("--operations", "all_reduce,barrier,send_recv", "--bytes", "8,128K"),
        *("--docs", str(tmp_path)),
    )
    cells = {(one["operation"], one["bytes"], one["peer"]) for one in data["results"]}
    assert cells == {
        *[("all_reduce", size, peer) for size in (8, 128 << 10) for peer in ("gloo", "bare")],
        *[("send_recv", size, peer) for size in (8, 128 << 10) for peer in ("gloo", "bare")],
        ("barrier", 0, "gloo"),
    }
    for one in data["results"]:
        assert one["error"] is None
        assert one["p50"] > 0
        assert one["p99"] > 0
    document = (tmp_path / "benchmarks.md").read_text()
    assert "all_reduce, 2 processes" in document
    assert data["command"] in document
    assert str(tmp_path) not in document


def test_phalanx_is_measured_with_processes_and_threads(tmp_path):
    if not hasattr(pytest.importorskip("phalanx"), "empty_shared"):
        pytest.skip("this Phalanx has no shared tensors")
    data = run(
        tmp_path,
        *("--impl", "phalanx,phalanx-shared,phalanx-threads", "--processes", "2"),
        *("--threads", "3", "--operations", "all_reduce", "--bytes", "8,128K"),
    )
    assert [one["error"] for one in data["results"]] == [None] * 6


def test_an_unknown_implementation_is_named(benchmark):
    collectives, peers = benchmark("collectives"), benchmark("peers")
    known = [peers.Peer("gloo", "Gloo", "gloo")]
    with pytest.raises(SystemExit, match=r"'glue' \(known: gloo\)"):
        collectives.choose_peers(known, ["glue"])


def numbers(**times):
    """Return data of one all_reduce of 1 MiB per implementation; None stands for a failure."""
    return {
        "peers": {name: {"title": name, "kind": "processes"} for name in times},
        "results": [
            {
                "kind": "processes",
                "ranks": 2,
                "operation": "all_reduce",
                "bytes": 1 << 20,
                "peer": name,
                "error": None if seconds else "it broke",
                "p50": seconds,
            }
            for name, seconds in times.items()
        ],
    }


@pytest.mark.parametrize(
    ("times", "ratio"),
    [
        ({"phalanx": 1.0, "openmpi": 3.0, "mpich": 2.0}, 2.0),  # the fastest MPI counts
        ({"phalanx": None, "openmpi": 3.0}, 0.0),
        ({"phalanx": 1.0, "openmpi": None}, None),
    ],
)
def test_a_target_is_judged_by_its_worst_cell(benchmark, times, ratio):
    results, targets = benchmark("results"), benchmark("targets")
    target = next(one for one in targets.TARGETS if one.other == "mpi" and one.covers(1 << 20))
    verdict = target.verdict(results.Results(numbers(**times)))
    assert (verdict.ratio if verdict else None) == ratio


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("64K", 65536), ("1MiB", 1 << 20)])
def test_sizes_are_read(benchmark, text, count):
    assert benchmark("results").parse_bytes(text) == count


def test_a_wrong_size_is_refused(benchmark):
    with pytest.raises(ValueError, match="'lots'"):
        benchmark("results").parse_bytes("lots")
