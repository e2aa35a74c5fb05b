"""A torch random stream for each rank of a thread world.

Ranks that are processes have a default generator each. Ranks that are threads share the process's
one, and would draw from it in an order that changes from run to run. Here each thread of a rank
draws from the *stream* of its rank instead: the same numbers, bit for bit, as a process would get.

How: torch dispatches every operator through an ordered list of keys. One of them is meant for
experiments, and only threads that ask for it see it. Under that key we register a kernel for the
operators that torch tags as random (`nondeterministic_seeded`) and nothing for the others, so these
cost what they cost anyway, in forward and in backward. The kernel hands the rank's stream to
operators that take a generator; around one that does not, it exchanges the default generator's
state under a lock. A generator that the caller passes is left alone.

Limits: Python's `random`, NumPy, and `torch.default_generator` used as an object stay common to the
process, as do the generators of other devices. So does what an operator draws that has to add up a
distributed tensor (a DTensor that is Partial) first. What `torch.compile` makes draws through the
same operators; but it takes a thread with a stream for another context than one without, and
compiles once for each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_KEY_SET = torch._C.DispatchKeySet(_KEY)

# They carry the tag for the sake of other devices; on a CPU they do not draw.
_NEVER_DRAW = {"aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention_for_cpu"}

_default = torch.default_generator
_here = threading.local()
_registration = threading.Lock()
_libraries: list[Any] = []  # torch forgets the kernels of one that is gone


class Stream(torch.Generator):
    """The default generator of one rank, starting where the caller's default generator stands."""

    def __init__(self) -> None:
        _register_kernels()
        self.set_state(torch.get_rng_state())
        # The threads of one rank share its stream; a draw must not fall into an exchange.
        self.lock = threading.Lock()


class DefaultGenerator:
    """What `torch.random` is to use for its default generator: the one of the calling thread."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current() or _default, name)


def current() -> Stream | None:
    """Return the stream that the calling thread draws from, None if it is the process's."""
    return getattr(_here, "stream", None)


@contextmanager
def draw_from(stream: Stream) -> Iterator[None]:
    """Let the calling thread draw from `stream`."""
    outer = current()
    _here.stream = stream
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _here.stream = outer


def _register_kernels() -> None:
    """Register the kernels once; they concern only threads that draw from a stream."""
    with _registration:
        if not _libraries:
            _libraries.extend(_new_libraries())


def _new_libraries() -> tuple[Any, Any]:
    new = cast(Any, torch.library.Library)
    fallback = new("_", "IMPL", _KEY_NAME)
    fallback.fallback(torch.library.fallthrough_kernel)
    kernels = new("aten", "IMPL", _KEY_NAME)
    for operator in _random_operators():
        kernels.impl(operator, _kernel(operator))
    return fallback, kernels


def _random_operators() -> Iterator[torch._ops.OpOverload]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        # A composite operator draws through the operators that it is made of.
        if namespace == "aten" and name not in _NEVER_DRAW and not _is_composite(name):
            packet, _, overload = operator.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                yield op


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _kernel(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("generator") if "generator" in names else None

    def draw(*args: Any, **kwargs: Any) -> Any:
        stream = current()
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            explicit = place is not None and ("generator" in kwargs or place < len(args))
            if stream is None or explicit:
                return operator(*args, **kwargs)
            # None for all but distributed tensors, which may drop a generator, or refuse it.
            placements = getattr(args[0], "placements", None)
            if placements and any(placement.is_partial() for placement in placements):
                return operator(*args, **kwargs)  # it communicates, which it must not under a lock
            with stream.lock:
                is_plain = placements is None and isinstance(args[0], torch.Tensor)
                if place is not None and is_plain and args[0].is_cpu:
                    return operator(*args, **kwargs, generator=stream)
                with _exchange, _as_default(stream):
                    return operator(*args, **kwargs)

    return draw


_exchange = threading.Lock()


@contextmanager
def _as_default(stream: Stream) -> Iterator[None]:
    outer = _default.get_state()
    _default.set_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(_default.get_state())
        _default.set_state(outer)


def _after_fork() -> None:
    # A thread that held the lock is not in the child; the child's stream is its own copy.
    global _exchange
    _exchange = threading.Lock()
    if stream := current():
        stream.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
