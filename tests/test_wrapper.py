"""Ranks that ask for different things are told so: all of them, before anything is written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import COLLECTIVES, MOVING, REDUCING, ROOTED, SPELLED, Call, everybody_goes_on
from torch import Tensor
from typing_extensions import deprecated

import phalanx as dist
from phalanx import logs
from phalanx.testing import run_ranks

SIZE = 4
ODD = 2  # the rank that does something else
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def refused(call: Call) -> str:
    """Be refused, with all tensors as they were; return what was said."""
    with pytest.raises(dist.CollectiveMismatch) as caught:
        call.run()
    assert call.untouched()
    return str(caught.value)


def facts(text: str, name: str, *, sequence: int, group: Any = None) -> None:
    """Check what every report of a mismatch says: which operation, who asked for it, and where."""
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != ODD]
    assert f"#{sequence} on group " in text
    assert f"rank {ODD}" in text
    assert f"ranks {', '.join(map(str, others))}" in text
    assert repr("world" if group is None else group.group_name) in text
    assert text.count("calls.py:") >= 1  # where the call is made


def groups(where: str) -> Any:
    """Return the world, or make a group of some of its ranks."""
    return dist.new_group([1, 2, 3]) if where == "subgroup" else None


def _disagree(name: str, where: str, usual: dict[str, Any], odd: dict[str, Any]) -> str:
    group = groups(where)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    everybody_goes_on(group)
    call = Call(name, group, **(odd if dist.get_rank() == ODD else usual))
    text = refused(call)
    facts(text, name, sequence=2, group=group)
    everybody_goes_on(group)
    return text


def disagree(
    name: str, where: str, usual: dict[str, Any], odd: dict[str, Any], ranks: Any = "threads"
) -> str:
    """Have one rank call with other arguments; return what all of them, equally, were told."""
    told = run_ranks(_disagree, SIZE, name, where, usual, odd, ranks=ranks)
    told = told[1:] if where == "subgroup" else told
    assert len(set(told)) == 1
    return told[0]


WHERE = pytest.mark.parametrize("where", ["world", "subgroup"])


def _other_operation(name: str, other: str, where: str) -> None:
    group = groups(where)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    text = refused(Call(other if dist.get_rank() == ODD else name, group))
    facts(text, name, sequence=1, group=group)
    assert f"{SPELLED.get(name, name)}(" in text
    assert f"{SPELLED.get(other, other)}(" in text
    everybody_goes_on(group)


@WHERE
@pytest.mark.parametrize("name", COLLECTIVES)
def test_another_operation(name: str, where: str) -> None:
    other = "all_reduce" if name in ("barrier", "broadcast") else "broadcast"
    run_ranks(_other_operation, SIZE, name, other, where)


@pytest.mark.parametrize("other", ["barrier", "reduce", "all_gather"])
def test_another_operation_among_processes(other: str) -> None:
    run_ranks(_other_operation, SIZE, "all_reduce", other, "subgroup", ranks="processes")


@WHERE
@pytest.mark.parametrize("name", MOVING)
def test_another_shape(name: str, where: str) -> None:
    text = disagree(name, where, {"shape": (4, 3)}, {"shape": (4, 5)})
    assert "3]" in text
    assert "5]" in text


# Another shape of as many elements

# By rank: all have six elements, the last one more dimensions than a posting shows.
SHAPES = [(1, 6), (6,), (2, 3), (1, 1, 1, 1, 1, 1, 3, 2)]
SHAPED = ["all_reduce", "reduce", "broadcast", "gather", "scatter"]


def _filled(rank: int) -> Tensor:
    return torch.arange(6.0) + 10 * rank + 1


def _bring_other_shapes(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = _filled(rank).reshape(SHAPES[rank % 4])
    every = [_filled(each) for each in range(size)]
    if name == "all_reduce":
        dist.all_reduce(mine)
        assert mine.flatten().equal(sum(every))
    elif name == "reduce":
        dist.reduce(mine, 1)
        assert mine.flatten().equal(sum(every) if rank == 1 else every[rank])
    elif name == "broadcast":
        dist.broadcast(mine, 1)
        assert mine.flatten().equal(every[1])
    elif name == "gather":
        outputs = [torch.zeros(SHAPES[each % 4]) for each in range(size)] if rank == 1 else None
        dist.gather(mine, outputs, 1)
        for output, wanted in zip(outputs or [], every, strict=False):
            assert output.flatten().equal(wanted)
    elif name == "scatter":
        inputs = [each.reshape(3, 2) for each in every] if rank == 1 else None
        output = torch.zeros_like(mine)
        dist.scatter(output, inputs, 1)
        assert output.flatten().equal(every[rank])
    assert mine.shape == SHAPES[rank % 4]


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set the debug level of this process, and of those that it starts, for the test."""

    def choose(name: str) -> None:
        monkeypatch.setenv("PHALANX_DEBUG", name)
        dist.set_debug_level_from_env()

    before = dist.get_debug_level()
    yield choose
    dist.set_debug_level(before)
    logs.show(None)


@pytest.mark.parametrize("size", [2, SIZE])  # few ranks meet in another way than many
@pytest.mark.parametrize("name", SHAPED)
def test_another_shape_of_as_many_elements_passes(name: str, size: int) -> None:
    run_ranks(_bring_other_shapes, size, name)


@pytest.mark.parametrize("name", ["all_reduce", "scatter"])
def test_another_shape_passes_among_processes(name: str) -> None:
    run_ranks(_bring_other_shapes, 3, name, ranks="processes")


@pytest.mark.parametrize("name", SHAPED)
def test_another_shape_of_as_many_elements_is_refused_at_detail(
    name: str, level: Callable[[str], None]
) -> None:
    level("DETAIL")
    text = disagree(name, "world", {"shape": (4, 3)}, {"shape": (3, 4)})
    assert "float32[4, 3]" in text
    assert "float32[3, 4]" in text
    assert "equally many elements in different shapes" in text
    assert "DETAIL" in text


@pytest.mark.parametrize("name", sorted({*MOVING} - {*SHAPED}))
def test_what_may_differ_in_size_may_differ_in_shape_at_detail(
    name: str, level: Callable[[str], None]
) -> None:
    level("DETAIL")
    run_ranks(lambda: Call(name, shape=(4, 3) if dist.get_rank() == ODD else (12, 1)).run(), SIZE)


@pytest.mark.parametrize("size", [2, SIZE])
def test_another_shape_is_logged_once_per_line(
    size: int, level: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    def program() -> None:
        for _ in range(3):
            _bring_other_shapes("all_reduce")
        _bring_other_shapes("broadcast")
        work = dist.all_reduce(torch.ones(SHAPES[dist.get_rank()]), async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather([torch.ones(6)] * size, torch.ones(SHAPES[dist.get_rank()]))

    level("INFO")
    with caplog.at_level(logging.INFO, "phalanx.collectives"):
        run_ranks(program, size)
    said = [r.getMessage() for r in caplog.records if r.name == "phalanx.collectives"]
    assert [text.split()[2] for text in said] == ["all_reduce", "broadcast", "all_reduce"]
    assert all("[rank 0]" in text and "different shapes" in text for text in said)
    assert "rank 0  all_reduce(float32[1, 6], SUM)" in said[0]
    assert "rank 1  all_reduce(float32[6], SUM)" in said[0]
    caplog.clear()
    level("OFF")
    with caplog.at_level(logging.INFO, "phalanx.collectives"):
        run_ranks(program, size)
    assert not [r for r in caplog.records if r.name == "phalanx.collectives"]


def _be_at_several_levels() -> None:
    rank = dist.get_rank()
    dist.set_debug_level(list(dist.DebugLevel)[rank])
    for name in SHAPED:
        _bring_other_shapes(name)
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.all_reduce(torch.ones(4 + rank))
    assert "of 4 elements on rank 0" in str(caught.value)


def test_ranks_at_several_levels_agree_on_what_is_refused() -> None:
    run_ranks(_be_at_several_levels, 3, ranks="processes")


def test_dimensions_that_a_report_has_no_room_for_count() -> None:
    def program() -> str:
        tensor = torch.ones(1, 2, 1, 1, 1, 1, 3 + dist.get_rank())
        with pytest.raises(dist.CollectiveMismatch) as caught:
            dist.all_reduce(tensor)
        (entry,) = dist.group.WORLD.backend.history()
        assert entry["bytes"] == tensor.nbytes
        return str(caught.value)

    for text in run_ranks(program, 2):
        assert "rank 0  all_reduce(float32[1, 2, 1, 1, 1, 1, ...] of 6 elements, SUM)" in text
        assert "6 elements on rank 0 and of 8 on rank 1" in text


@WHERE
@pytest.mark.parametrize("name", MOVING)
def test_another_dtype(name: str, where: str) -> None:
    # As many bytes, so that nothing but the dtype tells them apart.
    text = disagree(name, where, {"dtype": torch.float32}, {"dtype": torch.int32})
    assert "float32[" in text
    assert "int32[" in text


@pytest.mark.parametrize(("name", "change"), [("all_reduce", "dtype"), ("scatter", "shape")])
def test_another_tensor_among_processes(name: str, change: str) -> None:
    usual, odd = {
        "dtype": ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
        "shape": ({"shape": (100_000,)}, {"shape": (100_001,)}),
    }[change]
    disagree(name, "world", usual, odd, ranks="processes")


@WHERE
@pytest.mark.parametrize("name", REDUCING)
def test_another_reduce_op(name: str, where: str) -> None:
    text = disagree(name, where, {"op": SUM}, {"op": MAX})
    assert "SUM" in text
    assert "MAX" in text


@WHERE
@pytest.mark.parametrize("name", ROOTED)
def test_another_root(name: str, where: str) -> None:
    text = disagree(name, where, {"root": 1}, {"root": 2})
    argument = "src" if name in ("broadcast", "scatter") else "dst"
    # Roots are told as users give them, as ranks of the world.
    shift = 1 if where == "subgroup" else 0
    assert f"{argument}={1 + shift}" in text
    assert f"{argument}={2 + shift}" in text


def _splits(kind: str) -> str:
    rank = dist.get_rank()
    dist.barrier()
    inputs, outputs = [2, 2, 2], [2, 2, 2]
    if rank == 1 and kind == "sends more":
        inputs = [2, 2, 5]
    elif rank == 1 and kind == "expects more":
        outputs = [4, 2, 2]
    elif rank == 1 and kind == "the same sum":
        inputs = [1, 2, 3]
    source, target = torch.full((sum(inputs), 2), rank), torch.full((sum(outputs), 2), rank)
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.all_to_all_single(target, source, outputs, inputs)
    assert (target == rank).all()
    everybody_goes_on()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sends more", "expects more", "the same sum"])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_splits_that_do_not_fit(kind: str, ranks: Any) -> None:
    told = run_ranks(_splits, 3, kind, ranks=ranks)
    assert len(set(told)) == 1
    assert "all_to_all #2" in told[0]
    assert "test_wrapper.py:" in told[0]
    # Between whom, and how much was sent and expected.
    giver, has, taker, expects = {
        "sends more": (1, 10, 2, 4),
        "expects more": (0, 4, 1, 8),
        "the same sum": (1, 2, 0, 4),
    }[kind]
    assert f"rank {giver} has {has} " in told[0]
    assert f"rank {taker}, which expects {expects}" in told[0]


def _room_that_does_not_fit(name: str) -> str:
    """Rank 1 has too little room for what rank 0 has for it."""
    rank = dist.get_rank()
    inputs = [torch.full((3,), rank) for _ in range(2)]
    outputs = [torch.full((2 if rank == 1 and i == 0 else 3,), rank) for i in range(2)]
    with pytest.raises(dist.CollectiveMismatch) as caught:
        getattr(dist, name)(outputs, inputs[0] if name == "all_gather" else inputs)
    assert all((output == rank).all() for output in outputs)
    everybody_goes_on()
    return str(caught.value)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_room_that_does_not_fit(name: str) -> None:
    told = run_ranks(_room_that_does_not_fit, 2, name)
    assert told[0] == told[1]
    assert "rank 0 has 3 " in told[0]
    assert "rank 1, which expects 2" in told[0]


def _coalesce(tensors: list[torch.Tensor], rooms: list[list[torch.Tensor]]) -> None:
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)


COALESCED = {
    "all_reduce_coalesced": lambda tensors, rooms: dist.all_reduce_coalesced(tensors),
    "async": lambda tensors, rooms: dist.all_reduce_coalesced(tensors, async_op=True).wait(),
    "all_gather_coalesced": lambda tensors, rooms: dist.all_gather_coalesced(rooms, tensors),
    "manager": _coalesce,
}


def _count_of_tensors(kind: str) -> str:
    rank = dist.get_rank()
    tensors = [torch.full((4,), float(rank)) for _ in range(2 if rank == 1 else 3)]
    rooms = [[torch.full((4,), float(rank)) for _ in tensors] for _ in range(2)]
    with pytest.raises(dist.CollectiveMismatch) as caught:
        COALESCED[kind](tensors, rooms)
    everything = [*tensors, *(room for each in rooms for room in each)]
    assert all((tensor == rank).all() for tensor in everything)
    return str(caught.value)


@pytest.mark.parametrize("kind", COALESCED)
def test_count_of_tensors(kind: str) -> None:
    told = run_ranks(_count_of_tensors, 2, kind)
    assert told[0] == told[1]
    assert "of 3" in told[0]
    assert "of 2" in told[0]


def _goes_on_after_counts() -> None:
    rank = dist.get_rank()
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce_coalesced([torch.ones(2)] * (1 + rank))
    everybody_goes_on()
    tensors = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == 2).all() for tensor in tensors)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_group_goes_on_after_counts_that_differ(ranks: Any) -> None:
    run_ranks(_goes_on_after_counts, 2, ranks=ranks)


def _skips() -> str:
    rank = dist.get_rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
    if rank != ODD:
        text = refused(Call("reduce", None, (5,)))  # the one that the other skips
    else:
        text = refused(Call("all_gather", None, (5,)))
    facts(text, "reduce", sequence=4)
    return text


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_that_skips_an_operation(ranks: Any) -> None:
    told = run_ranks(_skips, SIZE, ranks=ranks)
    assert len(set(told)) == 1


def _hangs(where: str, release: threading.Event) -> str:
    group = groups(where)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    dist.barrier(group)
    if dist.get_rank() == ODD:
        release.wait(30)
        return ""
    try:
        with pytest.raises(dist.DistTimeout) as caught:
            dist.barrier(group, timeout=0.3)
    finally:
        release.set()
    return str(caught.value)


@WHERE
def test_a_rank_that_hangs_is_named(where: str) -> None:
    told = run_ranks(_hangs, SIZE, where, threading.Event())
    for rank, text in enumerate(told):
        if rank != ODD and text:
            assert f"rank {ODD}" in text
            assert "barrier #2" in text
    assert sum(map(bool, told)) == (2 if where == "subgroup" else 3)


def _three_ways() -> str:
    name = ["all_reduce", "broadcast", "barrier", "all_reduce"][dist.get_rank()]
    return refused(Call(name))


def test_every_kind_has_a_line_and_equal_ranks_share_one() -> None:
    told = run_ranks(_three_ways, SIZE)
    assert len(set(told)) == 1
    lines = {line.split("  ")[1].strip(): line for line in told[0].splitlines() if "  " in line}
    assert "all_reduce(" in lines["ranks 0, 3"]
    assert "broadcast(" in lines["rank 1"]
    assert "barrier(" in lines["rank 2"]


def _asynchronous() -> None:
    rank = dist.get_rank()
    first = dist.all_reduce(torch.ones(2), async_op=True)
    tensor = torch.full((3 + rank,), float(rank))
    second = dist.all_reduce(tensor, async_op=True)
    third_tensor = torch.ones(1)
    third = dist.all_reduce(third_tensor, async_op=True)
    assert first.wait()
    with pytest.raises(dist.CollectiveMismatch, match="all_reduce #2"):
        second.wait()
    assert isinstance(second.exception(), dist.CollectiveMismatch)
    assert "_asynchronous" in str(second.exception())
    assert (tensor == rank).all()
    assert third.wait()
    assert third_tensor.item() == 2


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_asynchronous_mismatch_is_told_by_its_work(ranks: Any) -> None:
    run_ranks(_asynchronous, 2, ranks=ranks)


def _repeatedly() -> None:
    rank = dist.get_rank()
    for number in range(1, 20, 2):
        with pytest.raises(dist.CollectiveMismatch, match=f"#{number} "):
            dist.all_reduce(torch.ones(number + rank))
        everybody_goes_on()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_sequence_numbers_count_refused_operations(ranks: Any) -> None:
    run_ranks(_repeatedly, 3, ranks=ranks)


def _raises_its_mismatch() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_all_are_told_even_if_nobody_catches_it(ranks: Any) -> None:
    for _ in range(3):
        told = run_ranks(_raises_its_mismatch, 4, ranks=ranks, return_exceptions=True)
        assert [type(each) for each in told] == [dist.CollectiveMismatch] * 4


@pytest.mark.filterwarnings("ignore:old")
def test_the_decorator_of_deprecated_functions_is_nobodys_line() -> None:
    decorated = deprecated("old", category=FutureWarning)(dist.all_reduce)

    def mismatch() -> str:
        with pytest.raises(dist.CollectiveMismatch) as caught:
            decorated(torch.zeros(1 + dist.get_rank()))
        return str(caught.value)

    for text in run_ranks(mismatch, 2):
        assert "typing_extensions" not in text
        assert "test_wrapper.py" in text
