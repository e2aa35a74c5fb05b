"""Functions of torch.distributed that are for torch's own backends, made to know Phalanx's.

Torch turns away any other backend in these before it asks it. `lift` puts functions in their place
that serve groups of Phalanx and pass all others on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from phalanx import subgroups
from phalanx.torch_backend.theirs import dist, state
from phalanx_autoload import LIFTED


@functools.cache
def lift() -> dict[str, Callable[..., Any]]:
    """Put our functions in the place of torch's, and return them by name."""
    functions = {}
    for name in LIFTED:
        theirs = getattr(state, name)
        # What calls `replacing` stands for torch's own function.
        lifted = _passing_on(globals()[name], getattr(theirs, "theirs", theirs))
        for module in (dist, state):
            if hasattr(module, name):
                setattr(module, name, lifted)
        functions[name] = lifted
    _lift_builtin_hooks()
    return functions


def _passing_on(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours for groups of Phalanx's, and theirs for all others."""
    from phalanx.torch_backend.group import TorchGroup

    signature = inspect.signature(theirs)
    group_name = next(name for name in ("group", "parent_pg") if name in signature.parameters)

    @functools.wraps(theirs)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        group = bound.pop(group_name, None)
        if group is None and dist.is_initialized():
            group = state._get_default_group()
        if isinstance(group, TorchGroup):
            return ours(group, **bound)
        return theirs(*args, **kwargs)

    return lifted


def _lift_builtin_hooks() -> None:
    """Let DistributedDataParallel compress gradients by a hook in Python.

    Its hook in C++ takes the results of futures as C++ values, which no future of Python's has.
    """
    theirs: Any = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(theirs)
    def lifted(model: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from phalanx.torch_backend.group import TorchGroup

        compresses = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if compresses and isinstance(model.process_group, TorchGroup):
            model.register_comm_hook(model.process_group, fp16_compress_hook)
            model.logger._set_comm_hook_name(str(comm_hook_type))
        else:
            theirs(model, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = lifted  # type: ignore[method-assign]


def monitored_barrier(
    group: Any, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Do a barrier in which rank 0 names who is missing."""
    group.monitored_barrier(timeout, wait_all_ranks)


def _set_pg_timeout(group: Any, timeout: timedelta) -> None:
    """Set the default timeout of a group's operations."""
    group.set_timeout(timeout)


def split_group(
    parent: Any,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """Split a group along lists of its ranks; return this rank's part or None."""
    mine = subgroups.next_split(parent.inner, split_ranks)
    if mine is None:
        return None
    name, part = mine
    group = parent.splitGroup(part, timeout, None, name, group_desc)
    _register(group, [parent.inner.ranks[rank] for rank in part], *_names(parent))
    return group


def shrink_group(
    group: Any, ranks_to_exclude: list[int], shrink_flags: int = 0, pg_options: Any = None
) -> Any:
    """Replace a group by one without some of its ranks; only those that stay call this."""
    from phalanx.torch_backend.group import create

    kept = subgroups.leave_out(group.inner, ranks_to_exclude, shrink_flags)
    is_default = group is state._get_default_group()
    ranks = [group.inner.ranks[rank] for rank in kept]
    options = state._DistributedBackendOptions()
    options.store = dist.PrefixStore("shrunk/", group.get_group_store())
    options.group_rank, options.group_size = kept.index(group.rank()), len(kept)
    options.timeout = group.options._timeout
    options.group_id = f"{group.group_name}:shrunk"
    # The ranks of a default group are counted from 0 again.
    options.global_ranks_in_group = [] if is_default else ranks
    names = _names(group)
    dist.destroy_process_group(None if is_default else group)
    shrunk = create(options)
    shrunk.known_as = group.known_as
    shrunk.setGroupDesc("default:shrunken" if is_default else f"{group.group_name}:shrunk")
    if is_default:
        state._update_default_pg(shrunk)
        ranks = list(range(len(kept)))
    _register(shrunk, ranks, *names)
    return shrunk


def _names(group: Any) -> tuple[str, str]:
    """Return under which backend torch knows a group, and under which for each device."""
    return state._world.pg_map[group][0], state._world.pg_backend_config[group]


def _register(group: Any, ranks: list[int], backend: str, config: str) -> None:
    """Have torch know a group, as it knows those that it has made itself."""
    state._register_pg_in_world(
        group,
        backend,
        group.get_group_store(),
        group.group_name,
        config,
        rank_mapping={rank: index for index, rank in enumerate(ranks)},
    )
