"""The examples run, under every launcher, and go on after they were stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import phalanx as dist

EXAMPLES = Path(__file__).parent.parent / "examples"
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
SMALL = [
    "--batch=2",
    "--context=16",
    "--width=16",
    "--layers=1",
    "--sample=8",
    "--dropout=0.1",
    "--every=4",
]


def start(script, *args, **environment):
    """Start a script in a session of its own."""
    return subprocess.Popen(
        [sys.executable, script, *args],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Return what a script has printed, as output and as errors."""
    try:
        return process.communicate(timeout=100)
    finally:
        process.kill()


def train(out, *args, **environment):
    """Run the GPT with few and small steps; return what it printed."""
    process = start(EXAMPLES / "train_gpt.py", *SMALL, f"--out={out}", *args, **environment)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    return output


def saved(out):
    return torch.load(out / "checkpoint.pt")


def differences(one, other, name="checkpoint"):
    """Name where nested values differ, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield f"{name} by {(one.double() - other.double()).abs().max():.3g}"
    elif isinstance(one, dict | list | tuple) and len(one) == len(other):
        if isinstance(one, dict) and one.keys() != other.keys():
            yield f"{name}: {list(one)}, {list(other)}"
            return
        for key in one if isinstance(one, dict) else range(len(one)):
            yield from differences(one[key], other[key], f"{name}[{key!r}]")
    elif one != other:
        yield f"{name}: {one}, {other}"


@pytest.mark.parametrize(
    ("args", "environment", "ranks"),
    [([], {}, 2), (["--ranks=3", "--threads"], {}, 3), ([], LAUNCHED, 1)],
    ids=["processes", "threads", "launched"],
)
def test_a_gpt_is_trained(args, environment, ranks, tmp_path):
    output = train(tmp_path, "--steps=6", *args, **environment)
    assert f"ranks: {ranks}," in output
    assert re.search(r"step 4 .*validation \d\.\d+", output)
    assert "6/6" in output
    assert "tokens/s" in output
    assert "def read(self, " in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(saved(tmp_path)["streams"]) == ranks


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return what a run leaves that was not stopped."""
    out = tmp_path_factory.mktemp("whole")
    train(out, "--steps=10")
    return saved(out)


KILL = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_gpt
import phalanx as dist

learning_rate = train_gpt.learning_rate


def deadly(step, *args):
    if step == 6 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return learning_rate(step, *args)


train_gpt.learning_rate = deadly
if __name__ == "__main__":
    train_gpt.main()
"""


def test_a_run_whose_rank_was_killed_goes_on_as_if_nothing_had_happened(tmp_path, whole):
    script = tmp_path / "killed.py"
    script.write_text(KILL.format(examples=str(EXAMPLES)))
    process = start(script, *SMALL, "--steps=10", f"--out={tmp_path}")
    _, errors = finish(process)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    assert len(saved(tmp_path)["curves"]["training"]) == 4

    assert "from step 4" in train(tmp_path, "--steps=10")
    assert not list(differences(saved(tmp_path), whole))


def test_threads_train_the_same_bits_as_processes(tmp_path, whole):
    train(tmp_path, "--steps=10", "--threads")
    assert not list(differences(saved(tmp_path), whole))


def test_an_interrupted_run_goes_on_with_other_ranks(tmp_path):
    process = start(EXAMPLES / "train_gpt.py", *SMALL, "--steps=1000000", f"--out={tmp_path}")
    while process.poll() is None and not (tmp_path / "checkpoint.pt").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = finish(process)
    assert "goes on from the last checkpoint" in errors
    assert "Traceback" not in errors

    step = len(saved(tmp_path)["curves"]["training"])
    output = train(tmp_path, f"--steps={step + 2}", "--ranks=1")
    assert f"from step {step}" in output
    assert f"{step + 2}/{step + 2}" in output


def test_a_finished_run_is_not_repeated_unless_fresh(tmp_path):
    train(tmp_path, "--steps=3", "--threads")
    before = saved(tmp_path)
    assert "step 3 of 3" in train(tmp_path, "--steps=3", "--threads")
    assert not list(differences(saved(tmp_path), before))
    train(tmp_path, "--steps=3", "--threads", "--fresh", "--seed=1")
    assert list(differences(saved(tmp_path)["model"], before["model"]))

    process = start(EXAMPLES / "train_gpt.py", "--threads", f"--out={tmp_path}")
    _, errors = finish(process)
    assert process.returncode == 1
    assert re.search(r"checkpoint\.pt .*'width': 16.*'width': 128.*--fresh", errors)


def digits(*args):
    process = start(EXAMPLES / "digits.py", "--epochs=4", *args)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    return output


def test_digits_are_recognised_by_threads_as_by_processes():
    output = digits()
    assert float(re.findall(r"accuracy (\S+)%", output)[-1]) > 95
    assert "taken for" in output
    assert digits("--threads") == output


def _run_all(snippets, names):
    names = dict(names)
    for snippet in snippets:
        exec(snippet, names)


def test_the_snippets_of_the_training_document_run():
    document = (EXAMPLES.parent / "docs" / "training.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    names = {}
    exec(first, names)
    assert len(others) > 10
    dist.run_threads(_run_all, 2, others, names)
