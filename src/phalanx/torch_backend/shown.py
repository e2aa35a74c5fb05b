"""What dispatch modes see of a group: its calls as operators of c10d, like those of torch's groups.

Torch's groups in C++ pass each call to an operator, which modes see, and the operator's kernel asks
for an engine in C++. A group in Python is called past the operators. While a mode is active its
methods therefore go by torch's own first, which call the operator, and a kernel that is seen only
during such a call comes back to the group.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from phalanx import dispatch
from phalanx.torch_backend.theirs import ProcessGroup

# Any key that modes come before, and that no tensor and nobody else uses.
_KEY = dispatch.Key("CustomRNGKeyId")
_SPARSE = torch._C.DispatchKey.SparseCPU
_BARRIERS = ("barrier", "monitored_barrier")  # whose operators take a tensor that means nothing
_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class _Call:
    """One call of a group's method, from there to its kernel and back."""

    def __init__(self, group: Any, name: str, args: tuple[Any, ...]) -> None:
        self.group = group
        self.name = name
        self.args = args
        self.work: Any = None

    def run(self, tensors: tuple[Any, ...]) -> Any:
        """Have the group do what it was called for, with the tensors that modes have left."""
        if self.name not in _BARRIERS:
            self.args = (*tensors, *self.args[len(tensors) :])
        self.work = getattr(self.group, self.name)(*self.args)
        return self.work


class _Calls(threading.local):
    def __init__(self) -> None:
        self.under_way: list[_Call] = []
        self.running = 0  # kernels, one within the other


_calls = _Calls()


def shown(group: Any, name: str, *args: Any) -> Any:
    """Make a call of a group's method where modes see it, and return its work, if it has one.

    Do nothing and return None if no mode of this thread is to see it. ``args`` are those of torch's
    method, not its short form.
    """
    if _calls.running or not torch._C._len_torch_dispatch_stack():
        return None
    _register()
    call = _Call(group, name, args)
    _calls.under_way.append(call)
    try:
        with _KEY.included():
            if _has_sparse(args[0]):  # their kernels would come before ours
                with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_SPARSE)):
                    found = _theirs(name)(group, *args)
            else:
                found = _theirs(name)(group, *args)
    finally:
        _calls.under_way.pop()
    return call.work or found or True  # a monitored barrier has no work


def _has_sparse(tensors: Any) -> bool:
    return isinstance(tensors, list) and any(
        isinstance(each, torch.Tensor) and each.is_sparse for each in tensors
    )


@functools.cache
def _theirs(name: str) -> Callable[..., Any]:
    """Return torch's own method of that name.

    It calls the group's, unless it sees that it is called by a function of this name.
    """
    if not hasattr(ProcessGroup, name):
        name = _FORMER_NAMES[name]
    method = getattr(ProcessGroup, name)

    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, globals(), name, None, call.__closure__)


@functools.cache
def _register() -> None:
    operators = (
        getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::")
    )
    ours = [each for each in operators if _position_of_group(each) is not None]
    _KEY.register(ours, _kernel, "c10d")


def _position_of_group(operator: torch._ops.OpOverload) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("process_group") if "process_group" in names else None


def _kernel(operator: torch._ops.OpOverload) -> dispatch.Kernel:
    position = _position_of_group(operator)
    assert position is not None
    num_results = len(operator._schema.returns)

    def kernel(*args: Any) -> Any:
        call = _calls.under_way[-1] if _calls.under_way else None
        group = ProcessGroup.unbox(args[position])
        with _KEY.excluded():
            if call is None or group is not call.group:  # what a mode itself calls
                return operator(*args)
            tensors = args[:position]
            is_sparse = _has_sparse(tensors[0])
            _calls.running += 1
            try:
                if is_sparse:
                    torch._C._dispatch_tls_set_dispatch_key_excluded(_SPARSE, False)
                work = call.run(tensors)
            finally:
                _calls.running -= 1
        if num_results == 0:
            return None
        return work.boxed() if num_results == 1 else (tensors[0], work.boxed())

    return kernel
