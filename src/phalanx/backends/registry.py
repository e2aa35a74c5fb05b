"""Which backends there are, and how the one of a group is made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from phalanx.backends.base import GroupBackend
from phalanx.errors import DistBackendError
from phalanx.extras import install

# The device types for which some group of this process has been made with an engine.
served: set[str] = {"cpu"}


@dataclass
class BackendOptions:
    """What a backend is told about the group that it is made for.

    ``store`` belongs to this group alone. ``group_id`` is the same on all members and unique in
    their world of ``world_size``; ``group_desc`` is what the user calls it. ``threads`` says that
    the ranks of the world are threads of this process. ``shared`` is one dict per world and rank:
    what the groups of one rank have in common. What has a ``close()`` there is closed at its end.
    """

    store: Any
    group_rank: int
    group_size: int
    timeout: float
    group_id: str
    global_ranks: list[int]
    world_size: int = -1
    threads: bool = False
    shared: dict[str, Any] = field(default_factory=dict)
    group_desc: str = ""

    def await_key(self, key: str) -> None:
        """Wait for a key of the store; raise PeerFailed if a rank of the world dies before that."""
        muster = self.shared.get("muster")
        if muster is None:
            self.store.wait([key], self.timeout)
        else:
            muster.wait(self.store, key, self.timeout)


class _Plugin(NamedTuple):
    create: Callable[..., GroupBackend]
    extended_api: bool


class Backend(str):
    """The name of a backend, in lower case: ``Backend("PHALANX") == Backend.PHALANX``.

    ``Backend.register_backend`` adds one. Engines that torch and MPI bring are known by their
    names, and `is_backend_available` tells whether they can be used here.
    """

    __slots__ = ()

    UNDEFINED: ClassVar[str] = "undefined"
    PHALANX: ClassVar[str] = "phalanx"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    MPI: ClassVar[str] = "mpi"
    XCCL: ClassVar[str] = "xccl"

    backend_list: ClassVar[list[str]] = [UNDEFINED, PHALANX, GLOO, NCCL, XCCL, UCC, MPI]
    default_device_backend_map: ClassVar[dict[str, str]] = {
        "cpu": PHALANX,
        "cuda": NCCL,
        "xpu": XCCL,
    }
    backend_capability: ClassVar[dict[str, list[str]]] = {
        PHALANX: ["cpu"],
        GLOO: ["cpu"],
        NCCL: ["cuda"],
        XCCL: ["xpu"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu"],
    }
    _plugins: ClassVar[dict[str, _Plugin]] = {}

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(f"a backend is named by a string, got {type(name).__name__}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., GroupBackend],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make ``name`` a backend that ``func`` creates, once per group and rank.

        ``func(store, rank, size, timeout)``, or with ``extended_api``
        ``func(options: BackendOptions, pg_options)``, returns a ``GroupBackend``. ``devices`` are
        the device types it serves (default: cpu). Registering a name again replaces it.
        """
        key = cls(name)
        kinds = ["cpu"] if devices is None else [devices] if isinstance(devices, str) else devices
        if not hasattr(cls, key.upper()):
            setattr(cls, key.upper(), str(key))
        if key not in cls.backend_list:
            cls.backend_list.append(key)
        cls.backend_capability[key] = list(kinds)
        for kind in kinds:
            cls.default_device_backend_map.setdefault(kind, key)
        cls._plugins[key] = _Plugin(func, extended_api)


def _engines_of_torch() -> dict[str, list[str]]:
    """Return the backends that torch has, with their devices. It takes time to ask."""
    from phalanx.backends.engines import torch_engine

    return torch_engine.names()


def _is_usable(name: str) -> bool:
    if name == Backend.PHALANX or name in Backend._plugins:
        return True
    if name == Backend.MPI:
        return importlib.util.find_spec("mpi4py") is not None
    return name in _engines_of_torch()


def is_backend_available(backend: str) -> bool:
    """Say whether all of ``backend``, a name or a ``"device:name,…"`` string, can be used here."""
    return all(_is_usable(pair.rpartition(":")[2]) for pair in backend.lower().split(","))


class BackendConfig:
    """Which backend serves which device type, read from ``"phalanx"`` or ``"cpu:phalanx,…"``."""

    def __init__(self, backend: str | None) -> None:
        name = Backend(Backend.UNDEFINED if backend is None else backend)
        self.device_backend_map: dict[str, Backend] = {}
        if name == Backend.UNDEFINED:
            name = Backend(Backend.default_device_backend_map["cpu"])
        self.name = name
        if ":" not in name:
            devices = Backend.backend_capability.get(name)
            for device in devices or _engines_of_torch().get(name, ["cpu"]):
                self.device_backend_map[device] = name
            return
        for pair in name.split(","):
            device, _, engine = (part.strip() for part in pair.partition(":"))
            if not device or not engine or ":" in engine:
                raise ValueError(
                    f"cannot read {pair!r} of backend {name!r} "
                    "(form: 'device:backend,device:backend', such as 'cpu:phalanx,cuda:nccl')"
                )
            if device in self.device_backend_map:
                raise ValueError(f"backend {name!r} names device {device!r} twice")
            self.device_backend_map[device] = Backend(engine)

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend of each device type."""
        return self.device_backend_map

    def meeting_place(self) -> str:
        """Return the URL at which ranks meet that were given none."""
        by_mpi = self.device_backend_map.get("cpu") == Backend.MPI
        return "mpi://" if by_mpi and "MASTER_ADDR" not in os.environ else "env://"

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def check(self) -> BackendConfig:
        """Return this if there are such backends here; ValueError or DistBackendError if not."""
        for name in self.device_backend_map.values():
            if name not in Backend.backend_list and name not in _engines_of_torch():
                known = {*Backend.backend_list, *_engines_of_torch()} - {Backend.UNDEFINED}
                listed = ", ".join(sorted(known))
                raise ValueError(f"unknown backend {str(name)!r} (known: {listed})")
        if ":" not in self.name:
            _require(self.name, next(iter(self.device_backend_map)))
        return self

    def create(self, options: BackendOptions, pg_options: object = None) -> GroupBackend:
        """Make the group's backend: one engine, or one per device type.

        CPU tensors are served by "phalanx" unless the name says otherwise: every group needs that.
        """
        self.check()
        cpu = self.device_backend_map.get("cpu", Backend(Backend.PHALANX))
        engine = _make(cpu, "cpu", options, pg_options)
        others = {
            device: name for device, name in self.device_backend_map.items() if device != "cpu"
        }
        if not others:
            return engine
        from phalanx.backends.devices import DeviceRouter

        return DeviceRouter(engine, others, partial(_make_beside, options, pg_options))


def _require(name: str, device: str) -> None:
    """Raise unless an engine can be used here."""
    if not _is_usable(name):
        have = sorted({Backend.PHALANX, *Backend._plugins, *_engines_of_torch()})
        missing = f"mpi4py is not installed: {install('mpi')}"
        why = missing if name == Backend.MPI else f"this torch is built without {name}"
        raise DistBackendError(
            f"backend {str(name)!r} cannot serve {device} tensors: {why} "
            f"(usable: {', '.join(have)})"
        )


def _make(name: str, device: str, options: BackendOptions, pg_options: object) -> GroupBackend:
    """Make the engine that serves tensors of one device type."""
    plugin = Backend._plugins.get(name)
    if plugin is not None and plugin.extended_api:
        return plugin.create(options, pg_options)
    if plugin is not None:
        return plugin.create(options.store, options.group_rank, options.group_size, options.timeout)
    _require(name, device)
    if name == Backend.PHALANX:
        if device != "cpu":
            raise DistBackendError(
                f"backend 'phalanx' serves CPU tensors, not those of device {device!r}: name one "
                "per device, such as 'cpu:phalanx,cuda:nccl'"
            )
        from phalanx.backends.hierarchy import create

        return create.create(options, pg_options)
    if name == Backend.MPI:
        from phalanx.backends.engines import mpi

        return mpi.create(options)
    from phalanx.backends.engines import torch_engine

    return torch_engine.create(name, device, options, pg_options)


def _make_beside(
    options: BackendOptions, pg_options: object, name: str, device: str
) -> GroupBackend:
    """Make a further engine of a group, with a part of the store to itself."""
    from phalanx.stores import PrefixStore

    store = PrefixStore(f"device-{device}", options.store)
    return _make(name, device, replace(options, store=store), pg_options)
