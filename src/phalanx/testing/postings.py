"""What ranks have posted and what of it can complete, as far as an exploration decides it.

Collectives of a group are met in the order in which they were posted; messages find their receives
by source and tag. Nothing is given to the engine before all whom it needs have posted it: so it
never waits, and when it is done is for the seed to say.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.futures import Future

from phalanx import work as works
from phalanx.backends.base import MESSAGES
from phalanx.debug import layers
from phalanx.debug.layers import Layer
from phalanx.errors import DistTimeout, expected
from phalanx.groups import ProcessGroup
from phalanx.launch.outcomes import spell
from phalanx.testing.operations import innermost, site_of
from phalanx.testing.scheduler import Scheduler, Task
from phalanx.types import Timeout, seconds
from phalanx.work import Deferral, Work
from phalanx.world import World

_LIMIT = 2.0  # seconds for an operation that all ranks have come to
_KEPT = 64 << 10  # bytes of a message that the engine keeps for whoever receives it
_POLLS = 3  # how often a work that could be done may say that it is not
_MONITORED = "monitored_barrier"
_SENDING = ("send ", "wait for send ")


@dataclass(eq=False)
class Posting:
    """One operation of one rank."""

    group: ProcessGroup
    name: str
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: str
    code: CodeType
    task: Task | None  # who waits for it in the call itself; None if it is asynchronous
    number: int = 0
    is_eager: bool = False  # a send that does not wait for its receive
    is_done: bool = False
    work: Work | None = None
    value: Any = None
    error: BaseException | None = None
    polls: int = 0

    @property
    def what(self) -> str:
        """What a schedule says of it."""
        where = f"on group {self.group.group_name!r}"
        if self.name not in MESSAGES:
            return f"{self.name} {where}"
        peer = "any rank" if self.peer is None else f"rank {self.group.ranks[self.peer]}"
        return f"{self.name} {'to' if self.name == 'send' else 'from'} {peer} {where}"

    @property
    def is_seen(self) -> bool:
        """Whether the engine would wait for it, too."""
        return self.name != "send" or self.args[0].nbytes > _KEPT

    @property
    def peer(self) -> int | None:
        peer: int | None = self.args[1]
        return peer

    @property
    def tag(self) -> int:
        return int(self.args[2]) if len(self.args) > 2 else 0

    def run(self) -> None:
        """Do it, in the call itself."""
        try:
            self.value = self.operation(*self.args, **self.kwargs)
        except BaseException as error:
            self.error = error
        self.is_done = True

    def issue(self) -> None:
        """Give it to the engine, as if from the line that posted it."""
        if self.work is None and self.error is None:
            try:
                self.work = eval(self.code, {"call": self._start})
            except BaseException as error:
                self.error, self.is_done = error, True

    def _start(self) -> Work:
        started: Work = self.operation(*self.args, **self.kwargs, async_op=True)
        return started

    def finish(self) -> bool:
        """See it to its end; say whether it came to one."""
        if self.work is not None:
            try:
                with expected():
                    self.work.wait(_LIMIT)
            except BaseException as error:
                if isinstance(error, DistTimeout) and not self.work.is_completed():
                    return False
                self.error = error
        self.is_done = True
        return True

    def outcome(self) -> Any:
        """Return what the call returns, or raise what it raises."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class Messages:
    """The messages of a group that have not been received, and the receives that wait."""

    sends: dict[tuple[int, int, int], deque[Posting]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    receives: dict[int, list[Posting]] = field(default_factory=lambda: defaultdict(list))

    def heads(self, receive: Posting) -> list[Posting]:
        """Return the messages that a receive could be given: the first of each source."""
        me = receive.group.rank()
        return [
            queue[0]
            for (src, dst, tag), queue in sorted(self.sends.items())
            if queue and dst == me and tag == receive.tag and receive.peer in (None, src)
        ]


class GroupModel:
    """A group, as all its ranks have used it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_posted: dict[tuple[str, int], int] = defaultdict(int)
        self.meetings: dict[tuple[str, int], dict[int, Posting]] = defaultdict(dict)
        self.messages = Messages()

    def can_meet(self, posting: Posting) -> bool:
        return len(self.meetings[_key(posting)]) == self.size

    def pending(self, rank: int) -> list[Posting]:
        """Return what a rank has posted and is not done, in order."""
        mine = [ranks[rank] for ranks in self.meetings.values() if rank in ranks]
        mine += [p for (src, _, _), q in self.messages.sends.items() if src == rank for p in q]
        mine += self.messages.receives[rank]
        return [posting for posting in mine if not posting.is_done]


def _stream(posting: Posting) -> str:
    return _MONITORED if posting.name == _MONITORED else "collectives"


def _key(posting: Posting) -> tuple[str, int]:
    return _stream(posting), posting.number


class Model:
    """All groups of a world, and what happens to what is posted on them."""

    def __init__(self, scheduler: Scheduler, buffered: bool | None) -> None:
        self.scheduler = scheduler
        self._groups: dict[str, GroupModel] = {}
        self._makings: dict[str, dict[int, tuple[Task, Callable[[], None]]]] = defaultdict(dict)
        chance = scheduler.random
        self._hurry = chance.choice([0.0, 0.5, 1.0])  # how likely works complete early
        self._eager = chance.choice([0.0, 0.5, 1.0]) if buffered is None else float(buffered)
        scheduler.when_stuck = self._report
        scheduler.when_free = self._issue_all

    def put_on(self, world: World) -> None:
        """Have all operations of a rank come here."""
        layers.add(world, lambda group: _Posted(group, self))

    def of(self, group: ProcessGroup) -> GroupModel:
        if group.group_name not in self._groups:
            self._groups[group.group_name] = GroupModel(group.size())
        return self._groups[group.group_name]

    def post(self, posting: Posting) -> None:
        """Add an operation to those that others can see."""
        group, rank = self.of(posting.group), posting.group.rank()
        if posting.name == "send":
            tensor, *others = posting.args
            posting.is_eager = tensor.nbytes <= _KEPT and self._chance(self._eager)
            if posting.is_eager:
                posting.args = (tensor.detach().clone(), *others)
                posting.task = None
            assert posting.peer is not None
            group.messages.sends[rank, posting.peer, posting.tag].append(posting)
        elif posting.name == "recv":
            group.messages.receives[rank].append(posting)
        else:
            group.num_posted[_stream(posting), rank] += 1
            posting.number = group.num_posted[_stream(posting), rank]
            group.meetings[_key(posting)][rank] = posting
        if self._chance(self._hurry) and self.can_complete(posting):
            self.complete(posting)

    def _chance(self, likely: float) -> bool:
        return self.scheduler.random.random() < likely

    def can_complete(self, posting: Posting) -> bool:
        """Say whether all whom an operation needs have posted what it needs."""
        if posting.is_done:
            return True
        group = self.of(posting.group)
        if posting.name == "recv":
            return bool(group.messages.heads(posting))
        if posting.name == "send":
            assert posting.peer is not None
            receives = group.messages.receives[posting.peer]
            return any(posting in group.messages.heads(receive) for receive in receives)
        return group.can_meet(posting)

    def complete(self, posting: Posting) -> None:
        """Bring an operation to its end, and first those that come before it."""
        if posting.is_done:
            return
        group = self.of(posting.group)
        if posting.name in MESSAGES:
            me = posting.group.rank() if posting.name == "recv" else posting.peer
            assert me is not None
            self._deliver(group, me, posting)
            return
        stream = _stream(posting)
        for number in range(1, posting.number + 1):
            meeting = group.meetings.pop((stream, number), None)
            if meeting is not None:
                self._execute([meeting[rank] for rank in sorted(meeting)])

    def _deliver(self, group: GroupModel, rank: int, until: Posting) -> None:
        """Give messages to the receives of a rank, the earliest first."""
        for receive in list(group.messages.receives[rank]):
            heads = group.messages.heads(receive)
            if not heads:
                continue
            send = self.scheduler.random.choice(heads)
            source = send.group.rank()
            group.messages.sends[source, rank, receive.tag].popleft()
            group.messages.receives[rank].remove(receive)
            tensor, _, *others = receive.args
            receive.args = (tensor, source, *others)
            self._execute([receive, send])
            if until.is_done:
                return

    def _execute(self, postings: list[Posting]) -> None:
        """Have the engine do what all concerned have posted, those who wait on their own threads.

        If it does not come to an end, that is for the engine to tell.
        """
        me = self.scheduler.current()
        later = [posting for posting in postings if posting.task is None]
        parts = {p.task: p.run for p in postings if p.task is not None and p.task is not me}
        for posting in later:
            posting.issue()
        with self.scheduler.together(parts):
            for posting in postings:
                if posting.task is me and me is not None:
                    posting.run()
            if not all(posting.finish() for posting in later):
                self.scheduler.go_free()

    def make(self, world: World, name: str, ranks: list[int], make: Callable[[], Any]) -> Any:
        """Make a group once all its ranks have come to do so."""
        task = self.scheduler.current()
        if task is None:
            return make()
        made: list[Any] = []
        failed: list[BaseException] = []

        def part() -> None:
            try:
                made.append(make())
            except BaseException as error:
                failed.append(error)

        comers = self._makings[name]
        comers[world.rank] = task, part
        self.scheduler.pause(
            f"making of group {name!r}",
            site_of(sys._getframe()),
            lambda: bool(made or failed) or len(comers) == len(ranks),
        )
        if not made and not failed:
            others = {task: part for rank, (task, part) in comers.items() if rank != world.rank}
            with self.scheduler.together({} if self.scheduler.is_free else others):
                part()
        if failed:
            raise failed[0]
        return made[0]

    def drain(self, group: ProcessGroup) -> None:
        """Bring what a rank has issued to its end, as far as others let it, before it leaves."""
        rank, model = group.rank(), self.of(group)
        for posting in model.pending(rank):
            if posting.is_done or posting.name in MESSAGES:
                continue
            if self.scheduler.pause(
                f"end, after {posting.what}",
                posting.site,
                partial(self.can_complete, posting),
            ):
                self.complete(posting)
        for posting in model.pending(rank):
            if posting.name == "send":
                posting.issue()

    def _issue_all(self) -> None:
        for group in self._groups.values():
            for rank in range(group.size):
                for posting in group.pending(rank):
                    if posting.task is None:
                        posting.issue()

    def _report(self, blocked: list[Task]) -> str | None:
        """Tell of a deadlock that the engine would not see: it keeps small messages, for one."""
        ended = self.scheduler.ended()
        blocked = [task for task in blocked if task.rank not in ended]
        if self.scheduler.has_failed or all(task.is_seen for task in blocked):
            return None
        lines = [f"{spell({task.rank for task in blocked})} wait and none of them can go on"]
        lines += [f"  {task.who}: {task.what}  at {task.site}" for task in blocked]
        lines += [f"  {spell(ended)}: ended before"] * bool(ended)
        if any(task.what.startswith(_SENDING) and not task.is_seen for task in blocked):
            lines.append(
                "here a send waits for its receive, as large messages do and small ones need not: "
                "let one side receive first, or use batch_isend_irecv"
            )
        return "\n".join(lines)


class _Posted(Layer):
    """Posts the operations of a group instead of doing them."""

    def __init__(self, group: ProcessGroup, model: Model) -> None:
        super().__init__(group)
        self._model = model

    def call(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model, scheduler = self._model, self._model.scheduler
        task = scheduler.current()
        if task is None:
            return operation(*args, **kwargs)
        is_async = kwargs.pop("async_op", False)
        timeout = kwargs.pop("timeout", None)
        frame = innermost(sys._getframe(1))
        posting = Posting(
            self.group,
            name,
            operation,
            args,
            kwargs,
            site_of(frame),
            _code_at(frame),
            None if is_async else task,
        )
        # The choice that stands before the posting: others may be first.
        scheduler.pause(posting.what, posting.site)
        if scheduler.is_free:
            return self._freely(posting, is_async, timeout)
        model.post(posting)
        if is_async:
            work = ModelWork(posting, model)
            scheduler.pause(f"what follows {posting.what}", posting.site)
            return work
        if posting.is_eager:
            return None
        while not posting.is_done:
            came = scheduler.pause(
                posting.what,
                posting.site,
                lambda: model.can_complete(posting),
                is_patient=timeout is None,
                is_seen=posting.is_seen,
            )
            if posting.is_done:
                break
            if scheduler.is_free:
                return self._freely(posting, is_async, timeout)
            if not came:
                raise DistTimeout(
                    f"{posting.what}: nobody else can go on, so it runs out of its {timeout:g} s"
                )
            model.complete(posting)
        return posting.outcome()

    def _freely(self, posting: Posting, is_async: bool, timeout: float | None) -> Any:
        given = dict(posting.kwargs)
        if timeout is not None:
            given["timeout"] = timeout
        if is_async:
            given["async_op"] = True
        return posting.operation(*posting.args, **given)


class ModelWork(Work):
    """An operation that completes when the seed says so, as late as when somebody waits for it."""

    def __init__(self, posting: Posting, model: Model) -> None:
        self._posting = posting
        self._model = model
        self._deferral = Deferral()

    def wait(self, timeout: Timeout | None = None) -> bool:
        posting, model, scheduler = self._posting, self._model, self._model.scheduler
        limit = None if timeout is None else seconds(timeout)
        if posting.is_eager:
            scheduler.pause(f"wait for {posting.what}", _site())
            return True
        while not posting.is_done:
            came = scheduler.pause(
                f"wait for {posting.what}",
                _site(),
                lambda: model.can_complete(posting),
                is_patient=limit is None,
                is_seen=posting.is_seen,
            )
            if posting.is_done:
                break
            if scheduler.current() is None:
                posting.issue()
                if posting.work is not None:
                    return posting.work.wait(timeout)
                break
            if not came:
                raise DistTimeout(f"the operation is still running after a wait of {limit} s")
            model.complete(posting)
        if posting.error is not None:
            raise posting.error
        return True

    def is_completed(self) -> bool:
        posting, model, scheduler = self._posting, self._model, self._model.scheduler
        if posting.is_eager or posting.is_done:
            return True
        if scheduler.current() is None:
            posting.issue()
            return posting.work is None or posting.work.is_completed()
        scheduler.pause(f"look at {posting.what}", _site(), gives_way=True)
        if scheduler.current() is not None and model.can_complete(posting):
            posting.polls += 1
            if posting.polls > _POLLS or scheduler.random.random() < 0.5:
                model.complete(posting)
        return posting.is_done

    def exception(self) -> BaseException | None:
        posting = self._posting
        if not posting.is_done and posting.work is not None:
            return posting.work.exception()
        return posting.error

    def result(self) -> list[Tensor]:
        work = self._posting.work
        return work.result() if work is not None else []

    def source_rank(self) -> int:
        posting = self._posting
        if posting.name != "recv" or posting.work is None:
            return super().source_rank()
        return posting.work.source_rank()

    def get_future(self) -> Future[Any]:
        if self._future is None and works._deferral.get() is None:
            self._future = self._deferral.future(self)
        return super().get_future()


def _site() -> str:
    return site_of(sys._getframe(2))


def _code_at(frame: FrameType | None) -> CodeType:
    """Return code that calls `call`, and says of itself that it is where the frame stands."""
    if frame is None:
        return _code("?", "?", 1)
    return _code(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)


@lru_cache(1024)
def _code(path: str, function: str, line: int) -> CodeType:
    return compile("call()", path, "eval").replace(co_name=function, co_firstlineno=line)
