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


def run(directory, *options, module="collectives"):
    """Run a tiny benchmark and return what it wrote."""
    out = directory / "numbers.json"
    length = "--budget" if module == "collectives" else "--seconds"
    tiny = [length, "0.01", "--rounds", "1", "--out", str(out), *options]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *tiny],
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


def test_training_is_measured_and_written_up(tmp_path):
    ways = ["alone", "gloo-view", "phalanx"]
    data = run(
        tmp_path,
        *("--models", "tiny", "--ways", ",".join(ways), "--docs", str(tmp_path)),
        module="training",
    )
    assert [one["way"] for one in data["results"]] == ways
    for one in data["results"]:
        assert one["seconds"] > 0
        assert one["ratio"] > 0
        assert one["peak"] >= 0
    document = (tmp_path / "training-benchmarks.md").read_text()
    assert "Phalanx's DDP" in document
    assert data["command"] in document
    assert str(tmp_path) not in document
    assert (tmp_path / "benchmark-training.png").exists()


def test_ratios_are_taken_within_a_round(benchmark):
    results = [
        {"model": "m", "way": "alone", "times": [1.0, 10.0, 2.0]},
        {"model": "m", "way": "phalanx", "times": [1.5, 12.0, 2.0]},
    ]
    benchmark("training").add_ratios(results)
    assert [one["ratio"] for one in results] == [1.0, 1.2]
    assert [one["seconds"] for one in results] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("ours", "failing", "outcomes"),
    [
        ({"ratio": 1.02, "share": 90}, [], ["met", "met", "met"]),
        ({"ratio": 1.2, "share": 110}, [], ["missed", "missed", "missed"]),
        (None, [], ["", "", ""]),
        ({"ratio": 1.02, "share": 90}, ["gloo"], ["met", "met", "met"]),
        ({"ratio": 1.02, "share": 90}, ["phalanx-view"], ["missed", "missed", "missed"]),
    ],
)
def test_targets_of_training_are_judged(benchmark, ours, failing, outcomes):
    cells = {"alone": {"ratio": 1.0, "share": 80}, "gloo": {"ratio": 1.2, "share": 130}}
    cells["gloo-view"] = {"ratio": 1.1, "share": 100}
    if ours:
        cells["phalanx"] = cells["phalanx-view"] = ours
    results = [{"model": "m", "way": way, **cell} for way, cell in cells.items()]
    failures = [{"model": "m", "way": way, "error": "it broke"} for way in failing]
    data = {"titles": {"m": "a model"}, "results": results, "failures": failures}
    _, _, rows = benchmark("training_report").target_table(data)
    assert [row[-1] for row in rows] == outcomes


def test_an_unknown_way_to_train_is_named(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark("training").parse(["--ways", "glue"])
    assert "'glue' (known: alone, gloo" in capsys.readouterr().err


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
