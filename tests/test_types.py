import pickle
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from phalanx.types import DTYPES, Deadline, ReduceOp, seconds, supports, supports_complex

NATIVE = Path(__file__).parent.parent / "native" / "types.hpp"
NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def enum(name):
    """Return the members of an enum of native/types.hpp, in order."""
    body = re.search(rf"enum class {name} : uint8_t {{(.*?)}};", NATIVE.read_text(), re.DOTALL)
    return [member.strip() for member in body.group(1).split(",")][:-1]  # without Count


def test_codes_are_those_of_the_native_core():
    short = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}
    for dtype, code in DTYPES.items():
        name = str(dtype).removeprefix("torch.")
        kind, bits = re.match(r"([a-z]+)(.*)", name).groups()
        expected = "Bool" if name == "bool" else (short[kind] + bits.replace("_", "")).upper()
        assert enum("DType")[code] == expected
    for name in NAMES:
        native = enum("Reduce")[getattr(ReduceOp, name).code]
        assert native.lower() == name.lower().replace("_", "")


def test_ops_are_values():
    for name in NAMES:
        op = getattr(ReduceOp, name)
        assert repr(op) == f"ReduceOp.{name}"
        assert pickle.loads(pickle.dumps(op)) == op == ReduceOp(name) == ReduceOp(op)
    assert len({getattr(ReduceOp, name) for name in NAMES}) == len(NAMES)
    assert ReduceOp.SUM != "SUM"
    with pytest.raises(AttributeError):
        ReduceOp.SUM.name = "MAX"
    with pytest.raises(ValueError, match="known: SUM, AVG"):
        ReduceOp("SUMM")


def test_ops_of_torch_are_understood():
    import torch.distributed as theirs

    for name in NAMES[:-1]:
        assert ReduceOp(getattr(theirs.ReduceOp, name)) == getattr(ReduceOp, name)
    assert ReduceOp(theirs.ReduceOp(theirs.ReduceOp.MAX)) == ReduceOp.MAX


def test_premul_sum_has_a_factor():
    half = ReduceOp.premul_sum(0.5)
    assert half == ReduceOp.premul_sum(torch.tensor([0.5])) == pickle.loads(pickle.dumps(half))
    assert half != ReduceOp.premul_sum(0.25)
    assert repr(half) == "ReduceOp.premul_sum(0.5)"
    assert ReduceOp(half).factor == 0.5
    with pytest.raises(ValueError, match="one element"):
        ReduceOp.premul_sum(torch.ones(2))
    with pytest.raises(ValueError, match="no factor"):
        ReduceOp("SUM", 2.0)


def test_table_of_ops_and_dtypes():
    premul = ReduceOp.premul_sum(2.0)
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT]
    order = [ReduceOp.MIN, ReduceOp.MAX]
    bits = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    for dtype in DTYPES:
        meant = {
            op for op in [*arithmetic, *order, *bits, ReduceOp.AVG, premul] if supports(op, dtype)
        }
        if dtype.is_complex:
            assert meant == {*arithmetic, ReduceOp.AVG, premul}
        elif dtype.is_floating_point:
            assert meant == (
                {*arithmetic, *order, ReduceOp.AVG, premul} if dtype.itemsize > 1 else set()
            )
        else:
            assert meant == {*arithmetic, *order, *bits}
    assert supports_complex(ReduceOp.SUM)
    assert not supports_complex(ReduceOp.MAX)


def test_timeouts():
    assert seconds(timedelta(minutes=1)) == 60.0
    assert seconds(2) == 2.0
    assert seconds(0.5) == 0.5
    for wrong in ("1", None, True):
        with pytest.raises(TypeError, match="seconds"):
            seconds(wrong)
    for wrong in (-1, float("nan"), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="negative"):
            seconds(wrong)
    assert Deadline(0).left() == 0.0
    assert 0 < Deadline(1000).left() <= 1000
