"""Making groups out of the ranks of a world."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.backends.registry import BackendConfig
from phalanx.groups import ProcessGroup
from phalanx.types import Timeout, default_pg_timeout, seconds
from phalanx.world import World, current_slot, get_process_group_ranks, here, resolve

SHRINK_DEFAULT = 0
"""For ``shrink_group``: what runs on the group is left alone."""
SHRINK_ABORT = 1
"""For ``shrink_group``: what runs on the group is aborted first."""


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of the global ``ranks`` (None: all), numbered in ascending or given order.

    All ranks of the world must call this, in the same order, also those that are not in ``ranks``:
    these get ``GroupMember.NON_GROUP_MEMBER``. With ``use_local_synchronization`` only the members
    need to; others get None. ``timeout`` is the default of the group's operations, ``backend`` a
    name (None: that of the default group), to which ``pg_options`` are passed, and ``group_desc``
    what messages call the group. ``device_id`` has no effect.
    """
    world = here()
    chosen = _checked(range(world.size) if ranks is None else ranks, world.size)
    if sort_ranks:
        chosen.sort()
    # Looked at before the call counts, and on all ranks: they must go on counting alike.
    config = world.default.config if backend is None else BackendConfig(backend).check()
    limit = seconds(default_pg_timeout if timeout is None else timeout)
    if use_local_synchronization:
        if world.rank not in chosen:
            return None
        # Members agree on how often they have made a group of just these ranks, and on no more.
        key = tuple(chosen)
        digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()[:12]
        name = f"local-{digest}-{world.local_names[key]}"
        world.local_names[key] += 1
    else:
        name = str(world.num_groups)
        world.num_groups += 1
    if world.rank not in chosen:
        return ProcessGroup.NON_GROUP_MEMBER
    return world.add_group(
        name,
        chosen,
        config,
        limit,
        pg_options,
        group_desc or "undefined",
    )


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Cut ``group`` into groups of ``group_size`` neighbours; return this rank's, and all.

    All ranks of the world must call this. ``group`` (None: the default one) must be divisible by
    ``group_size``. The other arguments are those of ``new_group``.
    """
    ranks = get_process_group_ranks(group)
    if group_size is None:
        raise ValueError("new_subgroups needs group_size, the number of ranks in each subgroup")
    if group_size <= 0:
        raise ValueError(f"group_size must be positive, got {group_size}")
    if len(ranks) < group_size:
        raise ValueError(f"group_size ({group_size}) must not exceed the world size ({len(ranks)})")
    if len(ranks) % group_size != 0:
        raise ValueError(
            f"The world size ({len(ranks)}) must be divisible by 'group_size={group_size}'"
        )
    cuts = [ranks[start : start + group_size] for start in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(cuts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Make one group per list of global ranks; return this rank's (None if in none), and all.

    All ranks of the world must call this, with the same lists, which must not overlap. The other
    arguments are those of ``new_group``.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("ranks_per_subgroup_list must not be empty")
    world = here()
    owner: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in _checked(ranks, world.size):
            if rank in owner:
                raise ValueError(
                    f"Rank {rank} has appeared in both subgroup {owner[rank]} and {ranks}"
                )
            owner[rank] = ranks
    subgroups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    mine = next((g for g in subgroups if g is not ProcessGroup.NON_GROUP_MEMBER), None)
    return mine, subgroups


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split ``parent_pg`` along lists of its *group* ranks; return this rank's part or None.

    All ranks of the parent must call this, in the same order, with the same disjoint lists. The
    parts have the parent's backend unless another is named; the other arguments are those of
    ``new_group``.
    """
    world = here()
    parent = resolve(parent_pg)
    config = parent.config if backend is None else BackendConfig(backend).check()
    limit = seconds(default_pg_timeout if timeout is None else timeout)
    mine = next_split(parent, split_ranks)
    if mine is None:
        return None
    name, part = mine
    return world.add_group(
        name,
        [parent.ranks[rank] for rank in part],
        config,
        limit,
        pg_options,
        group_desc or f"{parent.group_desc}:{name.rpartition('/')[2]}",
    )


def next_split(
    parent: ProcessGroup, split_ranks: Sequence[Sequence[int]] | None
) -> tuple[str, list[int]] | None:
    """Return the name and the ranks of this rank's part of a group that is being split."""
    if not split_ranks:
        raise ValueError("split_ranks must name at least one list of ranks")
    seen: set[int] = set()
    mine: tuple[int, list[int]] | None = None
    for index, ranks in enumerate(split_ranks):
        part = sorted(_checked(ranks, parent.size()))
        if not part or seen.intersection(part):
            raise ValueError(f"split_ranks must be disjoint and not empty, got {split_ranks}")
        seen.update(part)
        if parent.rank() in part:
            mine = index, part
    number, parent.num_splits = parent.num_splits, parent.num_splits + 1
    if mine is None:
        return None
    return f"{parent.group_name}/split{number}.{mine[0]}", mine[1]


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Replace ``group`` by one without the *group* ranks ``ranks_to_exclude``.

    Only the ranks that stay call this; the old group is destroyed. ``SHRINK_ABORT`` first aborts
    what still runs on it. Shrinking the default group renumbers the world from 0 and destroys all
    other groups.
    """
    world = here()
    old = resolve(group)
    kept = leave_out(old, ranks_to_exclude, shrink_flags)
    timeout = old.backend.timeout
    if old is not world.default:
        world.remove_group(old)
        return world.add_group(
            f"{old.group_name}/shrunk",
            [old.ranks[rank] for rank in kept],
            old.config,
            timeout,
            pg_options,
            f"{old.group_desc}:shrunk",
        )
    from phalanx.stores import PrefixStore

    slot, store = current_slot(), PrefixStore("shrunk", world.store)
    slot.world = None
    world.close()
    slot.world = World.create(
        kept.index(old.rank()), len(kept), store, old.config, timeout, pg_options, "default:shrunk"
    )
    return slot.world.default


def leave_out(old: ProcessGroup, ranks_to_exclude: list[int], shrink_flags: int) -> list[int]:
    """Return the ranks of a group that stay in it, and abort it if asked to."""
    if not isinstance(ranks_to_exclude, list):
        raise TypeError(
            f"ranks_to_exclude must be a list of ranks, got {type(ranks_to_exclude).__name__}"
        )
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"shrink_flags must be SHRINK_DEFAULT (0) or SHRINK_ABORT (1), got {shrink_flags}"
        )
    excluded = _checked(ranks_to_exclude, old.size())
    if not 0 < len(excluded) < old.size():
        raise ValueError(
            f"ranks_to_exclude must leave out some of the {old.size()} ranks of the group and "
            f"keep some, got {ranks_to_exclude}"
        )
    if old.rank() in excluded:
        raise RuntimeError(
            f"rank {old.rank()} is to be excluded and must not call shrink_group; only those call "
            "it that stay"
        )
    if shrink_flags == SHRINK_ABORT:
        old.abort("the group is being shrunk")
    return [rank for rank in range(old.size()) if rank not in excluded]


def _checked(ranks: Sequence[int], size: int) -> list[int]:
    """Read a list of ranks, each once, each below ``size``."""
    chosen = [int(rank) for rank in ranks]
    for rank in chosen:
        if not 0 <= rank < size:
            raise ValueError(f"Rank {rank} is out of range: there are ranks 0 to {size - 1}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"ranks must not repeat, got {chosen}")
    return chosen
