"""What torch is given for operations in flight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import graph
from torch.futures import Future

from phalanx.torch_backend import theirs
from phalanx.torch_backend.futures import Completer
from phalanx.torch_backend.untraced import untraced
from phalanx.work import Work

_BACKWARD = graph._engine_run_backward.__code__  # all that Python sees of a backward pass
_NO_TIMEOUT = timedelta(0)  # torch's way to ask for the default


_SMALL = 4096  # bytes that are worth keeping for somebody who may never come


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@untraced
class TorchWork(theirs.Work):  # type: ignore[misc]
    """A work of Phalanx's, as torch sees works."""

    def __init__(self, work: Work, completer: Completer, in_order: bool) -> None:
        super().__init__()
        self._work = work
        self._completer = completer
        self._in_order = in_order
        self._future: Future[Any] | None = None
        self._is_awaited = False

    def __del__(self) -> None:
        # Torch's C++ may be left as the only one who holds it (DistributedDataParallel.join has it
        # keep one from forward to backward), and would find a work without these methods.
        if not self._is_awaited and self._in_order and _size(self._work.result()) <= _SMALL:
            self._completer.dropped.append(self)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._is_awaited = True
        return self._work.wait(timeout if timeout > _NO_TIMEOUT else None)

    def is_completed(self) -> bool:
        self._is_awaited |= (completed := self._work.is_completed())
        return completed

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work.source_rank()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        self._is_awaited = True
        if self._future is None:
            # Torch's reducer, in C++, has no callbacks that communicate.
            by_reducer = sys._getframe(1).f_code is _BACKWARD
            self._future = self._completer.future(self._work, self._in_order, not by_reducer)
        return self._future


@untraced
class Done(theirs.Work):  # type: ignore[misc]
    """An operation that was over before its work was asked for."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future
