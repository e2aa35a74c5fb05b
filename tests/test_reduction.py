"""The arithmetic that fast kernels are compared with, against NumPy and exact arithmetic."""

import numpy as np
import pytest
import torch

from phalanx.backends.reduction import reduce
from phalanx.types import DTYPES, ReduceOp

NUMPY = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
WHOLE = [dtype for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", NUMPY)
def test_integers_wrap_around_as_in_numpy(name, dtype):
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (3, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    inputs = list(raw % 2 == 1 if dtype == torch.bool else raw.view(dtype))
    got = reduce(inputs, getattr(ReduceOp, name))
    with np.errstate(over="ignore"):
        expected = NUMPY[name].reduce([each.numpy() for each in inputs])
    assert got.dtype == dtype
    assert got.numpy().tolist() == expected.astype(got.numpy().dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    # In the narrow type every further 1 would be lost beside 2048 (or 256).
    inputs = [torch.tensor([4096.0], dtype=dtype)] + [torch.tensor([1.0], dtype=dtype)] * 64
    assert reduce(inputs, ReduceOp.SUM).item() == torch.tensor(4160.0).to(dtype).item()
    assert reduce(inputs, ReduceOp.SUM).dtype == dtype


def test_average_and_factor():
    inputs = [torch.tensor([1.0, 2 + 4j]), torch.tensor([3.0, 4 + 2j])]
    assert reduce(inputs, ReduceOp.AVG).tolist() == [2, 3 + 3j]
    assert reduce(inputs, ReduceOp.premul_sum(0.5)).tolist() == [2, 3 + 3j]


def test_nan_spreads():
    inputs = [torch.tensor([1.0]), torch.tensor([float("nan")]), torch.tensor([2.0])]
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        assert reduce(inputs, getattr(ReduceOp, name)).isnan().all()


def test_inputs_are_left_alone():
    inputs = [torch.ones(2), torch.ones(2)]
    reduce(inputs, ReduceOp.SUM)
    assert inputs[0].tolist() == [1, 1]
