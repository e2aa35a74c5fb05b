"""What the level DETAIL adds: statistics of inputs, and the stacks of all ranks in errors.

While it is on each group has a layer of it, so that no other level pays for it. What a rank is
about to do it first notes where the others can read it, also while it hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from phalanx import logs, profiling
from phalanx.backends.base import COLLECTIVES, MESSAGES, Call
from phalanx.debug import diary, in_flight, layers, notes
from phalanx.debug.diary import Diary
from phalanx.debug.in_flight import Flight, Flights
from phalanx.debug.layers import Layer, LayeredWork
from phalanx.debug.notes import Entry, Statistics
from phalanx.errors import BufferInUse, DistBackendError
from phalanx.groups import ProcessGroup
from phalanx.launch.outcomes import spell
from phalanx.types import Timeout
from phalanx.work import Work
from phalanx.world import World

_HEADING = "seen at debug level DETAIL:"

_log = {True: logs.area("p2p"), False: logs.area("collectives")}


def look_into(world: World, group: ProcessGroup) -> None:
    """Have all operations of a group looked into."""
    if layers.find(group, Detailed) is None:
        layers.put(group, Detailed(group, diary.of(world, group.backend), in_flight.of(world)))


def look_away(world: World) -> None:
    """Look into the operations of a world's groups no longer."""
    diary.close(world)
    in_flight.close(world)
    for group in list(world.groups.values()):
        layers.take(group, Detailed)


class Called(NamedTuple):
    """One call, as its own rank knows it."""

    group: ProcessGroup
    name: str
    entry: Entry
    statistics: Statistics
    site: str

    def __str__(self) -> str:
        return self.entry.title


class Detailed(Layer):
    """Looks at every operation before it passes it on."""

    def __init__(self, group: ProcessGroup, diary: Diary, flights: Flights) -> None:
        super().__init__(group)
        self._backend = group.backend
        self._diary = diary
        self._flights = flights
        self._issued = 0

    def call(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        in_flight.attend()
        with in_flight.unseen():  # what is done here is done for the operation
            return self._call(name, operation, args, kwargs)

    def _call(
        self,
        name: str,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        used = in_flight.used(name, args, kwargs, self._backend.rank)
        issued = self._issued
        called = self._called(name, args, sys._getframe(1))
        try:
            flight = self._flights.admit(self.group, name, called.entry.title, used)
        except BufferInUse:
            self._issued = issued
            raise
        _say(called)
        self._diary.begin(called.entry)
        try:
            result = operation(*args, **kwargs)
            if name in COLLECTIVES and isinstance(result, Work):
                # What ranks do not agree on, the call itself raises: few look at every work.
                result.wait()
        except DistBackendError as error:
            explain(error, called)
            raise
        finally:
            self._diary.end()
            if name in COLLECTIVES:
                self._issued = self._backend.sequence_number()
        if not isinstance(result, Work):
            self._flights.end_before(flight)
            return result
        work = DetailedWork(result, called, self._flights, flight, in_flight.only_read(used))
        self._flights.begin(flight, work)
        return work

    def _called(self, name: str, args: tuple[Any, ...], frame: FrameType) -> Called:
        group, rank = self.group, self._backend.rank
        calls: Sequence[Call] = args[0] if name == "coalesce" else [(name, args)]
        inputs = [tensor for each in calls for tensor in _inputs(*each, rank)]
        where = f"on group {group.group_name!r}"
        if name in MESSAGES:
            peer, tag = args[1], args[2] if len(args) > 2 else 0
            ends = (rank, peer) if name == "send" else (peer, rank)
            key = f"{group.group_name} {ends[0]}>{ends[1]} {tag}"
            other = "any rank" if peer is None else f"rank {group.ranks[peer]}"
            way = "to" if name == "send" else "from"
            title = f"{name} {way} {other} (tag {tag}) {where}"
        elif name == "monitored_barrier":
            key, title = f"{group.group_name} {name}", f"{name} {where}"
        else:
            # What has been issued may still be in the queue, and not yet counted by the backend.
            sequence = max(self._issued, self._backend.sequence_number()) + 1
            self._issued = sequence + len(calls) - 1
            key = f"{group.group_name} #{sequence}"
            names = ", ".join(sorted({each for each, _ in calls}))
            several = f" ({len(calls)} coalesced)" if name == "coalesce" else ""
            title = f"{names} #{sequence} {where}{several}"
        statistics, stack = Statistics.of(inputs), notes.user_stack(frame)
        entry = Entry(key, title, str(statistics), notes.shown(stack))
        return Called(group, name, entry, statistics, notes.site(stack))


def _say(call: Called) -> None:
    log, found = _log[call.name in MESSAGES], call.statistics
    log.debug("%s: %s, at %s", call, found, call.site)
    if found.num_nan or found.num_inf:
        log.warning(
            "%s: %d NaN and %d Inf in the input (%s), at %s",
            call,
            found.num_nan,
            found.num_inf,
            found.shape,
            call.site,
        )


class DetailedWork(LayeredWork):
    """A work whose errors say what all ranks were doing, and whose tensors are in use."""

    def __init__(
        self, work: Work, call: Called, flights: Flights, flight: Flight, inputs: list[Tensor]
    ) -> None:
        super().__init__(work)
        self._call = call
        self._flights = flights
        self._flight = flight
        self._inputs = [(tensor, notes.checksum_of(tensor)) for tensor in inputs]

    def wait(self, timeout: Timeout | None = None) -> bool:
        try:
            done = super().wait(timeout)
        except DistBackendError as error:
            self.is_completed()
            explain(error, self._call)
            raise
        with in_flight.unseen():
            if self._have_inputs_changed():
                self._flights.end(self._flight)
                raise self._flights.changed(self._flight)
        self._flights.end(self._flight)
        return done

    def _have_inputs_changed(self) -> bool:
        if not self._flight.is_open or not self._flight.has_stable_inputs:
            return False
        return any(notes.checksum_of(tensor) != before for tensor, before in self._inputs)

    def is_completed(self) -> bool:
        completed = super().is_completed()
        if completed and self._flight.is_open:
            self._flights.end(self._flight)
        return completed

    def exception(self) -> BaseException | None:
        error = super().exception()
        self.is_completed()
        if isinstance(error, DistBackendError):
            explain(error, self._call)
        return error

    def result(self) -> list[Tensor]:
        self.is_completed()
        return super().result()


def explain(error: DistBackendError, call: Called) -> None:
    """Add to an error what each rank of the group has put into the operation, and their stacks."""
    text = str(error)
    if _HEADING in text:
        return
    group = call.group
    lines = [text, "", _HEADING, f"  inputs of {call}"]
    places: dict[tuple[str, str], list[int]] = {}
    # Ranks are named as the world does, as in all reports.
    for rank, note in zip(group.ranks, group.backend.notes(), strict=True):
        entries = notes.read(note)
        same = next((entry for entry in reversed(entries) if entry.key == call.entry.key), None)
        lines.append(f"    rank {rank}: {_input(call, same, bool(entries))}")
        if entries:
            places.setdefault(_place(same, entries), []).append(rank)
    lines.append("  where each rank is in this call, or else is now")
    for (title, stack), ranks in places.items():
        lines.append(f"    {spell(ranks)}: {title}")
        lines += [f"    {line}" for line in stack.splitlines()]
    error.args = ("\n".join(lines),)


def _input(call: Called, same: Entry | None, is_known: bool) -> str:
    """Say what a rank has put into a call, of which it has noted ``same``."""
    if not is_known:
        return "not known: its debug level is not DETAIL"
    if same is None:
        return "not among its latest calls"
    return same.statistics if same.title == str(call) else f"{same.title}: {same.statistics}"


def _place(same: Entry | None, entries: Sequence[Entry]) -> tuple[str, str]:
    """Return a title and the stack that best says where a rank is."""
    if same is not None and same.stack:
        return same.title, same.stack
    *before, last = entries
    if last.key != notes.NOW:
        return last.title, last.stack
    title = f"outside of any call, after {before[-1].title}" if before else "before its first call"
    age = (time.monotonic_ns() - int(last.title)) / 1e9
    if age > 1:  # it has ended, or does not let Python run
        title += f" (as of {age:.1f} s ago)"
    return title, last.stack


def _inputs(name: str, args: tuple[Any, ...], rank: int) -> list[Tensor]:
    """Return the tensors that this rank gives, not those that it only gets."""
    if name == "recv" or (name == "broadcast" and args[1] != rank):
        return []
    return profiling.inputs(name, args)
