"""PyTorch's own tests: what stands in for torch.distributed in them, and how they are judged."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from pytorch_suite import document, expectations, results, ways
from pytorch_suite.expectations import Difference, Outcome, Reasons
from pytorch_suite.results import Row
from pytorch_suite.run import is_selected
from pytorch_suite.runs import RUNS, SLICE

TESTS = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
HERE = Path(__file__).resolve().parent

# Only a test that needs NCCL itself uses these.
NOT_OURS = {"BroadcastOptions", "ProcessGroupNCCL"}


def python(code, *arguments):
    """Run a program in a process of its own: importing the stand-in changes it for good."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_names_are_there():
    source = TESTS.read_text()
    used = set(re.findall(r"\bdist\.(\w+)", source)) - NOT_OURS
    imported = {name for _, name in ways.imported_names(source)} - {"dist"}
    assert len(used) > 50
    assert len(imported) > 15
    missing = python(
        "import sys; from phalanx.testing import pytorch_suite\n"
        "print(*[name for name in sys.argv[1:] if not hasattr(pytorch_suite, name)])",
        *sorted(used),
        *sorted(imported),
        "SyncBatchNorm",  # which the tests take from torch.nn
    )
    assert missing.split() == []


def test_phalanx_answers_to_other_names():
    python(
        """
import torch
from phalanx.testing import pytorch_suite as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "gloo" and dist.group.WORLD.name() == "gloo"
assert dist.get_backend(dist.new_group(backend="nccl")) == "nccl"
assert type(torch.distributed.new_group()) is dist.ProcessGroup

with torch.autograd.profiler.profile(record_shapes=True) as profile:
    dist.all_reduce(torch.ones(3, dtype=torch.complex64))
(event,) = [e for e in profile.function_events if e.name.startswith("gloo:")]
assert event.is_async and event.input_shapes == [[3, 2]]

model = dist.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0], output_device=0)
assert model._get_ddp_logging_data()["gloo_num_threads"] == 2
dist.destroy_process_group()
"""
    )


def test_defaults_of_torch_are_replaced():
    python(
        """
import sys, types
import torch.distributed

def reduce(self, fn=torch.distributed.all_reduce, dst=None, kind=torch.float): pass

base = type("_DistTestBase", (), {"reduce": reduce})
tests = types.SimpleNamespace(DistributedTest=types.SimpleNamespace(_DistTestBase=base))
sys.modules["torch.testing._internal.distributed.distributed_test"] = tests
from phalanx.testing import pytorch_suite as dist
assert reduce.__defaults__ == (dist.all_reduce, None, torch.float)
"""
    )


def start(*arguments, **options):
    """Start a run of PyTorch's tests."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-m", "pytorch_suite.run", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment | options,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", ["as-gloo-3", "package-3"])
def test_slice_does_as_expected(name, tmp_path):
    expected = expectations.read(name)
    assert {expected[test].status for test in SLICE} == {"pass"}
    path = tmp_path / "results.json"
    selection = ["-k", f"^({'|'.join(SLICE)})$"]
    way, size = RUNS[name].way, RUNS[name].world_size
    with start("--way", way, "--world-size", size, "--json", path, *selection) as process:
        output, _ = process.communicate()
    assert path.exists(), output
    rows = results.read(path)
    assert {row.test for row in rows} == {*SLICE}
    seen = {row.test: Outcome.of(row) for row in rows}
    found = expectations.differences(expected, seen, is_complete=False)
    details = {row.test: row.detail for row in rows}
    assert not found, "\n\n".join(f"{one}\n{details[one.test]}" for one in found)


def children(pid):
    """Return the processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_nothing_is_left_of_an_interrupted_run(tmp_path):
    selection = ["-k", "^test_monitored_barrier_gloo$"]  # it waits for ranks that do not come
    with start("--way", "gloo", "--world-size", 3, *selection, TMPDIR=str(tmp_path)) as process:
        limit = time.monotonic() + 60
        while len(ranks := children(process.pid)) < 3:
            assert process.poll() is None
            assert time.monotonic() < limit
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert list(tmp_path.iterdir()) == []


def test_every_rank_counts():
    skips = {73: "small world"}
    assert results.judge([0, 0, 0], skips) is None
    assert results.judge([73, 73], skips) == "small world"
    for codes, told in [
        ([0, 10], "rank 1: exit code 10"),
        ([0, -9], "rank 1: killed by SIGKILL"),
        ([None, 0], "rank 0: too late"),
        ([73, 0], "rank 0: exit code 73"),
        ([73, 74], "rank 1: exit code 74"),
    ]:
        with pytest.raises(AssertionError, match=told):
            results.judge(codes, skips)


def test_selection():
    assert is_selected("test_a", [], [])
    assert is_selected("test_all_reduce", ["reduce", "gather"], ["coalesced"])
    assert not is_selected("test_all_reduce_coalesced", ["reduce"], ["coalesced"])
    assert not is_selected("test_all_reduce_sum", ["^test_all_reduce$"], [])


def test_results_are_written_and_summed_up(tmp_path):
    rows = [
        Row("test_a", "pass", "", 1.5, [0, 0]),
        Row("test_b", "fail", "first line\nrank 1:\nValueError: no", 2.5, [0, 10]),
        Row("test_c", "skip", "no GPU"),
    ]
    path = tmp_path / "below" / "results.json"
    results.write(path, {"way": "package"}, rows)
    assert results.read(path) == rows
    text = results.summary(rows)
    assert "test_b" in text
    assert "ValueError: no" in text
    assert text.endswith("1 pass, 1 skip, 1 fail in 4 s")


def test_outcomes_are_written_one_a_line():
    outcomes = {"test_b": Outcome("skip", "no GPU: none"), "test_a": Outcome("pass")}
    text = expectations.render(outcomes)
    assert text == "test_a pass\ntest_b skip: no GPU: none\n"
    assert expectations.parse(text) == outcomes
    with pytest.raises(ValueError, match="'passed' of test_a"):
        expectations.parse("test_a passed\n")


def test_what_differs_is_found():
    fine, bad, skipped = Outcome("pass"), Outcome("fail"), Outcome("skip", "no GPU")
    expected = {"test_a": fine, "test_b": bad, "test_c": skipped, "test_d": fine}
    seen = {"test_a": bad, "test_b": fine, "test_c": skipped, "test_e": fine}
    worse, better = Difference("test_a", fine, bad), Difference("test_b", bad, fine)
    gone, new = Difference("test_d", fine, None), Difference("test_e", None, fine)
    assert expectations.differences(expected, seen, True) == [worse, better, gone, new]
    assert expectations.differences(expected, seen, False) == [worse, better, new]
    assert [one.is_progress for one in (worse, better, gone, new)] == [False, True, False, True]


def test_reasons_are_found_by_family_then_by_name_then_by_what_is_said():
    reasons = Reasons(
        """
[skips]
'no (GPU|TPU)' = "no device"
[tests]
test_a = "why a"
[torch]
test_a = "why a with torch"
[package]
"""
    )
    no_gpu = Outcome("skip", "no GPU")
    assert reasons.find("torch", "test_a", no_gpu) == ("torch", "test_a")
    assert reasons.find("package", "test_a", Outcome("fail")) == ("tests", "test_a")
    assert reasons.find("package", "test_b", no_gpu) == ("skips", "no (GPU|TPU)")
    assert reasons.text("skips", "no (GPU|TPU)") == "no device"
    outcomes = {"test_b": Outcome("fail"), "test_c": Outcome("pass"), "test_d": no_gpu}
    assert reasons.missing("package", outcomes) == ["test_b"]


@pytest.fixture(scope="module")
def committed():
    """Return what is expected of each run."""
    return {name: expectations.read(name) for name in RUNS}


@pytest.fixture(scope="module")
def reasons():
    return Reasons(expectations.REASONS.read_text())


def test_every_test_that_does_not_pass_has_a_reason(committed, reasons):
    for name, outcomes in committed.items():
        assert len(outcomes) > 300
        assert reasons.missing(RUNS[name].family, outcomes) == []


def test_no_reason_is_idle(committed, reasons):
    used = {
        reasons.find(RUNS[name].family, test, outcome)
        for name, outcomes in committed.items()
        for test, outcome in outcomes.items()
        if outcome.status != "pass"
    }
    assert reasons.all() - used == set()


@pytest.mark.parametrize("family", ["torch", "package"])
def test_skips_of_a_kind_are_only_for_tests_that_another_run_passes(family, committed, reasons):
    runs = [outcomes for name, outcomes in committed.items() if RUNS[name].family == family]
    passing = {test for run in runs for test, outcome in run.items() if outcome.status == "pass"}
    for run in runs:
        for test in run.keys() - passing:
            table, _ = reasons.find(family, test, run[test]) or ("none", test)
            assert table != "skips", test


def test_document_is_up_to_date():
    text = document.PATH.read_text()
    assert document.rendered(text) == text
