"""Process groups of torch's as engines: the one module here that uses torch.distributed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from phalanx import bystanders
from phalanx.backends.base import GroupBackend
from phalanx.backends.engines import addresses, reach
from phalanx.backends.engines.direct import DirectEngine
from phalanx.backends.engines.gloo import GlooWire
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistBackendError, DistError, DistNetworkError, DistTimeout
from phalanx.types import Deadline

_td: Any = torch.distributed
_c10d: Any = _distributed_c10d
_state: Any = distributed_c10d

_SLOW = 3.0  # seconds after which connections that do not come about are looked into

_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


def names() -> dict[str, list[str]]:
    """Return the backends that this torch has, with the device types that each serves."""
    found = {}
    for name in _td.Backend.backend_list:
        if name in ("undefined", "mpi", "fake", "phalanx"):
            continue
        if name in _CLASSES and not hasattr(_c10d, _CLASSES[name]):
            continue
        if name not in _CLASSES and name.upper() not in _td.Backend._plugins:
            continue
        found[name] = list(_td.Backend.backend_capability.get(name, ["cpu"]))
    return found


class TorchStore(_td.Store):  # type: ignore[misc]
    """A store of ours, as torch uses stores."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._ours = store

    def set(self, key: str, value: Any) -> None:
        self._ours.set(key, _raw(value))

    def get(self, key: str) -> bytes:
        return bytes(self._ours.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ours.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ours.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ours.wait(list(keys), timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ours.compare_set(key, _raw(expected), _raw(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ours.delete_key(key))

    def num_keys(self) -> int:
        return int(self._ours.num_keys())

    def append(self, key: str, value: Any) -> None:
        self._ours.append(key, _raw(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ours.multi_get(list(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ours.multi_set(list(keys), [_raw(value) for value in values])

    def has_extended_api(self) -> bool:
        return bool(self._ours.has_extended_api())


def _raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def create(name: str, device: str, options: BackendOptions, pg_options: object) -> GroupBackend:
    """Make one rank's end of a group on torch's backend ``name``, for tensors of one device."""
    if name == "gloo" and device == "cpu":
        return create_gloo(options)
    group = _within(options, lambda met: _make(name, options, pg_options, met))
    return DirectEngine(name, device, group, options, _c10d)


def create_gloo(options: BackendOptions) -> MessageEngine:
    """Make one rank's end of a group whose messages Gloo carries."""
    group = _within(options, lambda met: gloo_group(options, met))
    rank = options.group_rank
    wire = GlooWire(group, rank, options.group_size)
    ranks, name = options.global_ranks, options.group_id
    return MessageEngine("gloo", wire, rank, ranks, options.timeout, name)


def gloo_group(options: BackendOptions, met: _Met) -> Any:
    """Connect all members by Gloo, at the addresses by which they reach the store's server."""
    sites = addresses.exchange(
        options.store,
        options.group_rank,
        options.global_ranks,
        addresses.own_place(options.store),
        options.group_id,
        options.timeout,
    )
    kind = _c10d.ProcessGroupGloo
    told = kind._Options()
    told._timeout = timedelta(seconds=options.timeout)
    told._threads = 1
    told._devices = [kind.create_device(hostname=sites[options.group_rank].address)]
    met.sites, met.when = sites, time.monotonic()
    return kind(TorchStore(options.store), options.group_rank, options.group_size, told)


def _make(name: str, options: BackendOptions, pg_options: Any, met: _Met) -> Any:
    """Make a process group of any kind that torch knows."""
    store, rank, size = TorchStore(options.store), options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout)
    if name == "gloo":
        return gloo_group(options, met)
    if name in _CLASSES:
        kind = getattr(_c10d, _CLASSES[name])
        told = kind.Options() if pg_options is None else pg_options
        told._timeout = timeout
        told.global_ranks_in_group = list(options.global_ranks)
        told.group_name = options.group_id
        return kind(store, rank, size, told)
    plugin = _td.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    told = _state._DistributedBackendOptions()
    told.store, told.group_rank, told.group_size = store, rank, size
    told.timeout, told.group_id = timeout, options.group_id
    told.global_ranks_in_group = list(options.global_ranks)
    return plugin.creator_fn(told, pg_options)


@dataclass
class _Met:
    """The members of a group that is being made, once they know where each of them is."""

    sites: list[reach.Site] = field(default_factory=list)
    when: float = math.inf

    def trouble(self, options: BackendOptions) -> str:
        """Say who cannot reach whom; "" if nothing is wrong, or not known yet."""
        if len(set(self.sites)) < 2:
            return ""
        return reach.diagnose(options.store, options.group_rank, self.sites, options.global_ranks)


def _within(options: BackendOptions, make: Callable[[_Met], Any]) -> Any:
    """Make a process group in a thread: the caller can be interrupted meanwhile."""
    made: list[Any] = []
    failed: list[BaseException] = []
    met = _Met()

    def run() -> None:
        try:
            made.append(make(met))
        except BaseException as error:
            failed.append(error)

    rank = options.global_ranks[options.group_rank]
    what = f"the making of group {options.group_id!r} on rank {rank}"
    thread = threading.Thread(target=run, name="phalanx-engine", daemon=True)
    bystanders.mark(thread).start()
    deadline, has_looked = Deadline(options.timeout + 1), False
    while thread.is_alive() and (left := deadline.left()) > 0:
        thread.join(min(left, 0.5))
        broken = bool(failed) and not isinstance(failed[0], DistError)
        if not has_looked and (broken or time.monotonic() - met.when > _SLOW):
            has_looked = True
            if trouble := met.trouble(options):
                raise DistNetworkError(f"{what}: {trouble}")
    if made:
        return made[0]
    if not failed:
        raise DistTimeout(f"{what}: not all ranks were connected within {options.timeout:g} s")
    if isinstance(failed[0], RuntimeError) and not isinstance(failed[0], DistError):
        raise DistBackendError(f"{what}: {failed[0]}") from failed[0]
    raise failed[0]
