"""A slice of the fuzz of faults, and of the programs that it starts from.

`scripts/fuzz_faults` runs as many as you like.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from trials.cases import Case, fault_case, right_case
from trials.faults import ENDINGS
from trials.oracle import foretell
from trials.programs import Program, Step
from trials.verdicts import Trial, expect, ranks_named, try_program

import phalanx as dist


def _passes(case: Case) -> Trial:
    trial = case.run()
    assert not trial.complaints, f"{case.replay}\n{trial}"
    return trial


@pytest.mark.parametrize("number", range(20))
def test_faults_among_threads_are_diagnosed(number: int) -> None:
    trial = fault_case(1, number, "threads").run()
    assert not trial.complaints, (
        f"scripts/fuzz_faults --seed 1 --ranks threads --only {number}\n{trial}"
    )


@pytest.mark.parametrize("number", range(4))
def test_faults_among_processes_are_diagnosed(number: int) -> None:
    trial = fault_case(1, number, "processes").run()
    assert not trial.complaints, (
        f"scripts/fuzz_faults --seed 1 --ranks processes --only {number}\n{trial}"
    )


@pytest.mark.parametrize("number", range(10))
def test_right_programs_do_well(number: int) -> None:
    trial = _passes(right_case(1, number, "threads"))
    assert {report.outcome for report in trial.reports} == {"finished"}


def test_the_oracle_knows_right_programs() -> None:
    for number in range(200):
        ends = foretell(right_case(2, number, "threads").program).ends
        assert {end.kind for end in ends} == {"finished"}


def _ends(*steps: list[Step], groups: tuple[tuple[int, ...], ...] = ()) -> list[set[str]]:
    world = tuple(range(len(steps)))
    program = Program((world, *groups), tuple(map(tuple, steps)))
    return [expected.outcomes for expected in expect(foretell(program)).ranks]


def test_the_oracle_knows_the_common_mistakes() -> None:
    barrier, reduce = Step("barrier"), Step("all_reduce")
    recv = [Step("recv", peer=1), Step("recv", peer=0)]
    assert _ends([recv[0]], [recv[1]]) == [{"Deadlock"}] * 2
    assert _ends([barrier], [reduce]) == [{"CollectiveMismatch"}] * 2
    assert _ends([barrier], []) == [{"PeerFailed"}, {"finished"}]
    assert _ends([barrier], [Step("kill")]) == [{"PeerFailed"}, {"kill"}]
    first, second = Step("barrier", group=1), Step("barrier", group=2)
    pairs = ((0, 1), (0, 1))
    assert _ends([first, second], [second, first], groups=pairs) == [{"Deadlock"}] * 2
    assert _ends([first, second], [first, second], groups=pairs) == [{"finished"}] * 2
    small, large = Step("send", peer=1), Step("send", peer=1, shape=(100_000,))
    assert _ends([small, barrier], [barrier, recv[1]]) == [{"finished"}] * 2
    got = Step("recv", peer=0, shape=(100_000,))
    assert _ends([large, barrier], [barrier, got]) == [{"Deadlock"}] * 2
    assert _ends([large, barrier], [got, barrier]) == [{"finished"}] * 2
    assert _ends([Step("stall")], [barrier])[1] == {"DistTimeout", "PeerFailed"}


def test_a_death_is_expected_to_spread() -> None:
    steps = [[Step("recv", peer=1)], [Step("recv", peer=2)], [Step("kill")], [Step("sleep")]]
    outcomes = _ends(*steps)
    assert outcomes[:3] == [{"PeerFailed"}, {"PeerFailed"}, {"kill"}]


def _spoil(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Have all_reduce write to its tensor, after or instead of doing what it should."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if before:
            tensor.add_(1)
        result = right(tensor, *args, **kwargs)
        tensor.add_(1)
        return result

    monkeypatch.setattr(dist, "all_reduce", wrong)


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("all_reduce", 1)
    program = Program(((0, 1),), ((step,), (step,)))
    assert not try_program(program, "threads").complaints
    _spoil(monkeypatch, before=False)
    assert "wrong result" in "".join(try_program(program, "threads").complaints)


def test_a_buffer_that_is_written_in_spite_of_an_error_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("all_reduce", 1)
    program = Program(((0, 1),), ((step,), (replace(step, shape=(2,)),)))
    assert not try_program(program, "threads").complaints
    _spoil(monkeypatch, before=True)
    assert "wrote to its output" in "".join(try_program(program, "threads").complaints)


def test_ranks_are_read_from_messages() -> None:
    assert ranks_named("ranks 0-2, 5  barrier()\nrank 7 did") == {0, 1, 2, 5, 7}
    assert ranks_named("rank 3 and 4 elements") == {3}
    assert ranks_named("frank 3, ranks 1, 2") == {1, 2}


def test_every_fault_can_be_injected() -> None:
    seen = {fault_case(3, number, "threads").fault for number in range(300)}
    assert seen >= {"skip", "swap", "shape", "dtype", "root", "reduce", "extra", "tag", *ENDINGS}
