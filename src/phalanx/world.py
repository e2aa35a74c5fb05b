"""The world: which rank this is, of how many, and the groups it is in.

A process has one world. A thread can be given a world of its own, so that ranks may be threads:
what is bound to a thread is a `Slot`, which `init_process_group` fills and
`destroy_process_group` empties. Threads without a slot of their own share the process's.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler

from phalanx import forks
from phalanx.backends.base import GroupBackend
from phalanx.backends.registry import Backend, BackendConfig, BackendOptions, is_backend_available
from phalanx.groups import ProcessGroup
from phalanx.profiling import seen
from phalanx.types import Timeout, default_pg_timeout, seconds

_DEFAULT_NAME = "world"
_NO_DESCRIPTION = {"default_pg", "undefined"}  # torch's words for having none

# How many worlds that met in a store are over, by rank: a store can serve one after the other.
_past: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()


class World:
    """All that one rank knows: its number, the store, its groups.

    ``groups`` are those it is a member of, by name, in the order of their creation. ``shared`` is
    for backends: what the groups of this rank have in common.
    """

    default: ProcessGroup

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.threads = _bound.slot is not _PROCESS  # its ranks are threads of this process
        self.rank = rank
        self.size = size
        self.store = store
        self.groups: dict[str, ProcessGroup] = {}
        self.num_groups = 0  # made by all ranks together, so that it is the same on all
        self.shared: dict[str, Any] = {}
        self.layers: list[Any] = []  # of phalanx.debug.layers, on all its groups
        self.local_names: Counter[tuple[int, ...]] = Counter()
        self.on_close: Callable[[], None] = lambda: None
        self._origin = forks.Origin()

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        store: Any,
        config: BackendConfig,
        timeout: float,
        pg_options: object = None,
        description: str = "default_pg",
        muster: Any = None,
    ) -> World:
        """Make a world and its default group; all ranks must.

        ``muster`` knows who has come, if somebody counted them.
        """
        world = cls(rank, size, store)
        world.shared["muster"] = muster
        world.num_groups = 1
        try:
            world.default = world.add_group(
                _DEFAULT_NAME, range(size), config, timeout, pg_options, description
            )
        except BaseException:
            world.close()
            raise
        _watch().joined(world)
        return world

    def add_group(
        self,
        name: str,
        ranks: Sequence[int],
        config: BackendConfig,
        timeout: float,
        pg_options: object,
        description: str,
    ) -> ProcessGroup:
        """Make a group that this rank is in; all of ``ranks`` must, and agree on its name."""
        from phalanx.stores import PrefixStore

        store = PrefixStore(name, self.store)
        options = BackendOptions(
            store=store,
            group_rank=ranks.index(self.rank),
            group_size=len(ranks),
            timeout=timeout,
            group_id=name,
            global_ranks=list(ranks),
            group_desc=description if description not in _NO_DESCRIPTION else "",
            world_size=self.size,
            threads=self.threads,
            shared=self.shared,
        )
        backend = config.create(options, pg_options)
        group = self.groups[name] = ProcessGroup(name, description, ranks, backend, config, store)
        _watch().grouped(self, group)
        return group

    def remove_group(self, group: ProcessGroup) -> None:
        """Close and forget a group."""
        if self.groups.get(group.group_name) is not group:
            raise ValueError(
                f"Invalid process group specified: {group!r} has been destroyed before"
            )
        del self.groups[group.group_name]
        group.shutdown()
        _watch().ungrouped(self, group)

    def fail(self, reason: str) -> None:
        """Tell the others that this rank has failed: all who wait for it raise."""
        for group in list(self.groups.values()):
            group.backend.fail(reason)

    def close(self) -> None:
        """Close all groups, the newest first."""
        if not self._origin.is_here():
            return  # it is the parent's
        while self.groups:
            self.remove_group(next(reversed(self.groups.values())))
        for kept in self.shared.values():
            if hasattr(kept, "close"):
                kept.close()
        self.shared.clear()
        self.layers.clear()
        self.store = None
        self.on_close()
        _watch().left(self)


class Slot:
    """Where the world of a process, or of a rank that is a thread, is kept."""

    __slots__ = ("__weakref__", "world")

    def __init__(self) -> None:
        self.world: World | None = None

    def fail(self, reason: str) -> None:
        """Make all who wait for the rank of this slot raise."""
        if self.world is not None:
            self.world.fail(reason)


_PROCESS = Slot()


class _Binding(threading.local):
    slot = _PROCESS  # found on the class by threads that nobody has bound


_bound = _Binding()


@forks.after_fork_in_child
def _leave_to_parent() -> None:
    """Be no rank: a child may make worlds of its own."""
    for slot in {_PROCESS, _bound.slot}:
        if slot.world is not None:
            forks.leave_alone(slot.world)
    _PROCESS.world = None
    _bound.slot = _PROCESS  # also in a thread that was a rank


def _watch() -> Any:
    """Return who looks in on worlds. It stands beside the layers: no module needs it to load."""
    from phalanx.debug import watch

    return watch


def current() -> World | None:
    """Return the calling thread's world."""
    return _bound.slot.world


def current_slot() -> Slot:
    """Return the slot that the calling thread is bound to."""
    return _bound.slot


def enter(slot: Slot) -> None:
    """Bind the calling thread to ``slot``."""
    _bound.slot = slot


def leave() -> None:
    """Bind the calling thread to the process's slot again."""
    _bound.slot = _PROCESS


@contextmanager
def bind(slot: Slot) -> Iterator[Slot]:
    """Bind the calling thread to ``slot`` for the length of a block."""
    before = _bound.slot
    _bound.slot = slot
    try:
        yield slot
    finally:
        _bound.slot = before


def _uninitialised() -> NoReturn:
    raise ValueError(
        "the default process group has not been initialized: call init_process_group first"
    )


def here() -> World:
    """Return the calling thread's world, ValueError if there is none."""
    return _bound.slot.world or _uninitialised()


def default_group() -> ProcessGroup:
    """Return the default group of the calling thread's world."""
    return here().default


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the default one for None; ValueError if this rank is not in it."""
    if group is None:
        return here().default
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"Invalid process group specified: {group!r} (a ProcessGroup that this rank is in, "
            "or None for the default one)"
        )
    return group


def membership(group: ProcessGroup | None, operation: str) -> ProcessGroup | None:
    """Return the group that ``operation`` runs on; warn and return None if outside it."""
    if type(group) is ProcessGroup:
        return group
    world = _bound.slot.world or _uninitialised()
    if group is None:
        return world.default
    if not is_outside(group):
        return resolve(group)
    warnings.warn(
        f"{operation} does nothing on global rank {world.rank}, which is not in the given group",
        stacklevel=4,
    )
    return None


def active(group: ProcessGroup) -> GroupBackend:
    """Return whom to call for the operations of ``group``."""
    found = group.transport
    return cast(GroupBackend, seen(found)) if profiler._is_profiler_enabled else found


def transport(group: ProcessGroup | None, operation: str) -> GroupBackend | None:
    """Return whom to call for ``operation``; warn and return None if outside the group.

    The same as ``active(membership(group, operation))``, written for speed.
    """
    if group is None:
        world = _bound.slot.world or _uninitialised()
        found = world.default.transport
    elif type(group) is ProcessGroup:
        found = group.transport
    else:
        member = membership(group, operation)
        return None if member is None else active(member)
    return cast(GroupBackend, seen(found)) if profiler._is_profiler_enabled else found


def is_outside(group: object) -> bool:
    """Say whether ``group`` is what ranks that are not in a group get in its place."""
    return group is ProcessGroup.NON_GROUP_MEMBER


class _DefaultGroup(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group of the calling thread's world."""
        world = current()
        return world.default if world is not None else None


class group(metaclass=_DefaultGroup):
    """``group.WORLD`` is the default group, None before ``init_process_group``."""


class GroupMember(metaclass=_DefaultGroup):
    """``GroupMember.NON_GROUP_MEMBER`` is what ranks outside a new group get in its place."""

    NON_GROUP_MEMBER = ProcessGroup.NON_GROUP_MEMBER


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Join the world and make its default group; every rank must call this.

    Ranks find each other through ``store`` (with ``rank`` and ``world_size``) or through
    ``init_method``, a URL; with neither, by what the launcher left in the environment.
    ``backend`` is a name or one per device (``"cpu:phalanx,cuda:nccl"``), ``timeout`` the default
    of all operations of the default group. ``pg_options`` are passed to the backend, ``device_id``
    and ``group_name`` have no effect. In a thread that belongs to a rank, this is
    the world of that rank alone.
    """
    slot = _bound.slot
    if slot.world is not None:
        raise ValueError(
            "init_process_group was called twice: call destroy_process_group in between"
        )
    limit = seconds(default_pg_timeout if timeout is None else timeout)
    config = BackendConfig(backend)
    if device_id is not None and (kind := torch.device(device_id).type) not in (
        "cpu",
        *config.device_backend_map,
    ):
        raise ValueError(
            f"device_id is {device_id!r}, and {config!r} has no backend for {kind}: name one per "
            "device, such as 'cpu:phalanx,cuda:nccl', or leave device_id out"
        )
    if store is not None and init_method is not None:
        raise ValueError("init_process_group takes an init_method or a store, not both")
    if store is not None and (world_size < 1 or rank < 0):
        raise ValueError(
            "init_process_group with a store needs world_size and rank, "
            f"got {world_size} and {rank}"
        )
    from phalanx.stores import PrefixStore
    from phalanx.stores.attendance import check_in
    from phalanx.stores.rendezvous import rendezvous

    _watch().joining()
    if store is None:
        url = config.meeting_place() if init_method is None else init_method
        store, rank, world_size = next(iter(rendezvous(url, rank, world_size, timeout=limit)))
    past = _past.setdefault(store, Counter())
    meeting = PrefixStore(f"world{past[rank]}", store)
    try:
        muster = check_in(meeting, rank, world_size, limit)
        slot.world = World.create(
            rank, world_size, meeting, config, limit, pg_options, muster=muster
        )
    except BaseException:
        past[rank] += 1
        raise
    slot.world.on_close = lambda: past.update([rank])


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave ``group``; for the default group (None), leave all groups and the world.

    Waits for no other rank. What this rank has issued is brought to its end first.
    """
    if is_outside(group):
        return
    world = here()
    group = resolve(group)
    if group is world.default:
        _bound.slot.world = None
        world.close()
    else:
        world.remove_group(group)


def is_available() -> bool:
    """Say whether the package can be used: always."""
    return True


def is_initialized() -> bool:
    """Say whether the calling thread has a world."""
    return _bound.slot.world is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number in ``group``, -1 outside it."""
    return -1 if is_outside(group) else resolve(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group``, -1 outside it."""
    return -1 if is_outside(group) else resolve(group).size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Translate a rank of the world into its rank in ``group``."""
    return resolve(group).to_group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Translate a rank of ``group`` into its rank in the world."""
    return resolve(group).to_global_rank(group_rank)


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of ``group``'s members, ordered by group rank."""
    return list(resolve(group).ranks)


def get_backend(group: ProcessGroup | None = None) -> Backend:
    """Return the backend that ``group`` was made with, as it was named then."""
    return resolve(group).config.name


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return which backend serves which device type: ``"cpu:phalanx,cuda:nccl"``."""
    return repr(resolve(group).config)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the name of the backend that serves tensors on ``device`` unless told otherwise."""
    kind = torch.device(device).type
    if kind not in Backend.default_device_backend_map:
        known = ", ".join(Backend.default_device_backend_map)
        raise ValueError(f"no backend is registered for device {kind!r} (known: {known})")
    return Backend.default_device_backend_map[kind]


def get_pg_count() -> int:
    """Return how many groups all ranks of this world have made together."""
    return here().num_groups


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this rank's number on its machine.

    That is ``LOCAL_RANK`` of the environment, for ranks that are threads their rank, and else
    ``fallback_rank``.
    """
    slot = _bound.slot
    if slot is not _PROCESS and slot.world is not None:
        return slot.world.rank
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is None:
        raise RuntimeError(
            "LOCAL_RANK (this rank's number on its machine) is not in the environment: "
            "start with a launcher that sets it, or pass fallback_rank"
        )
    return int(fallback_rank)


def is_gloo_available() -> bool:
    """Say whether Gloo can be used."""
    return is_backend_available(Backend.GLOO)


def is_mpi_available() -> bool:
    """Say whether MPI can be used."""
    return is_backend_available(Backend.MPI)


def is_nccl_available() -> bool:
    """Say whether NCCL can be used."""
    return is_backend_available(Backend.NCCL)


def is_ucc_available() -> bool:
    """Say whether UCC can be used."""
    return is_backend_available(Backend.UCC)


def is_xccl_available() -> bool:
    """Say whether XCCL can be used."""
    return is_backend_available(Backend.XCCL)


def is_torchelastic_launched() -> bool:
    """Say whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
