"""Kernels in Python that stand before torch's own, and that only threads which ask for them see.

Torch dispatches every operator through an ordered list of keys. Some are meant for experiments: an
operator looks there only if its thread has included the key. Operators without a kernel of ours
under it cost what they cost anyway, in forward and in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from phalanx import forks

Kernel = Callable[..., Any]


class Key:
    """One of the keys for experiments, and what is registered under it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = torch._C._dispatch_key_parse(name)
        self._set = torch._C.DispatchKeySet(self._key)
        self._lock = threading.Lock()
        forks.renew(self, "_lock", threading.Lock)
        self._libraries: list[Any] = []  # torch forgets the kernels of one that is gone

    def register(
        self,
        operators: Iterable[torch._ops.OpOverload],
        kernel: Callable[[torch._ops.OpOverload], Kernel],
        namespace: str = "aten",
    ) -> None:
        """Have `kernel(operator)` called instead of each operator by threads that include this."""
        self.prepare()
        kernels = cast(Any, torch.library.Library)(namespace, "IMPL", self._name)
        for operator in operators:
            kernels.impl(operator, kernel(operator))
        self._libraries.append(kernels)

    def prepare(self) -> None:
        """Let operators without a kernel pass, before any thread includes this."""
        with self._lock:
            if not self._libraries:
                fallback = cast(Any, torch.library.Library)("_", "IMPL", self._name)
                fallback.fallback(torch.library.fallthrough_kernel)
                self._libraries.append(fallback)

    def is_registered(self) -> bool:
        """Say whether there are kernels."""
        return len(self._libraries) > 1

    def included(self) -> Any:
        """Let the calling thread see the kernels for the length of a block."""
        return torch._C._IncludeDispatchKeyGuard(self._key)

    def include(self, wanted: bool) -> None:
        """Let the calling thread see the kernels from now on, or no longer."""
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, wanted)

    def is_included(self) -> bool:
        """Say whether the calling thread sees the kernels."""
        return bool(torch._C._dispatch_tls_is_dispatch_key_included(self._key))

    def is_seen(self) -> bool:
        """Say whether the calling thread includes this and is not in `excluded`."""
        return self.is_included() and not torch._C._dispatch_tls_is_dispatch_key_excluded(self._key)

    def excluded(self) -> Any:
        """Let the calling thread, most likely one in a kernel, not see them for a block."""
        return torch._C._ExcludeDispatchKeyGuard(self._set)


def operators() -> Iterator[torch._ops.OpOverload]:
    """Yield torch's operators, without those that are made of others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten" and not has_kernel(name, "CompositeImplicitAutograd"):
            packet, _, overload = operator.partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


_frames: Any = torch._C._dynamo.eval_frame
# Neither this frame nor those that are called from it.
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untrace(function: Callable[..., Any], why: str) -> None:
    """Keep torch.compile out of a function, and of all that it calls, without importing it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
