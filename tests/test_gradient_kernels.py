"""Copies of many tensors in one call, and sums of squares taken on the way."""

from __future__ import annotations

import math

import pytest
import torch

import phalanx as dist
from phalanx import _native
from phalanx.testing import run_ranks
from phalanx.testing.memory import Exchange, MemoryBackend
from phalanx.types import DTYPES, ReduceOp

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize > 1]
FLOATS += [dtype for dtype in DTYPES if dtype.is_complex]


def _random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(parts).to(dtype) if dtype.is_complex else parts[..., 0].to(dtype)


def _squares(tensor):
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.double().square().sum().item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("measure", [False, True])
def test_many_sizes_are_copied_in_one_call(dtype, measure):
    sizes = [0, 1, 3, 32, 1000, 4096, 70001]
    sources = [_random(size, dtype=dtype, seed=size) for size in sizes]
    places = [torch.zeros_like(source) for source in sources]
    got = _native.copy_all(places, sources, measure)
    for place, source in zip(places, sources, strict=True):
        assert torch.equal(place, source)
    if measure:
        assert got == pytest.approx([_squares(source) for source in sources], rel=1e-12)
    else:
        assert got == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied(dtype):
    raw = torch.arange(160, dtype=torch.uint8)
    source = raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)
    place = torch.zeros_like(source)
    assert _native.copy_all([place], [source], False) == []
    assert place.view(torch.uint8).tolist() == source.view(torch.uint8).tolist()


def _layouts():
    image = _random(2, 3, 5, 7)
    yield "row-major", image.clone()
    yield "channels-last", image.to(memory_format=torch.channels_last)
    yield "permuted", image.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    yield "gaps", torch.zeros(2, 3, 5, 14)[..., ::2].copy_(image)
    yield "gaps, transposed", torch.zeros(7, 5, 3, 4)[..., ::2].permute(3, 2, 1, 0).copy_(image)
    yield "lines with gaps", torch.zeros(2, 3, 5, 9)[..., :7].copy_(image)


@pytest.mark.parametrize("measure", [False, True])
def test_elements_find_their_places_whatever_the_layouts(measure):
    for name, source in _layouts():
        for other, place in _layouts():
            place.zero_()
            got = _native.copy_all([place], [source], measure)
            assert torch.equal(place, source), (name, other)
            if measure:
                assert got == pytest.approx([_squares(source)], rel=1e-12)


def test_memory_between_the_elements_is_left_alone():
    memory = torch.full((4, 10), -1.0)
    _native.copy_all([memory[:, :7]], [torch.ones(4, 14)[:, ::2]], False)
    assert memory[:, :7].eq(1).all()
    assert memory[:, 7:].eq(-1).all()


def test_an_expanded_source_and_dimensions_of_one():
    place = torch.zeros(3, 4)
    assert _native.copy_all([place], [torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4)], True) == [
        4 * (1 + 4 + 9)
    ]
    assert place.tolist() == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    source = torch.arange(6.0).as_strided((1, 6, 1), (17, 1, 5))
    place = torch.zeros(1, 6, 1)
    _native.copy_all([place], [source], False)
    assert place.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_scalars_and_nothing_at_all():
    place = torch.zeros(())
    assert _native.copy_all((place,), (torch.tensor(3.0),), True) == [9.0]
    assert place.item() == 3
    assert _native.copy_all([], [], True) == []


def test_a_tensor_in_its_own_place():
    tensor = _random(5000)
    expected = tensor.clone()
    assert _native.copy_all([tensor], [tensor], True) == pytest.approx([_squares(expected)])
    _native.copy_all([tensor], [tensor], False)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("at", [0, 40, 20000])
def test_what_is_not_finite_shows(dtype, at):
    source = torch.ones(20001, dtype=dtype)
    place = torch.zeros_like(source)
    source[at] = -math.inf
    assert _native.copy_all([place], [source], True) == [math.inf]
    source[at] = math.nan
    assert math.isnan(_native.copy_all([place], [source], True)[0])
    assert torch.equal(place.isnan(), source.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_the_largest_numbers_do_not_overflow(dtype):
    largest = torch.finfo(dtype).max
    source = torch.full((1000,), largest, dtype=dtype)
    got = _native.copy_all([torch.zeros_like(source)], [source], True)
    assert got == pytest.approx([1000 * largest**2], rel=1e-12)


def test_a_pair_that_does_not_fit_is_named_before_anything_is_copied():
    places = [torch.zeros(2), torch.zeros(2, 3)]
    good = torch.ones(2)
    with pytest.raises(ValueError, match=r"position 1: float64\[2, 3\].* float32\[2, 3\]"):
        _native.copy_all(places, [good, torch.ones(2, 3).double()], False)
    with pytest.raises(ValueError, match=r"position 1: float32\[3, 2\].* float32\[2, 3\]"):
        _native.copy_all(places, [good, torch.ones(3, 2)], False)
    with pytest.raises(ValueError, match=r"position 1: float32\[6\].* float32\[2, 3\]"):
        _native.copy_all(places, [good, torch.ones(6)], True)
    with pytest.raises(ValueError, match="position 1: expected a tensor"):
        _native.copy_all(places, [good, 3], False)
    with pytest.raises(ValueError, match="2 destinations and 1 sources"):
        _native.copy_all(places, [good], False)
    counts = [torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
    with pytest.raises(ValueError, match=r"position 1: .*squares.* int32"):
        _native.copy_all(counts, [good, torch.ones(2, dtype=torch.int32)], True)
    assert not places[0].any()
    assert not counts[0].any()


# Sizes for each way that an all_reduce can take: in the line, in the slot, and in several pieces.
COUNTS = [0, 1, 5, 600, 5000, 100_003]


def _empty(count, dtype, shared):
    return dist.empty_shared(count, dtype=dtype) if shared else torch.empty(count, dtype=dtype)


def _reduced_squares(cases):
    """Return for each (count, dtype, op, shared) the squares and what torch makes of the result."""
    transport = dist.group.WORLD.transport
    found = []
    for count, dtype, op, shared in cases:
        for async_op in (False, True):
            tensor = _empty(count, dtype, shared).copy_(_random(count, dtype=dtype, seed=count))
            tensor.mul_(dist.get_rank() + 1)
            squares = torch.full((), -1.0, dtype=torch.float64)
            plain = tensor.clone()
            work = transport.all_reduce(tensor, op, squares=squares, async_op=async_op)
            if async_op:
                work.wait()
            transport.all_reduce(plain, op)
            assert torch.equal(tensor, plain)
            found.append((squares.item(), _squares(tensor)))
    return found


def _check_squares(ranks, size, cases):
    results = run_ranks(_reduced_squares, size, cases, ranks=ranks)
    for result in results:
        assert [got for got, _ in result] == [got for got, _ in results[0]]  # the same bits
        for got, expected in result:
            assert got == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_all_reduce_measures_its_result(ranks, size):
    dtypes = [torch.float32, torch.complex128]
    operations = [ReduceOp.AVG, ReduceOp.SUM]
    _check_squares(
        ranks,
        size,
        [
            (count, dtype, op, shared)
            for count in COUNTS
            for dtype, op in zip(dtypes, operations, strict=True)
            for shared in (False, True)
        ],
    )


def test_all_dtypes_are_measured():
    _check_squares("threads", 2, [(9000, dtype, ReduceOp.SUM, False) for dtype in FLOATS])
    _check_squares("threads", 2, [(40, dtype, ReduceOp.premul_sum(0.5), False) for dtype in FLOATS])


def _mixed_memory():
    # Staged, since not all can be reached where they are.
    tensor = _empty(50_000, torch.float32, dist.get_rank() == 1).fill_(2)
    squares = torch.zeros(1, dtype=torch.float64)
    dist.group.WORLD.transport.all_reduce(tensor, ReduceOp.SUM, squares=squares)
    return squares.item()


def test_shared_and_ordinary_memory_together():
    assert run_ranks(_mixed_memory, 2, ranks="processes") == [50_000 * 16.0] * 2


def _special(count):
    transport = dist.group.WORLD.transport
    found = []
    for value in (math.inf, math.nan, torch.finfo(torch.float32).max):
        for at in (0, count - 1):
            tensor = torch.zeros(count)
            tensor[at] = value / 2
            squares = torch.zeros(1, dtype=torch.float64)
            transport.all_reduce(tensor, ReduceOp.SUM, squares=squares)
            found.append(squares.item())
    return found


@pytest.mark.parametrize("count", [3, 100_003])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_result_that_is_not_finite_shows(ranks, count):
    largest = torch.finfo(torch.float32).max ** 2
    for found in run_ranks(_special, 2, count, ranks=ranks):
        assert found[:2] == [math.inf, math.inf]
        assert math.isnan(found[2])
        assert math.isnan(found[3])
        assert found[4:] == pytest.approx([largest, largest])


def _strided():
    tensor = torch.zeros(300, 400).t()
    tensor.copy_(_random(400, 300, seed=3))
    squares = torch.zeros(1, 1, dtype=torch.float64)
    dist.group.WORLD.transport.all_reduce(tensor, ReduceOp.SUM, squares=squares)
    return squares.item(), _squares(tensor)


def test_a_strided_result_is_measured():
    for got, expected in run_ranks(_strided, 2):
        assert got == pytest.approx(expected, rel=1e-12)


def _kept_alive():
    works, tensors = [], []
    for _ in range(20):
        tensors.append(torch.ones(3000))
        squares = torch.zeros(1, dtype=torch.float64)
        options = {"squares": squares, "async_op": True}
        works.append(dist.group.WORLD.transport.all_reduce(tensors[-1], ReduceOp.SUM, **options))
        del squares, options
    decoys = [torch.full((1,), 7.0, dtype=torch.float64) for _ in range(100)]
    for work in works:
        work.wait()
    return all(decoy.item() == 7 for decoy in decoys)


def test_squares_that_nobody_holds_are_still_there_to_be_written():
    assert run_ranks(_kept_alive, 2) == [True, True]


def _only_some_ask():
    transport = dist.group.WORLD.transport
    squares = torch.full((1,), -1.0, dtype=torch.float64)
    try:
        transport.all_reduce(
            torch.ones(4), ReduceOp.SUM, squares=squares if dist.get_rank() == 0 else None
        )
    except dist.CollectiveMismatch as error:
        text = str(error)
    tensor = torch.ones(4)
    transport.all_reduce(tensor, ReduceOp.SUM)  # the group can still be used
    return text, squares.item(), tensor.tolist()


def test_all_ranks_ask_or_none():
    for text, squares, after in run_ranks(_only_some_ask, 3):
        assert "sum of squares on some ranks only" in text
        assert squares == -1
        assert after == [3.0] * 4


def _refused(transport):
    squares = torch.full((1,), -1.0, dtype=torch.float64)
    tensor = torch.ones(4)
    for wrong in (torch.zeros(1), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="float64 tensor of one element"):
            transport.all_reduce(tensor, ReduceOp.SUM, squares=wrong)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(ValueError, match="not defined for"):
            transport.all_reduce(tensor.to(dtype), ReduceOp.SUM, squares=squares)
    assert squares.item() == -1
    assert tensor.tolist() == [1.0] * 4


def test_what_cannot_be_measured_is_refused_before_anything_is_exchanged():
    _refused(MemoryBackend(Exchange(2), 0, 2, 30.0))
    run_ranks(lambda: _refused(dist.group.WORLD.transport), 2)
