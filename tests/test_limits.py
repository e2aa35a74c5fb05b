"""Machines that set limits or deny calls: jobs run all the same, or say what they lack."""

import os
from functools import partial

import pytest
from denials import deny
from launches import run

AFFINITY = "import os; print(sorted(os.sched_getaffinity(0)))"


def test_ranks_run_unpinned_where_cores_cannot_be_chosen(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(AFFINITY)
    found = run("-n", 2, "--pin", "cores", script, preexec_fn=partial(deny, "sched_setaffinity"))
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("not pinned") == 1
    assert "sched_setaffinity" in found.stderr
    assert "Operation not permitted" in found.stderr
    everywhere = str(sorted(os.sched_getaffinity(0)))
    assert [line.endswith(everywhere) for line in found.stdout.splitlines()] == [True, True]


def test_ranks_run_on_cores_of_their_own(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    script = tmp_path / "show.py"
    script.write_text(AFFINITY)
    found = run("-n", 2, "--pin", "cores", script)
    places = {line.split(maxsplit=1)[1] for line in found.stdout.splitlines()}
    assert len(places) == 2, found.stdout
    assert "not pinned" not in found.stderr
