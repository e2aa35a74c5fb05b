"""The benchmarks run, check what they measure, and judge the targets honestly."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts import needs_hosts

from phalanx.bench.peers import Peer
from phalanx.bench.results import Results

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def run(directory, *options, module="collectives"):
    """Run a tiny benchmark and return what it wrote."""
    out = directory / "numbers.json"
    length = "--budget" if module in ("collectives", "hosts") else "--seconds"
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
    data = run(
        tmp_path,
        *("--impl", "phalanx,phalanx-shared,phalanx-threads", "--processes", "2"),
        *("--threads", "3", "--operations", "all_reduce", "--bytes", "8,128K"),
    )
    assert [one["error"] for one in data["results"]] == [None] * 6


@needs_hosts
def test_links_between_hosts_are_measured_and_written_up(tmp_path):
    options = ["--impl", "gloo", "--rates", "100mbit", "--bytes", "4,128K"]
    options += ["--models", "tiny", "--seconds", "0.01"]
    data = run(tmp_path, *options, "--docs", str(tmp_path), module="hosts")
    assert [(one["bytes"], one["error"]) for one in data["results"]] == [
        (4, None),
        (128 << 10, None),
    ]
    document = (tmp_path / "hosts-benchmarks.md").read_text()
    assert "2 hosts with 2 ranks each, 100mbit" in document
    assert "10.5 ms" in document  # the link's limit
    assert all(one["seconds"] > 0 for one in data["training"])
    assert "| a tiny GPT | 100mbit |" in document


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


def test_torch_on_phalanx_is_measured_and_written_up(tmp_path):
    data = run(
        tmp_path,
        *("--operations", "all_reduce,functional_all_reduce", "--widths", "64"),
        *("--models", "tiny", "--docs", str(tmp_path)),
        module="torch_backend",
    )
    assert [one["error"] for one in data["results"]] == [None] * len(data["results"])
    ways = {part: set() for part in ("calls", "decode", "fsdp", "ddp")}
    for one in data["results"]:
        assert len(one["times"]) == data["rounds"]
        assert min(one["times"]) > 0
        ways[one["part"]].add(one["way"])
    both = {"gloo", "phalanx"}
    assert ways == {
        "calls": {*both, "itself"},
        "decode": {*both, "whole"},
        "fsdp": {*both, "alone"},
        "ddp": {*both, "alone"},
    }
    document = (tmp_path / "torch-benchmarks.md").read_text()
    assert "functional_all_reduce 64 KiB" in document
    assert "Not available" not in document
    assert str(tmp_path) not in document
    assert (tmp_path / "benchmark-torch.png").exists()


def fail_if_bad(stage, ways):
    """Be one rank of a launch in which rank 1 fails whenever a way is bad."""
    times = {}
    for way in ways:
        stage.enter(way)
        if way == "bad" and stage.rank == 1:
            raise ZeroDivisionError("it broke")
        times |= stage.take_turns({way: lambda: 1.0 + stage.rank}, 2)
    return times


def test_a_way_that_fails_is_left_out(benchmark, capsys):
    turns = benchmark("turns")
    outcome = turns.launch(fail_if_bad, ["good", "bad", "better"])
    assert turns.slowest_rank(outcome.ranks) == {"good": [2.0, 2.0], "better": [2.0, 2.0]}
    assert list(outcome.errors) == ["bad"]
    assert "ZeroDivisionError" in outcome.errors["bad"]
    assert "it broke" in outcome.errors["bad"]
    assert "bad" in capsys.readouterr().out


def test_every_rank_has_the_same_order_and_another_way_begins_each_round(benchmark, monkeypatch):
    turns, entered = benchmark("turns"), []
    stage = object.__new__(turns.Stage)
    monkeypatch.setattr(stage, "enter", entered.append, raising=False)
    times = stage.take_turns({way: lambda way=way: ord(way) for way in "abc"}, 4)
    assert "".join(entered) == "abcbcacababc"
    assert times == {way: [ord(way)] * 4 for way in "abc"}


def test_a_ratio_has_its_spread(benchmark):
    ratio = benchmark("turns").compare([2.0, 20.0, 3.0, 4.0, 5.0], [1.0, 10.0, 1.0, 1.0, 1.0])
    assert ratio == (3.0, 2.0, 4.0)


def torch_results(part, what="a thing", num_bytes=0, errors=(), **times):
    cell = {"part": part, "what": what, "bytes": num_bytes}
    return [
        *[{**cell, "way": way, "times": [time], "error": None} for way, time in times.items()],
        *[{**cell, "way": way, "times": [], "error": "it broke\nbadly"} for way in errors],
    ]


@pytest.mark.parametrize(
    ("results", "what", "outcome"),
    [
        (torch_results("calls", "all_reduce", 8, gloo=60.0, phalanx=1.0), "of 8 B", "met"),
        (torch_results("calls", "all_reduce", 8, gloo=40.0, phalanx=1.0), "of 8 B", "missed"),
        (torch_results("calls", "all_reduce", 9, gloo=40.0, phalanx=1.0), "of 8 B", ""),
        (torch_results("calls", "barrier", gloo=0.9, phalanx=1.0), "every call", "missed"),
        (torch_results("decode", gloo=1.4, phalanx=1.0), "decoding", "met"),
        (torch_results("decode", gloo=1.4, errors=["phalanx"]), "decoding", "missed"),
        (torch_results("decode", phalanx=1.0, errors=["gloo"]), "decoding", ""),
        (torch_results("fsdp", alone=1.0, gloo=1.05, phalanx=1.04), "FSDP2, every", "met"),
        (torch_results("fsdp", alone=1.0, gloo=1.05, phalanx=1.04), "FSDP2, where", ""),
        (torch_results("ddp", alone=1.0, gloo=1.2, phalanx=1.19), "DDP, where", "missed"),
        (torch_results("ddp", alone=1.0, gloo=1.2, phalanx=1.1), "DDP, where", "met"),
    ],
)
def test_targets_of_the_torch_backend_are_judged(benchmark, results, what, outcome):
    report = benchmark("torch_report")
    _, _, rows = report.target_table(report.TARGETS, report.cells({"results": results}))
    (row,) = [row for row in rows if what in row[0]]
    assert row[-1] == outcome


def test_what_failed_on_torch_is_said(benchmark):
    report = benchmark("torch_report")
    results = torch_results("decode", "width 8", gloo=1.0, whole=0.5, errors=["phalanx"])
    cells = report.cells({"results": results})
    assert report.failures(cells) == [
        "Tensor-parallel decoding: width 8 on Phalanx: it broke",
    ]
    ((_, _, (row,)),) = report.tables(cells)
    assert row[:4] == ["width 8", "1/s", "failed", "2/s"]
    assert "failed" in report.progress(results)


def test_a_decoder_sees_what_came_before_and_nothing_else(benchmark):
    models = benchmark("torch_models")
    torch.manual_seed(0)
    model = models.Decoder(width=64, layers=2)
    text, other = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([2, 7, 1, 8, 2, 8])
    logits = models.read(model, text)
    assert logits.shape == (5, models.VOCABULARY)
    models.read(model, other)
    torch.testing.assert_close(models.read(model, text), logits, rtol=0, atol=0)
    changed = models.read(model, torch.tensor([3, 1, 4, 9, 5]))
    torch.testing.assert_close(changed[:3], logits[:3], rtol=0, atol=0)
    assert not torch.equal(changed[4], logits[4])


@pytest.mark.parametrize(("model", "num_units"), [("tiny", 2), ("mlp", 3), ("many", 10)])
def test_shards_hold_every_layer_once(benchmark, model, num_units):
    module = benchmark("models").WORKLOADS[model].build()
    units = list(benchmark("torch_models").units(module))
    layers = [id(layer) for unit in units for layer in unit]
    assert len(units) == num_units
    assert len(set(layers)) == len(layers)


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
    collectives = benchmark("collectives")
    known = [Peer("gloo", "Gloo", "gloo")]
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
    targets = benchmark("targets")
    target = next(one for one in targets.TARGETS if one.other == "mpi" and one.covers(1 << 20))
    verdict = target.verdict(Results(numbers(**times)))
    assert (verdict.ratio if verdict else None) == ratio


def test_tests_on_ranks_are_measured_and_written_up(tmp_path):
    out = tmp_path / "numbers.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.testing", "--ways", "threads,threaded"),
            *("--rounds", "2", "--tests", "3", "--out", str(out), "--docs", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["results"]
    assert [one["way"] for one in found] == ["threads"] * 3 + ["threaded"] * 6 + ["threads"] * 3
    assert {one["error"] for one in found} == {None}
    assert all(one["seconds"] > 0 for one in found)
    document = (tmp_path / "testing-benchmarks.md").read_text()
    assert "MultiThreadedTestCase |" in document


def test_the_first_and_the_last_test_of_a_round_do_not_count(benchmark):
    testing = benchmark("testing")
    seconds = {"processes": [9, 0.1, 0.3, 9], "new": [4], "continuous": [9, 0.05, 0.05, 9]}
    data = {
        "first": [{"way": way, "seconds": 9} for way in seconds],
        "results": [
            {"way": way, "turn": turn, "index": index, "seconds": value, "error": None}
            for turn in range(2)
            for way, values in seconds.items()
            for index, value in enumerate(values)
        ],
    }
    rows = {row[0].strip("`"): row[1:] for row in testing.cost_table(data)[2]}
    assert rows['world(4, ranks="processes")'][:2] == ["200 ms", "9.00 s"]
    assert rows["MultiProcessTestCase"][0] == "4.00 s"
    ratios = rows['world(4, ranks="processes")'][2]
    assert "20x (20x - 20x) MultiProcessTestCase" in ratios
    assert "0.25x (0.25x - 0.25x) MultiProcContinuousTest" in ratios
    outcomes = {row[0]: row[2:] for row in testing.target_table(data)[2]}
    assert outcomes['world(4, ranks="processes")'] == ["200 ms", "missed"]
    assert outcomes["world(4)"] == ["not measured", ""]


def test_a_way_to_test_that_fails_is_said(benchmark):
    testing = benchmark("testing")
    entry = {"way": "threads", "turn": 0, "index": 1, "seconds": 1.0, "error": "E\nno plugin"}
    data = {"first": [entry], "results": [entry]}
    assert testing.failures(data) == ["world(4): no plugin"]
    assert testing.target_table(data)[2][0][2:] == ["failed", "missed"]
