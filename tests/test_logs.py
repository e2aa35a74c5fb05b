"""Logging: who speaks, where it goes, and that nothing is configured unasked."""

import logging
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

import phalanx as dist
from phalanx import logs
from phalanx.testing.ranks import run_ranks

# A world of one rank, between what a test puts before and after it.
WORLD = """
import logging
import phalanx as dist
{before}
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
{after}
"""


@pytest.fixture
def python(monkeypatch):
    """Run a program with some variables in its environment; return its stdout and stderr."""
    for name in ("PHALANX_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)

    def run(before="", after="", **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        program = WORLD.format(before=dedent(before), after=dedent(after))
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def records(caplog, area):
    return [record for record in caplog.records if record.name == f"phalanx.{area}"]


def test_worlds_and_groups_are_logged_with_their_rank(caplog):
    def program():
        dist.new_group([0, 2])

    with caplog.at_level(logging.DEBUG, "phalanx"):
        run_ranks(program, 3)
    said = {(r.rank, r.levelname, r.getMessage().split()[2]) for r in records(caplog, "world")}
    assert said == {(rank, "INFO", verb) for rank in range(3) for verb in ("joined", "left")}
    created = [r for r in records(caplog, "group") if "created group '1'" in r.getMessage()]
    assert sorted(r.rank for r in created) == [0, 2]
    assert all(f"[rank {r.rank}]" in r.getMessage() and "[0, 2]" in r.getMessage() for r in created)
    destroyed = [r for r in records(caplog, "group") if "destroyed" in r.getMessage()]
    assert {r.levelno for r in destroyed} == {logging.DEBUG}
    assert len(destroyed) == 5
    assert records(caplog, "launch")[0].rank == -1


def test_stores_say_where_they_are(caplog):
    with caplog.at_level(logging.INFO, "phalanx"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    texts = [record.getMessage() for record in records(caplog, "store")]
    assert len(texts) == 2
    assert all(f"127.0.0.1:{store.port}" in text for text in texts)


def test_a_failure_is_logged_once(caplog):
    def program():
        work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
        for _ in range(2):
            with pytest.raises(dist.CollectiveMismatch):
                work.wait()
        assert isinstance(work.exception(), dist.CollectiveMismatch)

    with caplog.at_level(logging.INFO, "phalanx"):
        run_ranks(program, 2)
    failures = [r for r in records(caplog, "debug") if r.levelno == logging.ERROR]
    assert sorted(r.rank for r in failures) == [0, 1]
    for record in failures:
        assert "all_reduce #1" in record.getMessage()
        assert "CollectiveMismatch" in record.getMessage()


def test_of_a_monitored_barrier_only_the_verdict_is_logged(caplog):
    def program():
        if dist.get_rank() < 2:
            with pytest.raises(dist.DistBackendError):  # timed out, or told that rank 0 did
                dist.monitored_barrier(timeout=0.3)
        dist.barrier()

    with caplog.at_level(logging.INFO, "phalanx"):
        run_ranks(program, 3)
    failures = [r for r in records(caplog, "debug") if r.levelno == logging.ERROR]
    assert {r.rank for r in failures} <= {0, 1}
    assert all("monitoredBarrier" in r.getMessage() for r in failures)
    assert [r.rank for r in failures].count(0) == 1


def test_nothing_is_configured_unasked(python):
    loggers = """
    for name in ("phalanx", "phalanx.world", "phalanx.debug", "phalanx.store", None):
        logger = logging.getLogger(name)
        print(logger.handlers, logger.level, logger.filters, logger.propagate)
    """
    out, err = python(before=loggers, after=loggers)
    lines = out.splitlines()
    assert lines[:4] == lines[5:9] == ["[] 0 [] True"] * 4
    assert lines[4] == lines[9] == "[] 30 [] True"
    assert err == ""


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"TORCH_CPP_LOG_LEVEL": "INFO"}, {"INFO"}),
        ({"TORCH_CPP_LOG_LEVEL": "0"}, {"INFO"}),
        ({"TORCH_CPP_LOG_LEVEL": "error"}, set()),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, {"INFO"}),
        ({"PHALANX_DEBUG": "DETAIL"}, {"INFO", "DEBUG"}),
        ({"PHALANX_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}, {"INFO", "DEBUG"}),
        ({"PHALANX_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "2"}, set()),
        ({"PHALANX_DEBUG": "OFF"}, set()),
    ],
)
def test_the_environment_asks_for_records_on_stderr(python, environment, shown):
    out, err = python(**environment)
    # Written in the form: date, time, level, logger, text.
    assert {line.split()[2] for line in err.splitlines()} == shown
    assert out == ""
    assert all("phalanx." in line and "[rank 0]" in line for line in err.splitlines())


def test_the_users_own_handler_gets_the_records(python):
    out, err = python(
        before="""
        import sys
        logging.basicConfig(stream=sys.stdout, format="%(rank)d|%(levelname)s|%(name)s")
        """,
        after="print(logging.getLogger('phalanx').handlers)",
        PHALANX_DEBUG="INFO",
    )
    assert "0|INFO|phalanx.world" in out
    assert "[]" in out
    assert err == ""


def test_the_users_own_level_holds(python):
    out, err = python(
        before="logging.getLogger('phalanx').setLevel(logging.ERROR)", PHALANX_DEBUG="DETAIL"
    )
    assert out == err == ""


def test_showing_can_be_withdrawn():
    root = logging.getLogger("phalanx")
    before = root.level, list(root.handlers)
    logs.show(logging.INFO)
    assert root.level == logging.INFO
    logs.show(None)
    assert (root.level, root.handlers) == before
