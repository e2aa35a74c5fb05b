"""Which of torch's groups share a Phalanx world.

The default group makes a world of all ranks, and the groups that torch makes later are groups of
that world, so that a deadlock over several groups is seen. A group beside a default group of
another backend, Gloo say, is a world of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from phalanx.backends.registry import BackendConfig
from phalanx.groups import ProcessGroup
from phalanx.torch_backend.store import TorchStore
from phalanx.types import seconds
from phalanx.world import Slot, World, current_slot
from phalanx_autoload import NAME

# Of the default groups, by whose they are: the process, or a rank that is a thread.
_worlds: WeakKeyDictionary[Slot, World] = WeakKeyDictionary()

_CONFIG = BackendConfig(NAME)


def join(options: Any) -> tuple[World, ProcessGroup]:
    """Make the Phalanx group behind one of torch's, and its world if there is none."""
    slot = current_slot()
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    limit = seconds(options.timeout)
    world = _worlds.get(slot)
    if ranks and world is not None:
        return world, add(world, options.group_id, ranks, limit)
    # What Phalanx calls rank 0 of this world, torch may call rank 2.
    told = "default_pg" if not ranks or ranks == list(range(size)) else f"global ranks {ranks}"
    world = World.create(rank, size, TorchStore(options.store), _CONFIG, limit, description=told)
    if not ranks:
        _worlds[slot] = world
        if slot.world is None:
            slot.world = world  # so that Phalanx's own functions work as well
    _settle(world, world.default)
    return world, world.default


def add(
    world: World, name: str, ranks: Sequence[int], timeout: float, purpose: str = "undefined"
) -> ProcessGroup:
    """Make another group of a world that exists; all of ``ranks`` must."""
    # Phalanx's own groups of the world are called "1", "2" as well.
    group = world.add_group(f"torch:{name}", ranks, _CONFIG, timeout, None, purpose)
    _settle(world, group)
    return group


def leave(world: World, group: ProcessGroup) -> None:
    """Close a group, and with the default group of a world all of it."""
    if group is not world.default:
        if world.groups.get(group.group_name) is group:
            world.remove_group(group)
        return
    for slot, known in list(_worlds.items()):
        if known is world:
            del _worlds[slot]
            if slot.world is world:
                slot.world = None
    world.close()


def _settle(world: World, group: ProcessGroup) -> None:
    """Leave nothing in the store once all have read it, and wait until all have done so."""
    group.backend.monitored_barrier()  # which, unlike a barrier, is not counted
    world.store.tidy()
    group.backend.monitored_barrier()
