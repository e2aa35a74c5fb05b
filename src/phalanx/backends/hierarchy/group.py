"""A group whose ranks are on several hosts, as one of them sees it."""

from __future__ import annotations

import functools
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from phalanx import _native
from phalanx.backends import reduction, shapes
from phalanx.backends.engines import sites
from phalanx.backends.engines.calls import Call, counted, dtype_name, shown
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.hierarchy.choices import LONGEST_CHUNK, SMALL, chunk_bytes
from phalanx.backends.hierarchy.crossing import (
    Crossing,
    flat,
    likely_reason,
    put,
    speaks_for_host,
)
from phalanx.backends.hierarchy.exchange import Exchange, Scratch, spread
from phalanx.backends.hierarchy.letters import Letters
from phalanx.backends.hierarchy.one_by_one import OneByOne
from phalanx.backends.hierarchy.topology import Topology
from phalanx.backends.hierarchy.vigil import Vigil
from phalanx.backends.hierarchy.warden import Account, Warden
from phalanx.backends.local import LocalBackend
from phalanx.errors import (
    CollectiveMismatch,
    Deadlock,
    DistBackendError,
    DistTimeout,
    PeerFailed,
    expected,
)
from phalanx.types import Deadline, ReduceOp
from phalanx.work import Work

# What the local engine says first in an error: which operation of which rank it is about.
_HEADLINE = re.compile(r"\w+ #\d+ on group '[^\n]*, rank \d+, at [^\n]*?: ")
_MEMBERS = re.compile(r"(on group '[^'\n]*') \(ranks? [^)\n]*\)")
_ADVICE = "init_process_group(timeout=...), new_group(timeout=...)"

_AHEAD = 2  # chunks that travel while others are reduced


class Hierarchy(OneByOne):
    """A group over hosts.

    ``local`` has the group's ranks of this host, in order; ``engine`` all of its ranks. Of a small
    tensor one rank per host speaks for all of them; a large one is cut into slices, each led by
    another rank, and between two hosts passes in chunks, so that the network and the memory work at
    the same time.
    """

    name = "phalanx"
    in_rank_order = False  # within a host first, then by host

    def __init__(
        self,
        local: LocalBackend,
        engine: MessageEngine,
        labels: Sequence[object],
        rank: int,
        timeout: float,
        group: str,
        global_ranks: Sequence[int],
        warden: Warden,
    ) -> None:
        self.local = local
        self._group = group
        self._warden = warden
        self._engine = engine
        self._topology = Topology(labels, rank)
        super().__init__(rank, len(labels), timeout)
        self.global_ranks = list(global_ranks)
        self._vigil = Vigil(warden, engine, group, self.global_ranks)
        self._crossing = Crossing(engine, self._vigil, self._differ, self._tell_of_shapes)
        self._letters = Letters(local, engine, self._topology, self._vigil, self._ask)
        # A chunk of its own and one of the other host's for each that travels, or is about to.
        self._scratch = Scratch(2 * (_AHEAD + 1) * LONGEST_CHUNK)
        self._number, self._site = 0, ""  # of the collective that runs
        self._running: Call | None = None
        warden.join(group, self)

    # Life

    def abort(self, reason: str) -> None:
        self._warden.say_broken(self._group, 0, PeerFailed, reason)
        self.local.abort(reason)
        self._engine.abort(reason)

    def fail(self, reason: str) -> None:
        self.local.fail(reason)
        self._warden.say_ended(self.global_ranks[self.rank], reason)

    def close(self) -> None:
        if self._vigil.is_closed:
            return
        super().close()
        self._vigil.close()
        self._warden.leave(self._group)
        self.local.close()
        self._engine.close()

    def describe(self, rank: int) -> str:
        if self._topology.is_local(rank):
            return self.local.describe(self._topology.places[rank].seat)
        return self._warden.roster.obituary(self.global_ranks[rank], False)

    def account(self) -> Account:
        """Say what this rank does, for those who wait for it."""
        return Account(self._number, self.local.describe(self._topology.seat))

    def look(self) -> None:
        """See whether others are in another collective, while this rank may wait in its own."""
        call = self._running
        if call is not None and (text := self._crossing.stray(call)):
            self._tell(call.number, CollectiveMismatch, text)

    def note(self, text: str) -> None:
        self.local.note(text)

    def notes(self) -> list[str]:
        near = self.local.notes()
        places = self._topology.places
        return [
            near[places[rank].seat] if self._topology.is_local(rank) else ""
            for rank in range(self.size)
        ]

    def history(self) -> list[dict[str, Any]]:
        return self.local.history()

    # Messages

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        limit = self.timeout if timeout is None else timeout
        return self._letters.send(tensor, dst, tag, limit, async_op)

    def recv(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Work | int:
        limit = self.timeout if timeout is None else timeout
        return self._letters.recv(tensor, src, tag, limit, async_op)

    # Collectives

    def _issue(
        self,
        outputs: Sequence[Tensor],
        timeout: float | None,
        async_op: bool,
        step: Callable[..., None],
        *args: Any,
    ) -> Work | None:
        run = functools.partial(self._run, step, self._issued + 1, sites.here())
        return super()._issue(outputs, timeout, async_op, run, *args)

    def _run(
        self, step: Callable[..., None], number: int, site: str, deadline: Deadline, *args: Any
    ) -> None:
        """Do one collective; if it fails here, nobody waits for this rank in vain."""
        self._number, self._site = number, site
        try:
            with expected():
                self._vigil.look([], number)
                step(deadline, *args)
        except DistBackendError as error:
            if not self._vigil.origin.is_here():
                raise  # a forked child tells nobody: the parent goes on
            raise self._break(step.__name__.strip("_"), error, deadline) from None
        finally:
            self._running = None
            _native.part_of(0)

    def _break(self, name: str, error: DistBackendError, deadline: Deadline) -> DistBackendError:
        """Tell all ranks why the group cannot go on, and return what to raise here."""
        kind, number = type(error), self._number
        reason = _HEADLINE.sub("", str(error), count=1)
        if issubclass(kind, PeerFailed):
            kind = PeerFailed
        if (known := self._warden.known_break(self._group, number)) is not None:
            kind, reason = known.kind, known.text
        elif kind is DistTimeout:
            reason = self._late(deadline.limit) or reason
        self._tell(number, kind, reason)
        if issubclass(kind, CollectiveMismatch | Deadlock):  # the same on all ranks
            return kind(_MEMBERS.sub(r"\1", reason, count=1))
        me = self.global_ranks[self.rank]
        return kind(
            f"{name} #{number} on group {self._group!r}, rank {me}, at {self._site}: {reason}"
        )

    def _tell(self, number: int, kind: type[DistBackendError], reason: str) -> None:
        """Tell all ranks that the group cannot go on from one of its collectives."""
        if self._warden.known_break(self._group, number) is None:
            self._warden.say_broken(self._group, number, kind, reason)
        with suppress(DistBackendError):
            self.local.engine.abort(reason, kind.__name__)

    def _ask(self, peer: int) -> str:
        """Say what a rank of another host does, for one that has waited for it in vain."""
        rank = self.global_ranks[peer]
        return self._warden.tell(rank, self._warden.ask(self._group, [rank]))

    def _late(self, seconds: float) -> str:
        """Say which ranks have not come to a collective in time, and what they do instead.

        Nothing if there is no store any more to ask them in.
        """
        ranks = self.global_ranks
        told = self._warden.ask(self._group, ranks)
        if self._warden.is_lost():
            return ""
        # Of its own host it knows without an answer.
        for rank in set(self._topology.mine) - {self.rank}:
            if ranks[rank] not in told:
                told[ranks[rank]] = Account(-1, self.describe(rank))
        me = ranks[self.rank]
        late = [
            rank
            for rank in ranks
            if rank != me and (rank not in told or told[rank].number < self._number)
        ]
        limit = f"reached its timeout of {seconds:g} s"
        if not late:
            rows = [f"\n  {self._warden.tell(rank, told)}" for rank in ranks if rank != me]
            return f"{limit}; all ranks have come, but do not get on{''.join(rows)}"
        missing = _native.rank_list(sorted(late))
        here = _native.rank_list(sorted({*ranks} - {*late}))
        lines = [f"{limit}\n  arrived: {here}; not arrived: {missing}"]
        lines += [f"  {self._warden.tell(rank, told)}" for rank in late]
        lines.append(f"find out what keeps {missing}, or give more time: {_ADVICE}")
        return "\n".join(lines)

    def _call(self, what: str, *agreed: object, tensor: Tensor | None = None) -> Call:
        """Say which collective this rank is about to do; ranks must agree on all of it.

        Where ``what`` has "{}", reports show the shape of ``tensor``; ranks agree on its size.
        """
        # What is agreed on stands for itself in a number.
        sized = what if tensor is None else what.format(counted(tensor))
        digest = zlib.crc32(repr((self._number, sized, agreed)).encode())
        words = what if tensor is None else what.format(shown(tensor))
        _native.part_of(digest << 1 | 1, words, self._number, self._site)
        self._running = Call(self._number, words, self._site, f"{digest:08x}")
        return self._running

    def _tell_of_shapes(self, mine: Call, theirs: Call, peer: int) -> None:
        """Log that ranks bring equally many elements in different shapes."""
        title = f"{mine.what.partition('(')[0]} #{mine.number} on group {self._group!r}"
        table = self._table(mine, theirs, peer, True)
        me = self.global_ranks[self.rank]
        shapes.tell(me, mine.site, f"{title}: {shapes.DIFFER}{table}")

    def _differ(self, mine: Call, theirs: Call, peer: int, agreed: bool) -> str:
        """Say who is in which collective."""
        return (
            f"{mine.what.partition('(')[0]} #{mine.number} on group {self._group!r} does not "
            f"match across hosts{self._table(mine, theirs, peer, agreed)}\n"
            f"{likely_reason(mine, theirs)}"
        )

    def _table(self, mine: Call, theirs: Call, peer: int, agreed: bool) -> str:
        where = self._topology
        rows = []
        for rank, call, is_shared in sorted(
            [(self.rank, mine, agreed), (peer, theirs, True)], key=lambda side: side[0]
        ):
            is_shared &= speaks_for_host(call)
            ranks = where.hosts[where.places[rank].host] if is_shared else [rank]
            named = _native.rank_list(sorted(self.global_ranks[rank] for rank in ranks))
            host = self._warden.host_of(self.global_ranks[ranks[0]])
            rows.append((f"{named} on host {host}", f"{call.what} #{call.number}", call.site))
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "".join(f"\n  {a:{first}}  {b:{second}}  {site}" for a, b, site in rows)

    def _all_reduce(
        self, deadline: Deadline, tensor: Tensor, op: ReduceOp, squares: Tensor | None
    ) -> None:
        call = self._call(f"all_reduce({{}}, {op.name})", tensor=tensor)
        buffer = flat(tensor)
        if buffer.numel() * buffer.itemsize <= SMALL:
            self._all_reduce_small(deadline, buffer, op, call)
        else:
            self._all_reduce_sliced(deadline, buffer, op, call)
        put(tensor, buffer)
        if squares is not None:
            squares.fill_(reduction.sum_of_squares(tensor))

    def _all_reduce_small(
        self, deadline: Deadline, buffer: Tensor, op: ReduceOp, call: Call
    ) -> None:
        where, total = self._topology, buffer.clone()
        self.local.reduce(total, 0, _partial(op), timeout=deadline.left())
        if where.seat == 0:
            exchange = Exchange(
                self._crossing, where.peers(0), where.host, total, op, call, self._scratch
            )
            exchange.start()
            exchange.finish(deadline)
            reduction.finish(total, op, self.size)
        self.local.broadcast(total, 0, timeout=deadline.left())
        buffer.copy_(total)

    def _all_reduce_sliced(
        self, deadline: Deadline, buffer: Tensor, op: ReduceOp, call: Call
    ) -> None:
        where = self._topology
        peers = where.peers(where.seat) if where.seat < where.num_slices else []
        width = max(buffer.numel(), 1)
        if len(where.hosts) == 2:  # more send nothing ahead: chunks would only be more messages
            size = chunk_bytes(width * buffer.itemsize // where.num_slices)
            width = where.num_slices * (size // buffer.itemsize)
        travelling: deque[tuple[Exchange | None, Tensor, Sequence[Tensor]]] = deque()
        agreed = False  # with the other hosts, on what this is
        for chunk in torch.split(buffer, width):
            slices = self._slices(chunk)
            own = slices[where.seat]
            if not agreed:  # until then nothing is written
                own = self._scratch.take(own)
            self.local.reduce_scatter(own, slices, _partial(op), timeout=deadline.left())
            exchange = None
            if own.numel():
                exchange = Exchange(self._crossing, peers, where.host, own, op, call, self._scratch)
                exchange.start()
            travelling.append((exchange, own, slices))
            if len(travelling) > _AHEAD:
                self._end_chunk(deadline, op, *travelling.popleft())
                agreed = True
        for chunk_on_its_way in travelling:
            self._end_chunk(deadline, op, *chunk_on_its_way)

    def _end_chunk(
        self,
        deadline: Deadline,
        op: ReduceOp,
        exchange: Exchange | None,
        own: Tensor,
        slices: Sequence[Tensor],
    ) -> None:
        if exchange is not None:
            exchange.finish(deadline)
            reduction.finish(own, op, self.size)
        self.local.all_gather(slices, own, timeout=deadline.left())
        if own is not slices[self._topology.seat]:
            self._scratch.give(own)

    def _slices(self, chunk: Tensor) -> list[Tensor]:
        """Cut a chunk into one slice per rank of this host; ranks that lead none have nothing."""
        where = self._topology
        slices = list(chunk.tensor_split(where.num_slices))
        return slices + [chunk[:0]] * (len(where.mine) - where.num_slices)

    def _reduce(
        self, deadline: Deadline, output: Tensor, input: Tensor, root: int, op: ReduceOp
    ) -> None:
        call = self._call(f"reduce({{}}, {op.name}, {self._root(root)})", tensor=input)
        where = self._topology
        goal = where.places[root]
        total = flat(input).clone()
        leader = where.counterpart(root, where.host)
        seat = where.places[leader].seat
        self.local.reduce(total, seat, _partial(op), timeout=deadline.left())
        if where.rank != leader:
            return
        if where.host != goal.host:
            self._crossing.send(root, call, total).wait(deadline)
            return
        # In the order of the hosts, as everywhere.
        parts = {where.host: total}
        for host in range(len(where.hosts)):
            if host != where.host:
                parts[host] = torch.empty_like(total)
                self._accept(where.counterpart(root, host), call, parts[host], deadline)
        first, *others = (parts[host] for host in sorted(parts))
        for part in others:
            reduction.combine(first, part, op)
        reduction.finish(first, op, self.size)
        output.detach().copy_(first.view(output.shape))

    def _accept(self, peer: int, call: Call, tensor: Tensor, deadline: Deadline) -> None:
        self._crossing.receive(peer, call, tensor).wait(deadline)

    def _broadcast(self, deadline: Deadline, tensor: Tensor, root: int) -> None:
        call = self._call(f"broadcast({{}}, {self._root(root)})", tensor=tensor)
        where = self._topology
        goal = where.places[root]
        buffer = flat(tensor)
        if buffer.numel() * buffer.itemsize <= SMALL:
            leader = where.places[where.counterpart(root, where.host)].seat
            if where.seat == leader:
                peers = [where.counterpart(root, host) for host in range(len(where.hosts))]
                spread(self._crossing, peers, where.host, goal.host, buffer, call, deadline)
            self.local.broadcast(buffer, leader, timeout=deadline.left())
        else:
            self._broadcast_sliced(deadline, buffer, goal, call)
        if where.rank != root:
            put(tensor, buffer)

    def _broadcast_sliced(self, deadline: Deadline, buffer: Tensor, goal: Any, call: Call) -> None:
        """Let every rank of the root's host send a slice."""
        where = self._topology
        if where.host == goal.host:
            self.local.broadcast(buffer, goal.seat, timeout=deadline.left())
        slices = self._slices(buffer)
        own = slices[where.seat]
        if where.seat < where.num_slices:
            peers = where.peers(where.seat)
            spread(self._crossing, peers, where.host, goal.host, own, call, deadline)
        if where.host != goal.host:
            self.local.all_gather(slices, own.clone(), timeout=deadline.left())

    def _all_gather(self, deadline: Deadline, outputs: Sequence[Tensor], input: Tensor) -> None:
        sizes = [output.numel() for output in outputs]
        # Every rank knows all sizes: they must agree on them.
        call = self._call(f"all_gather({dtype_name(input.dtype)})", sizes)
        where = self._topology
        parts = [flat(output) for output in outputs]
        own = flat(input)
        near = [parts[rank] for rank in where.mine]
        self.local.all_gather(near, own, timeout=deadline.left())
        # Each rank sends its own to every other host, and takes in what is meant for its seat.
        sendings = [
            self._crossing.send(where.counterpart(where.rank, host), call, own)
            for host in range(len(where.hosts))
            if host != where.host
        ]
        far = [rank for rank in range(self.size) if not where.is_local(rank)]
        for rank in far:
            if where.counterpart(rank, where.host) == where.rank:
                self._accept(rank, call, parts[rank], deadline)
        for rank in far:
            seat = where.places[where.counterpart(rank, where.host)].seat
            self.local.broadcast(parts[rank], seat, timeout=deadline.left())
        for sending in sendings:
            sending.wait(deadline)
        for output, got in zip(outputs, parts, strict=True):
            put(output, got)

    def _reduce_scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp
    ) -> None:
        sizes = [input.numel() for input in inputs]
        call = self._call(f"reduce_scatter({dtype_name(output.dtype)}, {op.name})", sizes)
        where = self._topology
        parts: dict[int, Tensor] = {}
        sendings = []
        for rank in range(self.size):
            leader = where.counterpart(rank, where.host)
            total = flat(inputs[rank]).clone()
            seat = where.places[leader].seat
            self.local.reduce(total, seat, _partial(op), timeout=deadline.left())
            if leader != where.rank:
                continue
            if rank == where.rank:
                parts[where.host] = total
            else:
                sendings.append(self._crossing.send(rank, call, total))
        for host in range(len(where.hosts)):
            if host != where.host:
                parts[host] = torch.empty_like(parts[where.host])
                self._accept(where.counterpart(where.rank, host), call, parts[host], deadline)
        for sending in sendings:
            sending.wait(deadline)
        first, *others = (parts[host] for host in sorted(parts))
        for part in others:
            reduction.combine(first, part, op)
        reduction.finish(first, op, self.size)
        output.detach().copy_(first.view(output.shape))

    def _barrier(self, deadline: Deadline) -> None:
        call = self._call("barrier()")
        where = self._topology
        self.local.barrier(timeout=deadline.left())
        if where.seat == 0:
            token = torch.zeros(1, dtype=torch.uint8)
            exchange = Exchange(
                self._crossing,
                where.peers(0),
                where.host,
                token,
                ReduceOp(ReduceOp.SUM),
                call,
                self._scratch,
            )
            exchange.start()
            exchange.finish(deadline)
        self.local.barrier(timeout=deadline.left())


def _partial(op: ReduceOp) -> ReduceOp:
    """Return the reduction of a part of the ranks."""
    return ReduceOp(ReduceOp.SUM) if op.name == "AVG" else op
