"""What torch.distributed knows of its groups, kept for each rank that is a thread."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from phalanx import world
from phalanx.testing.torch_threads.meeting import Meeting
from phalanx.torch_backend.theirs import c10d, state
from phalanx.torch_backend.untraced import untraced

_INIT = inspect.unwrap(state.init_process_group).__code__
_numbers = itertools.count(1)
_ranks: WeakKeyDictionary[world.Slot, RankState] = WeakKeyDictionary()


@untraced
class RankState:
    """What torch keeps in its `_world`, for one rank.

    `given` says that the default group is the one that the rank was started with: the program may
    still make its own in its place.
    """

    def __init__(self, rank: int, store: Any, meeting: Meeting) -> None:
        self.slot = world.current_slot()
        self.rank = rank
        self.number = next(_numbers)  # no other rank, of this world or a later one, has it
        self.store = store
        self.meeting = meeting
        self.num_meetings = 0
        self.variables = _variables(rank, meeting.size)
        self.handlers: dict[Any, Any] | None = None  # of operators on distributed tensors
        self.model: Any = None  # the DistributedDataParallel whose forward it is in
        self.given = False
        self._default: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []
        _ranks[self.slot] = self

    pg_config_info = state._World.pg_config_info

    @property
    def default_pg(self) -> Any:
        # Called by __getattr__ for a property of torch's, for the function that asks.
        if self.given and sys._getframe(3).f_code is _INIT:
            self._make_room()
        return self._default

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default = group
        self.given = False

    def _make_room(self) -> None:
        """Leave the default group that was given, if nothing has been done with it."""
        if len(self.pg_map) == 1 and not self._default.inner.sequence_number():
            state.destroy_process_group()

    def close(self) -> None:
        """Close the groups that the rank has left behind."""
        del _ranks[self.slot]
        with world.bind(self.slot):
            for group in reversed(list(self.pg_map)):
                group.shutdown()


def _variables(rank: int, size: int) -> dict[str, str]:
    """Return what a launcher tells a rank in its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",  # torch's default; nobody listens there
    }


def mine() -> RankState | None:
    """Return the state of the calling thread's rank, None in threads of no torch_world."""
    return _ranks.get(world.current_slot())


class States:
    """Stands for torch's `_world`: the state of whoever asks."""

    def __init__(self, process: Any) -> None:
        object.__setattr__(self, "process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(mine() or self.process, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(mine() or self.process, name, value)


class OwnHandlers:
    """An attribute of torch's: who handles operators on distributed tensors, for each rank.

    Contexts such as `loss_parallel` change it.
    """

    def __get__(self, dispatcher: Any, owner: type) -> Any:
        rank = mine()
        if rank is None:
            return vars(dispatcher)["_custom_op_handlers"]
        if rank.handlers is None:
            rank.handlers = dict(vars(dispatcher)["_custom_op_handlers"])
        return rank.handlers

    def __set__(self, dispatcher: Any, handlers: dict[Any, Any]) -> None:
        rank = mine()
        if rank is None:
            vars(dispatcher)["_custom_op_handlers"] = handlers
        else:
            rank.handlers = handlers


@contextmanager
def known_groups() -> Iterator[None]:
    """Let the calling thread, one that a rank has started, find the groups of its rank by name.

    Torch's functional collectives look for them in a registry in C++ that each thread has.
    """
    rank = mine()
    groups = {} if rank is None else {name: group for group, name in rank.pg_names.items()}
    for name, group in groups.items():
        c10d._register_process_group(name, group)
    try:
        yield
    finally:
        for name in groups:
            c10d._unregister_process_group(name)
