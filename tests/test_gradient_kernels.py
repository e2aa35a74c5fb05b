"""Copies of many tensors in one call, and sums of squares taken on the way."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx import _native
from phalanx.types import DTYPES

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
