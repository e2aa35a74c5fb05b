"""Events of `torch.profiler`: each operation as ``phalanx:<name>``, with its input shapes."""

from __future__ import annotations

from typing import Any

import torch

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
            title = "recvAnySource" if name == "recv" and args[1] is None else name
            event = torch._C._profiler._RecordFunctionFast(f"phalanx:{title}", inputs(name, args))
            event.__enter__()
            result = None
            try:
                result = operation(*args, **kwargs)
            finally:
                if isinstance(result, Work):
                    # The event lasts as long as the work does.
                    result.get_future().add_done_callback(
                        lambda _: event.__exit__(None, None, None)
                    )
                else:
                    event.__exit__(None, None, None)
            return result

        return recorded


def inputs(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the input tensors of a call of a transport."""
    index = _INPUT.get(name, 0)
    given = args[index] if index < len(args) else None
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for tensor in given or () if isinstance(tensor, torch.Tensor)]
