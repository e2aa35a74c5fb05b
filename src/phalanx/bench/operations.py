"""What can be measured: operations, element types, reductions. Needs no torch.

Sizes count the larger buffer of a rank, as nccl-tests does: the whole tensor of an all_reduce, the
gathered result of an all_gather, the input of a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Bytes of an element, by the name that torch has for its type.
DTYPES = {
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
REDUCE_OPS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class Conditions:
    """Under which an operation is asked for: with which elements, and how."""

    dtype: str = "float32"
    reduce_op: str = "sum"
    asynchronous: bool = False  # started with async_op=True, then waited for
    checked: bool = True  # the first result of every cell must be right

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype]


USUAL = Conditions()


def _once(size: int) -> float:
    return 1.0


def _twice(size: int) -> float:
    return 2.0


def _from_others(size: int) -> float:
    return (size - 1) / size


def _to_and_from_others(size: int) -> float:
    return 2 * (size - 1) / size


@dataclass(frozen=True)
class Operation:
    """One thing that ranks do together.

    `source` and `target` say how much of the counted size each buffer holds ("whole" or one rank's
    "chunk"); without a target the operation works in place. `result` names what must come out
    (one of `values.RESULTS`). `moves(size)` is nccl-tests' factor from the bandwidth of the
    algorithm to that of the bus: how often each byte must enter or leave a rank at least.
    """

    name: str
    about: str
    source: str = "whole"
    target: str | None = None
    result: str | None = None
    moves: Callable[[int], float] = _once
    reduces: bool = False
    sized: bool = True
    pairwise: bool = False

    def count(self, num_bytes: int, size: int, item_bytes: int = 4) -> int:
        """Return the elements of a whole buffer: at least one, and the same number, per rank."""
        return size * max(1, num_bytes // item_bytes // size)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "all_reduce",
            "reduce a tensor of every rank, result everywhere",
            result="reduced",
            moves=_to_and_from_others,
            reduces=True,
        ),
        Operation("broadcast", "copy a tensor of rank 0 to all", result="of root"),
        Operation(
            "reduce",
            "reduce a tensor of every rank, result on rank 0",
            result="reduced on root",
            reduces=True,
        ),
        Operation(
            "all_gather",
            "collect a chunk of every rank everywhere, in a list of tensors",
            *("chunk", "whole", "gathered", _from_others),
        ),
        Operation(
            "all_gather_single",
            "the same, in one tensor",
            *("chunk", "whole", "gathered", _from_others),
        ),
        Operation(
            "gather",
            "collect a chunk of every rank on rank 0",
            *("chunk", "whole", "gathered on root", _from_others),
        ),
        Operation(
            "scatter",
            "hand every rank its chunk of a list on rank 0",
            *("whole", "chunk", "scattered", _from_others),
        ),
        Operation(
            "reduce_scatter",
            "reduce a list of tensors, each rank gets its chunk",
            *("whole", "chunk", "reduced chunk", _from_others),
            reduces=True,
        ),
        Operation(
            "reduce_scatter_single",
            "the same, of one tensor",
            *("whole", "chunk", "reduced chunk", _from_others),
            reduces=True,
        ),
        Operation(
            "all_to_all",
            "every rank hands every rank a chunk, as lists",
            *("whole", "whole", "transposed", _from_others),
        ),
        Operation(
            "all_to_all_single",
            "the same, in one tensor",
            *("whole", "whole", "transposed", _from_others),
        ),
        Operation("barrier", "wait for all ranks", sized=False),
        Operation(
            "send_recv",
            "ping-pong between two ranks: half a round trip (latency)",
            result="of root",
            pairwise=True,
        ),
        Operation(
            "send_stream",
            "messages in a row from rank 0 to rank 1: time of each (bandwidth)",
            result="of root",
            pairwise=True,
        ),
        Operation(
            "exchange",
            "two ranks send and receive at the same time (both directions count in busbw)",
            *("whole", "whole", "of the other", _twice),
            pairwise=True,
        ),
    )
}
