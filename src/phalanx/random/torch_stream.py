"""A torch random stream for each rank of a thread world.

Ranks that are processes have a default generator each. Ranks that are threads share the process's
one, and would draw from it in an order that changes from run to run. Here each thread of a rank
draws from the *stream* of its rank instead: the same numbers, bit for bit, as a process would get.

How: the operators that torch tags as random (`nondeterministic_seeded`) get a kernel of ours
(`phalanx.dispatch`) in threads with a stream. It hands the rank's stream to operators that take a
generator; around one that does not, it exchanges the default generator's state under a lock. A
generator that the caller passes is left alone, unless it is `torch.default_generator`.

Limits: what `torch.default_generator` is asked itself (its seed, its state) stays common to the
process, as do the generators of other devices. So does what an operator draws that has to add up a
distributed tensor (a DTensor that is Partial) first. What `torch.compile` makes draws through the
same operators; but it takes a thread with a stream for another context than one without, and
compiles once for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx import dispatch, forks

_KEY = dispatch.Key("TESTING_ONLY_GenericMode")

# They carry the tag for the sake of other devices; on a CPU they do not draw.
_NEVER_DRAW = {"aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention_for_cpu"}

_default = torch.default_generator
_here = threading.local()
_registration = threading.Lock()


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
        with _KEY.included():
            yield
    finally:
        _here.stream = outer


def _register_kernels() -> None:
    """Register the kernels once; they concern only threads that draw from a stream."""
    with _registration:
        if not _KEY.is_registered():
            # An operator made of others draws through them.
            _KEY.register(filter(_draws, dispatch.operators()), _kernel)


def _draws(operator: torch._ops.OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in operator.tags
    return tagged and operator._schema.name not in _NEVER_DRAW


def _kernel(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("generator") if "generator" in names else None

    def draw(*args: Any, **kwargs: Any) -> Any:
        stream = current()
        with _KEY.excluded():
            given = kwargs.get("generator")
            if place is not None and place < len(args):
                given = args[place]
            if stream is None or not _is_default(given):
                return operator(*args, **kwargs)
            # None for all but distributed tensors, which may drop a generator, or refuse it.
            placements = getattr(args[0], "placements", None)
            if placements and any(placement.is_partial() for placement in placements):
                return operator(*args, **kwargs)  # it communicates, which it must not under a lock
            with stream.lock:
                is_plain = placements is None and isinstance(args[0], torch.Tensor)
                if place is not None and is_plain and args[0].is_cpu:
                    args = args[:place] + args[place + 1 :]
                    return operator(*args, **(kwargs | {"generator": stream}))
                with _exchange, _as_default(stream):
                    return operator(*args, **kwargs)

    return draw


def _is_default(generator: Any) -> bool:
    # A kernel gets an object of its own for a generator, so identity does not tell.
    ours: Any = _default
    return generator is None or generator._cdata == ours._cdata


_exchange = threading.Lock()  # made anew in forked children


@contextmanager
def _as_default(stream: Stream) -> Iterator[None]:
    outer = _default.get_state()
    _default.set_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(_default.get_state())
        _default.set_state(outer)


@forks.after_fork_in_child
def _renew_locks() -> None:
    # A thread that held the lock is not in the child; the child's stream is its own copy.
    global _exchange, _registration
    _exchange, _registration = threading.Lock(), threading.Lock()
    if stream := current():
        stream.lock = threading.Lock()
