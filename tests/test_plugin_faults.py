"""Faults and orders in tests of the plugin."""

from __future__ import annotations

from typing import Any

import pytest
from plugin_runs import run, run_apart

pytest_plugins = ["pytester"]

KILLED = """
def train():
    for _ in range(5):
        dist.all_reduce(torch.ones(1))

@pytest.mark.world(3, ranks={kind!r})
def test_expected(world):
    with world.faults(kill=2, at="all_reduce#3"), pytest.raises(dist.PeerFailed):
        train()

@pytest.mark.world(3, ranks={kind!r})
def test_unexpected(world):
    with world.faults(kill=2, at="all_reduce#3"):
        train()

@pytest.mark.world(3, ranks={kind!r})
def test_afterwards():
    train()
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_killed_rank_is_not_what_fails(
    pytester: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    result = run_apart(pytester, monkeypatch, KILLED.format(kind=kind))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*PeerFailed: all_reduce #3 on group 'world'*rank 2 *was killed by *",
            "E*under faults(kill=2, at='all_reduce#3')",
            "E*raised by ranks 0, 1 of 3",
            "FAILED *::test_unexpected*",
        ]
    )


def test_a_seed_that_was_drawn_is_told(pytester: Any) -> None:
    result = run(
        pytester,
        """
@pytest.mark.world(2)
def test(world):
    with world.faults(reorder=True):
        dist.barrier()
    assert world.rank == 0
""",
    )
    result.stdout.re_match_lines([r"E\s+under faults\(reorder=True, seed=\d+\)"])


ORDERS = """
@pytest.mark.world(2, interleavings=50)
def test(rank):
    x = torch.ones(1)
    work = dist.all_reduce(x, group=dist.new_group(), async_op=True)
    dist.barrier()
    assert x.item() == 2, "too early"
    work.wait()
"""


def test_orders_are_found_and_run_again(pytester: Any) -> None:
    found = run(pytester, ORDERS)
    found.assert_outcomes(failed=1)
    (again,) = [line for line in found.outlines if "to run it again" in line]
    seed = again.partition("--world-seed=")[2].split()[0]
    replayed = run(pytester, ORDERS, f"--world-seed={seed}")
    replayed.assert_outcomes(failed=1)
    turns = [line for line in found.outlines if line.startswith("E         rank ")]
    assert turns
    assert turns == [line for line in replayed.outlines if line.startswith("E         rank ")]
