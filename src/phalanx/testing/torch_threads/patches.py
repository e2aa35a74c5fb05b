"""What is changed in torch.distributed while ranks of it are threads, and put back after that.

Threads that belong to no such rank find everything as it was, with one exception: functional
collectives cannot find groups that were made before, since torch looks them up by thread meanwhile.
What is `lifted` stays, as wherever Phalanx is a backend: other groups it passes on to torch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from torch.nn.parallel import DistributedDataParallel

from phalanx.dispatch import untrace
from phalanx.patches import Shared
from phalanx.testing.torch_threads import environment
from phalanx.testing.torch_threads.compiling import for_ranks
from phalanx.testing.torch_threads.ranks import OwnHandlers, States, mine
from phalanx.torch_backend import handlers, lifted, replacing
from phalanx.torch_backend.theirs import c10d, dist, state
from phalanx.types import seconds
from phalanx_autoload import NAME

# Backends whose place Phalanx takes; a program that asks for another gets that.
_SERVED = {NAME, "gloo", "nccl", "ucc", "xccl", "threaded", "undefined"}

_NOTHING = object()
_kept: list[tuple[Any, str, Any]] = []  # what stood there before

_new_group = state._new_process_group_helper
_new_group_signature = inspect.signature(_new_group)
_rendezvous = state.rendezvous
_default_timeout = state._get_default_timeout
_Mesh: Any = dist.device_mesh.DeviceMesh
_new_mesh, _load_mesh = _Mesh.__init__, _Mesh.__setstate__
_Model: Any = DistributedDataParallel
_inside_forward = _Model._inside_ddp_forward
_compile: Any = torch.compile
_CALLBACK = "_callback_from_stance"
_SHAPES = "_fake_mode_lock"


@contextmanager
def _telling_ranks_apart() -> Iterator[None]:
    _install()
    try:
        yield
    finally:
        _restore()


# Has torch.distributed tell thread ranks apart.
ranks_are_threads = Shared(_telling_ranks_apart)


def _install() -> None:
    lifted.lift()  # once, before several ranks do
    handlers.register()
    c10d._set_thread_isolation_mode(True)
    _put(state, "_world", States(state._world))
    _put(state, "_new_process_group_helper", new_group)
    _put(state, "rendezvous", rendezvous)
    _put(state, "_get_default_timeout", default_timeout)
    _put(_Mesh, "__init__", new_mesh)
    _put(_Mesh, "__setstate__", load_mesh)
    _put(_Model, "_inside_ddp_forward", inside_forward)
    _put(_Model, "_get_active_ddp_module", classmethod(active_model))
    _put(_Model, "_active_ddp_module", None)
    _put(torch, "compile", compile_for_rank)
    if "torch._dynamo.eval_frame" in sys.modules:
        _part_compiled()
    for patch in environment.PATCHES:
        _put(*patch)
    # Set by torch's init_process_group, in whichever thread.
    for owner, name in (
        (state, "_backend"),
        (state, "_default_pg_init_method"),
        (sys, "excepthook"),
    ):
        _put(owner, name, getattr(owner, name))


def _restore() -> None:
    if any(name == _SHAPES for _, name, _ in _kept):
        _forget_meshes()
    while _kept:
        owner, name, value = _kept.pop()
        if value is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    c10d._set_thread_isolation_mode(False)


def _put(owner: Any, name: str, value: Any) -> None:
    _kept.append((owner, name, vars(owner).get(name, _NOTHING)))
    setattr(owner, name, value)


@functools.wraps(_new_group)
def new_group(*args: Any, **kwargs: Any) -> Any:
    """Make a group of torch's, on Phalanx whichever backend of torch's the program names."""
    bound = _new_group_signature.bind(*args, **kwargs)
    asked = str(bound.arguments["backend"])
    names = {pair.rpartition(":")[2] for pair in asked.split(",")}
    rank = mine()
    if rank is None or not names <= _SERVED:
        return _new_group(*args, **kwargs)
    if not bound.arguments["global_ranks_in_group"]:  # the default group
        timeout = bound.arguments.get("timeout") or state.default_pg_timeout
        rank.meeting.wait(rank, bound.arguments["group_size"], seconds(timeout))
    if asked != NAME:
        bound.arguments.pop("backend_options", None)  # they are another's
    told = asked if ":" in asked else f"cpu:{'gloo' if asked == 'undefined' else asked}"
    return replacing.make(_new_group, bound, f"cpu:{NAME}", told)


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Let the ranks of a world meet in memory, where they would have met at a port."""
    here = mine()
    where = urlparse(url)
    if here is None or where.scheme not in ("env", "tcp"):
        yield from _rendezvous(url, rank, world_size, **kwargs)
        return
    said = parse_qs(where.query)
    if rank < 0:
        rank = int(said.get("rank", [os.environ["RANK"]])[0])
    if world_size < 0:
        world_size = int(said.get("world_size", [os.environ["WORLD_SIZE"]])[0])
    yield dist.PrefixStore(f"{where.scheme}/{where.netloc}", here.store), rank, world_size


@functools.wraps(_default_timeout)
def default_timeout(backend: Any) -> Any:
    """Return how long operations wait, also for a backend that this torch was built without."""
    return _default_timeout(backend) if mine() is None else state.default_pg_timeout


@functools.wraps(_new_mesh)
def new_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
    """Make a mesh that differs from those of other ranks: torch caches by mesh what is a rank's."""
    _new_mesh(mesh, *args, **kwargs)
    _own_mesh(mesh)


@functools.wraps(_load_mesh)
def load_mesh(mesh: Any, saved: dict[str, Any]) -> None:
    """Make the mesh of a pickle, perhaps another rank's, one of the rank that loads it."""
    _load_mesh(mesh, saved)
    _own_mesh(mesh)


def _own_mesh(mesh: Any) -> None:
    rank = mine()
    if rank is not None:
        mesh._thread_id, mesh._hash = rank.number, None
        _part_tensors()


@contextmanager
def inside_forward(model: Any) -> Iterator[None]:
    """Let torch.compile know in which DistributedDataParallel the calling rank is."""
    rank = mine()
    if rank is None:
        with _inside_forward(model):
            yield
        return
    outer, rank.model = rank.model, model
    try:
        yield
    finally:
        rank.model = outer


def active_model(kind: Any) -> Any:
    """Return the DistributedDataParallel that the calling rank is in."""
    rank = mine()
    return kind._active_ddp_module if rank is None else rank.model


untrace(inspect.unwrap(inside_forward), "it tells ranks apart")


@functools.wraps(_compile)
def compile_for_rank(*args: Any, **kwargs: Any) -> Any:
    """Compile a function, so that ranks do not share what comes out."""
    with ranks_are_threads.lock:
        if mine() is not None:
            _part_compiled()
    return _compile(*args, **kwargs)


def _part_compiled() -> None:
    from torch._dynamo import eval_frame

    if ranks_are_threads.num_users and not any(name == _CALLBACK for _, name, _ in _kept):
        _put(eval_frame, _CALLBACK, for_ranks(getattr(eval_frame, _CALLBACK)))


def _part_tensors() -> None:
    """Let ranks not share what distributed tensors, which need a mesh, keep for the process."""
    from torch.distributed.tensor._dispatch import OpDispatcher
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    with ranks_are_threads.lock:
        if ranks_are_threads.num_users and not any(name == _SHAPES for _, name, _ in _kept):
            # Shapes are computed in a mode that one thread at a time may be in.
            _put(ShardingPropagator, _SHAPES, threading.RLock())
            _put(OpDispatcher, "_custom_op_handlers", OwnHandlers())


def _forget_meshes() -> None:
    """Empty caches of torch's by mesh: they would keep those of all worlds, and their groups."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop

    _redistribute.clear_redistribute_planner_cache()
    for cached in (
        _redistribute._gen_transform_infos,
        _collective_utils.MeshTopoInfo.build_from_mesh,
        _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached,
    ):
        cached.cache_clear()
