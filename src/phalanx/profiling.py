"""Events of `torch.profiler`: each operation as ``<backend>:<name>``, with its input shapes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from phalanx.types import Timeout
from phalanx.work import Work

# Which argument of a transport's operation is its input, where it is not the first.
_INPUT = {
    "all_gather": 1,
    "all_gather_single": 1,
    "gather": 1,
    "scatter": 1,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "all_to_all": 1,
    "all_to_all_single": 1,
}


class Event:
    """What the profiler sees of one operation, from here to its ``end``."""

    def __init__(self, title: str, tensors: list[torch.Tensor]) -> None:
        self._thread = threading.get_ident()
        self._open = [torch._C._profiler._RecordFunctionFast(title, tensors)]
        self._open[0].__enter__()

    def end(self) -> None:
        """End the event, unless it has ended. Only the thread that it began on can."""
        if self._open and threading.get_ident() == self._thread:
            self._open.pop().__exit__(None, None, None)

    def end_with(self, work: Work) -> None:
        """End the event when the thread that it began on has waited for ``work``."""
        wait = work.wait

        def wait_and_end(timeout: Timeout | None = None) -> bool:
            try:
                return wait(timeout)
            finally:
                if work.is_completed():
                    self.end()

        vars(work)["wait"] = wait_and_end


class Collecting:
    """A transport that makes calls later, and is then seen by the profiler."""

    def passed_on(self) -> Any:
        """Return the transport that makes calls at once."""
        raise NotImplementedError


def seen(transport: Any) -> Any:
    """Return whom to call while a profiler runs."""
    return transport if isinstance(transport, Collecting) else Recorded(transport)


class Recorded:
    """A transport whose operations the profiler sees. Made per call, while a profiler runs."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._transport, name)
        if not callable(operation):
            return operation

        def recorded(*args: Any, **kwargs: Any) -> Any:
            event = Event(f"{self._transport.name}:{_title(name, args)}", inputs(name, args))
            result = None
            try:
                result = operation(*args, **kwargs)
            finally:
                if isinstance(result, Work) and not result.is_completed():
                    event.end_with(result)
                else:
                    event.end()
            return result

        return recorded


def _title(name: str, args: tuple[Any, ...]) -> str:
    if name == "coalesce":
        return "+".join(dict.fromkeys(each for each, _ in args[0]))
    return "recvAnySource" if name == "recv" and args[1] is None else name


def inputs(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the input tensors of a call of a transport."""
    if name == "coalesce":
        return [tensor for call in args[0] for tensor in inputs(*call)]
    index = _INPUT.get(name, 0)
    given = args[index] if index < len(args) else None
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for tensor in given or () if isinstance(tensor, torch.Tensor)]
