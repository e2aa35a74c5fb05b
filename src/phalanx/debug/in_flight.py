"""Tensors of asynchronous operations, and whoever touches one before its work has been waited for.

At the level DETAIL a rank knows the memory of its operations in flight. Torch's operators, in
threads that communicate or that a thread rank has started, look there first (`phalanx.dispatch`):
reading or writing what an operation writes raises `BufferInUse` on that line, and so does writing
what one reads. So do `tolist()`, `numpy()` and pickling. What goes past torch otherwise (an array
made before, pointers) is not seen, but changes of what is only read are: `wait()` compares its
checksum.

A tensor is free again when its operation is known to be over: `wait()` has returned,
`is_completed()` has said so, or a later collective of the same group has ended, since these run in
order. A work that nobody keeps leaves its tensors in use.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from traceback import StackSummary
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx import dispatch, forks
from phalanx.backends import overlaps
from phalanx.backends.base import COLLECTIVES, Call
from phalanx.debug import notes
from phalanx.errors import BufferInUse
from phalanx.groups import ProcessGroup
from phalanx.work import Work
from phalanx.world import World, current

_KEY = dispatch.Key("TESTING_ONLY_GenericWrapper")
_registration = threading.Lock()

# They take a tensor and look only at its shape, or give another view of it.
_DO_NOT_TOUCH = {
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    *("is_same_size", "is_set_to", "is_pinned", "set_", "detach_", "_assert_tensor_metadata"),
    *("_has_same_storage_numel", "_new_zeros_with_same_feature_meta"),
    *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift"),
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DECORATORS = ("/contextlib.py", "/typing_extensions.py")  # of functions of torch's
# Threads that move the bytes of operations that were derived from messages.
_MOVERS = {"phalanx-lane", "phalanx-work"}
_PATIENCE = 10_000  # steps of a search for a common element of two strided tensors


class Memory(NamedTuple):
    """Where the elements of a tensor lie, in bytes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Memory | None:
        """Return None for a tensor without elements, or without memory that is known here."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return None
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # it only stands for a tensor
            return None
        if start == 0:
            return None
        size = tensor.element_size()
        shape, strides = tuple(tensor.shape), tuple(size * step for step in tensor.stride())
        length = size + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        is_dense = length == size * tensor.numel() and 0 not in strides
        return cls(start, start + length, (*shape, size), (*strides, 1), is_dense)

    def overlaps(self, other: Memory) -> bool:
        """Say whether an element of one is also one of the other."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if self.is_dense and other.is_dense:
            return True
        try:
            return np.shares_memory(
                _Array(self),
                _Array(other),
                max_work=_PATIENCE,  # type: ignore[arg-type]
            )
        except np.exceptions.TooHardError:
            return False  # nothing is told that is not certain


class _Array:
    """Memory as NumPy, which compares addresses and reads nothing, is told of it."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "data": (memory.start, False),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": "|u1",
            "version": 3,
        }


class Buffer:
    """A tensor of an operation, which it does not keep alive."""

    def __init__(self, tensor: Tensor, memory: Memory, is_written: bool) -> None:
        self.memory = memory
        self.is_written = is_written
        storage = tensor.untyped_storage()
        self._storage: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._address = storage.data_ptr()

    def is_gone(self) -> bool:
        """Say whether the tensor's memory may be somebody else's by now."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is None or storage.data_ptr() != self._address


class Flight:
    """An operation in flight and its tensors."""

    def __init__(self, group: ProcessGroup, name: str, title: str, buffers: list[Buffer]) -> None:
        self.group = group
        self.in_order = name in COLLECTIVES and name != "monitored_barrier"
        self.title = title
        self.buffers = buffers
        self.site = _site(sys._getframe())
        self.is_open = True
        self.has_stable_inputs = True  # no operation before or after it writes to them
        self.work: ref[Work] | None = None

    def shares(self, memory: Memory, is_write: bool) -> Buffer | None:
        """Return the buffer that a touch of `memory` must not meet."""
        for buffer in self.buffers:
            harms = is_write or buffer.is_written
            if harms and buffer.memory.overlaps(memory) and not buffer.is_gone():
                return buffer
        return None


class Flights:
    """The operations in flight of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = itertools.count()
        self._open: dict[int, Flight] = {}  # in the order in which they were issued

    def __bool__(self) -> bool:
        return bool(self._open)

    def admit(self, group: ProcessGroup, name: str, title: str, used: Sequence[Used]) -> Flight:
        """Refuse an operation on tensors of others, unless these end before it begins."""
        memories = [(tensor, Memory.of(tensor), is_written) for tensor, is_written in used]
        buffers = [Buffer(t, memory, is_written) for t, memory, is_written in memories if memory]
        flight = Flight(group, name, title, buffers)
        for other in list(self._open.values()):
            for buffer in buffers:
                if met := other.shares(buffer.memory, buffer.is_written):
                    if not _is_before(other, flight):
                        raise self._error(other, met, buffer.is_written, title)
                    other.has_stable_inputs = flight.has_stable_inputs = False
        return flight

    def begin(self, flight: Flight, work: Work) -> None:
        """Have the tensors of an operation belong to it."""
        for number, other in list(self._open.items()):
            if all(buffer.is_gone() for buffer in other.buffers):
                self._open.pop(number, None)
        flight.work = ref(work)
        if flight.buffers:
            _register_kernels()
            self._open[next(self._numbers)] = flight

    def end(self, flight: Flight) -> None:
        """Free the tensors of an operation, and of those that have ended before it."""
        flight.is_open = False
        before = True
        for number, other in list(self._open.items()):
            if other is flight:
                before = False
            if other is flight or (before and _is_before(other, flight)):
                other.is_open = False
                self._open.pop(number, None)

    def end_before(self, flight: Flight) -> None:
        """Free the tensors of what has ended before an operation that was not in flight itself."""
        for number, other in list(self._open.items()):
            if _is_before(other, flight):
                other.is_open = False
                self._open.pop(number, None)

    def check(self, title: str, touched: Iterator[tuple[Tensor, bool]]) -> None:
        """Raise `BufferInUse` if a tensor that is read, or written, is in use."""
        if threading.current_thread().name in _MOVERS:
            return
        for tensor, is_write in touched:
            memory = Memory.of(tensor)
            if memory is None:
                continue
            for flight in list(self._open.values()):
                if met := flight.shares(memory, is_write):
                    raise self._error(flight, met, is_write, title)

    def changed(self, flight: Flight) -> BufferInUse:
        """Return the error for an input that has changed, nobody knows where."""
        return BufferInUse(
            f"rank {self._rank}: an input of {flight.title}, issued at {flight.site}, was changed "
            "before wait(), past torch's operators (by NumPy, or through a pointer): it belongs to "
            "the operation until its work has been waited for; call wait() before changing it"
        )

    def _error(self, flight: Flight, met: Buffer, is_write: bool, title: str) -> BufferInUse:
        verb, touched = ("writes", "written") if is_write else ("reads", "read")
        use, rule = ("writes", "used") if met.is_written else ("reads", "written")
        step = "call wait() on it before this line"
        if flight.work is None or flight.work() is None:
            step = f"nobody has kept the work, so keep what the call returns and {step}"
        return BufferInUse(
            f"rank {self._rank} {verb} a tensor that {flight.title} still {use}\n"
            f"  issued at {flight.site}\n"
            f"  {touched} at {_site(sys._getframe())}, by {title}\n"
            f"what an asynchronous operation {use} must not be {rule} until its work has been "
            f"waited for: {step}"
        )


def _is_before(other: Flight, flight: Flight) -> bool:
    return other.in_order and flight.in_order and other.group is flight.group


Used = tuple[Tensor, bool]

_flights: dict[World, Flights] = {}


def of(world: World) -> Flights:
    """Return the operations in flight of a world's rank, which are watched from now on."""
    attend()
    with _registration:
        if not _flights:
            _swap_readers()
        return _flights.setdefault(world, Flights(world.rank))


def close(world: World) -> None:
    """Watch a world's operations no longer."""
    with _registration:
        if _flights.pop(world, None) is not None and not _flights:
            _swap_readers()


def _reader(name: str) -> Callable[..., Any]:
    """Return a method of tensors that looks before it reads past torch's operators."""
    theirs = getattr(torch.Tensor, name)

    @functools.wraps(theirs)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        flights = _watched()
        if flights and _KEY.is_seen():
            with unseen():
                flights.check(f"Tensor.{name}", iter([(self, False)]))
        return theirs(self, *args, **kwargs)

    dispatch.untrace(read, "it looks for operations in flight")
    return read


_INHERITED = object()  # what a method is that a class does not define itself
_readers: dict[str, Any] = {name: _reader(name) for name in ("tolist", "numpy", "__reduce_ex__")}


def _swap_readers() -> None:
    """Put these methods in place and keep what was there, or the other way round."""
    for name, method in _readers.items():
        _readers[name] = vars(torch.Tensor).get(name, _INHERITED)
        if method is _INHERITED:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, method)


def _watched() -> Flights | None:
    """Return the operations in flight of the calling thread's rank, if they are watched."""
    world = current()
    return None if world is None else _flights.get(world)


def attend() -> None:
    """Have the operators of the calling thread looked at."""
    _KEY.prepare()
    _KEY.include(True)


def follow() -> None:
    """Have the operators of the calling thread looked at if its rank is watched."""
    if current() in _flights:
        attend()


unseen = _KEY.excluded


@forks.after_fork_in_child
def _forget() -> None:
    global _registration
    _registration = threading.Lock()  # somebody who is not here may hold it
    for world in list(_flights):
        close(world)


def used(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> list[Used]:
    """Return the tensors of a call of a transport, and whether it writes to each."""
    if name == "coalesce":
        calls: Sequence[Call] = args[0]
        return [each for call, given in calls for each in used(call, given, {}, rank)]
    found = overlaps.used(name, args, rank)
    squares = _tensors(kwargs.get("squares"))
    written = [(each, True) for each in found.written + squares]
    in_place = name == "all_reduce" or (name == "reduce" and found.written)
    return written if in_place else written + [(each, False) for each in found.read]


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [each for each in given or () if isinstance(each, Tensor)]


def only_read(used: Sequence[Used]) -> list[Tensor]:
    """Return the tensors that an operation reads and does not also write to."""
    outputs = [Memory.of(tensor) for tensor, is_written in used if is_written]
    return [
        tensor
        for tensor, is_written in used
        if not is_written
        and (memory := Memory.of(tensor)) is not None
        and not any(output is not None and memory.overlaps(output) for output in outputs)
    ]


def _site(frame: FrameType) -> str:
    """Name the innermost line that is neither torch's nor this package's."""
    inner: FrameType | None = frame
    while inner is not None and _is_aside(inner.f_code.co_filename):
        inner = inner.f_back
    found = inner or frame
    return notes.site(StackSummary.extract([(found, found.f_lineno)], lookup_lines=False))


def _is_aside(file: str) -> bool:
    return file.startswith((_TORCH, notes.PACKAGE)) or file.endswith(_DECORATORS)


def _register_kernels() -> None:
    """Have operators look, once: there are two thousand, and many programs need none of it."""
    with _registration:
        if not _KEY.is_registered():
            _KEY.register(filter(_touches, dispatch.operators()), _kernel)


def _touches(operator: torch._ops.OpOverload) -> bool:
    schema = operator._schema
    if operator.overloadpacket.__name__ in _DO_NOT_TOUCH or torch.Tag.inplace_view in operator.tags:
        return False
    is_view = any(result.alias_info is not None for result in schema.returns)
    if is_view and not any(_is_write(argument) for argument in schema.arguments):
        return False
    return any("Tensor" in str(argument.type) for argument in schema.arguments)


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _kernel(operator: torch._ops.OpOverload) -> dispatch.Kernel:
    arguments = operator._schema.arguments
    writes = [_is_write(argument) for argument in arguments]
    written = {argument.name for argument in arguments if _is_write(argument)}

    def touched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Used]:
        for value, is_write in zip(args, writes, strict=False):
            for tensor in _tensors(value) if isinstance(value, Tensor | list | tuple) else ():
                yield tensor, is_write
        for name, value in kwargs.items():
            for tensor in _tensors(value) if isinstance(value, Tensor | list | tuple) else ():
                yield tensor, name in written

    def checked(*args: Any, **kwargs: Any) -> Any:
        with _KEY.excluded():
            flights = _watched()
            if flights:
                flights.check(str(operator), touched(args, kwargs))
            elif flights is None:
                _KEY.include(False)  # nobody watches this thread's world any more
            return operator(*args, **kwargs)

    return checked
