"""Process groups of torch's as engines: the one module here that uses torch.distributed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from phalanx import bystanders
from phalanx.backends.base import GroupBackend
from phalanx.backends.engines import addresses, ports, proofs
from phalanx.backends.engines.direct import DirectEngine, has_gone
from phalanx.backends.engines.gloo import GlooWire
from phalanx.backends.engines.messages import MessageEngine
from phalanx.backends.registry import BackendOptions
from phalanx.errors import DistBackendError, DistError, DistNetworkError, DistTimeout, PeerFailed
from phalanx.stores import PrefixStore, secret
from phalanx.types import Deadline

_td: Any = torch.distributed
_c10d: Any = _distributed_c10d
_state: Any = distributed_c10d

_GRACE = 5.0  # for the thread that makes a group to say itself why it was not in time
_LOOK = 0.5  # seconds between looks at whether others have given up
_SLOW = 3.0  # seconds after which connections that probes have found impossible are given up

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
    group = _within(options, lambda: _make(name, options, pg_options))
    return DirectEngine(name, device, group, options, _c10d)


def create_gloo(options: BackendOptions) -> MessageEngine:
    """Make one rank's end of a group whose messages Gloo carries."""
    back, forth = _within(options, lambda: gloo_groups(options, 2))
    wire = GlooWire(back, forth, options.group_rank, options.group_size, options.timeout)
    return MessageEngine("gloo", wire, options, addresses.failures(options))


def gloo_groups(options: BackendOptions, count: int) -> list[Any]:
    """Connect all members by Gloo, so often, at the addresses where they reach the store.

    When all have proved that they are members, nobody else can connect any more.
    """
    ports.raise_limit(4 * count * options.group_size)
    with addresses.exchanged(options) as address:
        door = ports.Door(address)
        store = getattr(options.store, "_underlying_non_prefix_store", options.store)
        if options.group_rank == 0 and getattr(store, "is_open", False):
            secret.warn_without(address, "ranks meet in torch's store, which is open to all")

        def make(attempt: int) -> list[Any]:
            kind = _c10d.ProcessGroupGloo
            told = kind._Options()
            told._timeout = timedelta(seconds=options.timeout)
            told._threads = 1
            told._devices = [kind.create_device(hostname=address)]
            stores = [PrefixStore(f"gloo{each}.{attempt}", options.store) for each in range(count)]
            return [
                kind(_GlooStore(store, door), options.group_rank, options.group_size, told)
                for store in stores
            ]

        members = addresses.of_members(options)
        groups = proofs.connect(options, make, lambda: door.hang_up(members))
        door.shut()
        return groups


class _GlooStore(TorchStore):
    """A store in which Gloo writes where it listens."""

    def __init__(self, store: Any, door: ports.Door) -> None:
        super().__init__(store)
        self._door = door

    def set(self, key: str, value: Any) -> None:
        self._door.read(_raw(value))
        super().set(key, value)


def _make(name: str, options: BackendOptions, pg_options: Any) -> Any:
    """Make a process group of any kind that torch knows."""
    store, rank, size = TorchStore(options.store), options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout)
    if name == "gloo":
        return gloo_groups(options, 1)[0]
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


def _within(options: BackendOptions, make: Callable[[], Any]) -> Any:
    """Make a process group in a thread: the caller can be interrupted meanwhile."""
    made: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="phalanx-engine", daemon=True)
    bystanders.mark(thread).start()
    deadline, patience = Deadline(options.timeout + _GRACE), Deadline(math.inf)
    while thread.is_alive() and deadline.left() > 0:
        thread.join(min(deadline.left(), _LOOK))
        if patience.left() == math.inf and thread.is_alive() and addresses.has_probed(options):
            patience = Deadline(_SLOW)
        if thread.is_alive() and (why := addresses.given_up(options, patience.left() <= 0)):
            raise DistNetworkError(why)
    rank = options.global_ranks[options.group_rank]
    what = f"the making of group {options.group_id!r} on rank {rank}"
    if made:
        return made[0]
    if not failed:
        text = f"{what}: not all ranks were connected within {options.timeout:g} s"
        why = addresses.complaint(options.store, options.group_size, options.group_id)
        raise DistTimeout(f"{text}; {why}" if why else text)
    error = failed[0]
    if isinstance(error, RuntimeError) and not isinstance(error, DistError):
        if has_gone(error):
            raise PeerFailed(
                f"{what}: before all were connected a rank died or left, or somebody else "
                f"connected in its place and hung up ({error})"
            )
        raise DistBackendError(f"{what}: {error}") from error
    raise error
