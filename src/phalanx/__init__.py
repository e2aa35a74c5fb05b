"""torch.distributed's vocabulary for CPU tensors: fast inside one machine, never a silent hang.

``import phalanx as dist``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import (
        algorithms,
        data,
        debug,
        functional,
        launch,
        optim,
        parallel,
        stores,
        testing,
        trace,
    )
    from phalanx.algorithms.join import Join, Joinable, JoinHook
    from phalanx.backends.base import GroupBackend
    from phalanx.backends.registry import (
        Backend,
        BackendConfig,
        BackendOptions,
        is_backend_available,
    )
    from phalanx.coalescing import _coalescing_manager as _coalescing_manager
    from phalanx.collectives import (
        _all_gather_base as _all_gather_base,
    )
    from phalanx.collectives import (
        _reduce_scatter_base as _reduce_scatter_base,
    )
    from phalanx.collectives import (
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from phalanx.data import (
        DistributedSampler,
        LengthGroupedSampler,
        WeightedDistributedSampler,
    )
    from phalanx.debug.breakpoints import breakpoint
    from phalanx.debug.levels import (
        DebugLevel,
        get_debug_level,
        set_debug_level,
        set_debug_level_from_env,
    )
    from phalanx.errors import (
        BufferInUse,
        CollectiveMismatch,
        Deadlock,
        DistBackendError,
        DistError,
        DistNetworkError,
        DistQueueEmptyError,
        DistStoreError,
        DistTimeout,
        PeerFailed,
        StoreTimeout,
    )
    from phalanx.errors import DistQueueEmptyError as QueueEmptyError
    from phalanx.groups import ProcessGroup
    from phalanx.heap import empty_shared, is_shared
    from phalanx.launch.spawn import SpawnContext, spawn
    from phalanx.launch.threads import run_threads
    from phalanx.mesh import DeviceMesh, init_device_mesh
    from phalanx.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from phalanx.options import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )
    from phalanx.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from phalanx.parallel.batchnorm import SyncBatchNorm
    from phalanx.parallel.buckets import GradBucket
    from phalanx.parallel.ddp import BuiltinCommHookType, DistributedDataParallel
    from phalanx.parallel.precision import MixedPrecision
    from phalanx.stores import FileStore, HashStore, PrefixStore, RedisStore, Store, TCPStore
    from phalanx.stores.rendezvous import register_rendezvous_handler, rendezvous
    from phalanx.subgroups import (
        SHRINK_ABORT,
        SHRINK_DEFAULT,
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        shrink_group,
        split_group,
    )
    from phalanx.types import ReduceOp, default_pg_timeout, supports_complex
    from phalanx.work import Work
    from phalanx.world import (
        GroupMember,
        destroy_process_group,
        get_backend,
        get_backend_config,
        get_default_backend_for_device,
        get_global_rank,
        get_group_rank,
        get_node_local_rank,
        get_pg_count,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        group,
        init_process_group,
        is_available,
        is_gloo_available,
        is_initialized,
        is_mpi_available,
        is_nccl_available,
        is_torchelastic_launched,
        is_ucc_available,
        is_xccl_available,
    )

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BackendOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "BufferInUse",
    "BuiltinCommHookType",
    "CollectiveMismatch",
    "Deadlock",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistQueueEmptyError",
    "DistStoreError",
    "DistTimeout",
    "DistributedDataParallel",
    "DistributedSampler",
    "FileStore",
    "GatherOptions",
    "GradBucket",
    "GroupBackend",
    "GroupMember",
    "HashStore",
    "Join",
    "JoinHook",
    "Joinable",
    "LengthGroupedSampler",
    "MixedPrecision",
    "P2POp",
    "PeerFailed",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RedisStore",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "SpawnContext",
    "Store",
    "StoreTimeout",
    "SyncBatchNorm",
    "TCPStore",
    "WeightedDistributedSampler",
    "Work",
    "algorithms",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "data",
    "debug",
    "default_pg_timeout",
    "destroy_process_group",
    "empty_shared",
    "functional",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_shared",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "launch",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "optim",
    "parallel",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "run_threads",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "spawn",
    "split_group",
    "stores",
    "supports_complex",
    "testing",
    "trace",
]

# Where the names come from. `import phalanx` alone costs little: the command line does without
# torch as long as it can. The first name from a module in `_CORE` brings the names of all of those,
# so that a rank in trouble (out of descriptors, say) has at hand what it needs; of the others each
# comes when it is asked for.
_MODULES = {
    "algorithms",
    "data",
    "debug",
    "functional",
    "launch",
    "optim",
    "parallel",
    "stores",
    "testing",
    "trace",
}
_NAMES = {
    "algorithms.join": "Join Joinable JoinHook",
    "backends.base": "GroupBackend",
    "backends.registry": "Backend BackendConfig BackendOptions is_backend_available",
    "coalescing": "_coalescing_manager",
    "collectives": (
        "all_gather _all_gather_base all_gather_coalesced all_gather_into_tensor "
        "all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier "
        "broadcast gather monitored_barrier reduce reduce_scatter _reduce_scatter_base "
        "reduce_scatter_single reduce_scatter_tensor scatter"
    ),
    "data": "DistributedSampler LengthGroupedSampler WeightedDistributedSampler",
    "debug.breakpoints": "breakpoint",
    "debug.levels": "DebugLevel get_debug_level set_debug_level set_debug_level_from_env",
    "errors": (
        "BufferInUse CollectiveMismatch Deadlock DistBackendError DistError DistNetworkError "
        "DistQueueEmptyError DistStoreError DistTimeout PeerFailed "
        "QueueEmptyError=DistQueueEmptyError StoreTimeout"
    ),
    "groups": "ProcessGroup",
    "heap": "empty_shared is_shared",
    "launch.spawn": "spawn SpawnContext",
    "launch.threads": "run_threads",
    "mesh": "DeviceMesh init_device_mesh",
    "objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list "
        "scatter_object_list send_object_list"
    ),
    "options": (
        "AllgatherOptions AllreduceCoalescedOptions AllreduceOptions AllToAllOptions "
        "BarrierOptions BroadcastOptions GatherOptions ReduceOptions ReduceScatterOptions "
        "ScatterOptions"
    ),
    "p2p": "batch_isend_irecv irecv isend P2POp recv send",
    "parallel.batchnorm": "SyncBatchNorm",
    "parallel.buckets": "GradBucket",
    "parallel.ddp": "BuiltinCommHookType DistributedDataParallel",
    "parallel.precision": "MixedPrecision",
    "stores": "FileStore HashStore PrefixStore RedisStore Store TCPStore",
    "stores.rendezvous": "register_rendezvous_handler rendezvous",
    "subgroups": (
        "new_group new_subgroups new_subgroups_by_enumeration SHRINK_ABORT SHRINK_DEFAULT "
        "shrink_group split_group"
    ),
    "types": "default_pg_timeout ReduceOp supports_complex",
    "work": "Work",
    "world": (
        "destroy_process_group get_backend get_backend_config get_default_backend_for_device "
        "_get_default_group=default_group get_global_rank get_group_rank get_node_local_rank "
        "get_pg_count get_process_group_ranks get_rank get_world_size group GroupMember "
        "init_process_group is_available is_gloo_available is_initialized is_mpi_available "
        "is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available "
        "_rank_not_in_group=is_outside"
    ),
}
_CORE = {
    "backends.base",
    "backends.registry",
    "coalescing",
    "collectives",
    "errors",
    "groups",
    "objects",
    "options",
    "p2p",
    "stores.rendezvous",
    "subgroups",
    "types",
    "work",
    "world",
}
_ORIGINS = {
    public: (module, name or public)
    for module, names in _NAMES.items()
    for public, _, name in (entry.partition("=") for entry in names.split())
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"phalanx.{name}")
    if name not in _ORIGINS:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    module = _ORIGINS[name][0]
    for other, (origin, original) in _ORIGINS.items():
        if other == name or {module, origin} <= _CORE:
            globals()[other] = getattr(importlib.import_module(f"phalanx.{origin}"), original)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_ORIGINS})
