"""Reducing gradients in the type that DistributedDataParallel's mixed precision names.

With ``mixed_precision`` it does so by itself; the hook serves modules whose parameters are kept in
low precision, to reduce their gradients in a higher one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.futures import Future

from phalanx.collectives import all_reduce
from phalanx.parallel.buckets import GradBucket
from phalanx.types import ReduceOp
from phalanx.work import Work

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel


@dataclass
class _AllreduceUpcastHookState:
    """The model whose ``mixed_precision.reduce_dtype`` counts. There are no streams on CPU."""

    ddp_weakref: weakref.ref[DistributedDataParallel]
    upcast_stream: Any = None
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: GradBucket
) -> Future[Tensor]:
    """Average a bucket in the type to reduce in, and convert the result back to its own."""
    ddp = hook_state.ddp_weakref()
    if ddp is None:
        raise RuntimeError("the model that the hook was made for does not exist any more")
    precision = ddp.mixed_precision
    dtype = (precision and precision.reduce_dtype) or bucket.buffer().dtype
    buffer = bucket.buffer()
    wide = buffer.to(dtype)
    work = all_reduce(wide, ReduceOp.AVG, ddp.process_group, async_op=True)
    return cast(Work, work).get_future().then(lambda _: wide.to(buffer.dtype))
