"""Which backends there are, and how the one of a group is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from phalanx.backends.base import GroupBackend
from phalanx.errors import DistBackendError


@dataclass
class BackendOptions:
    """What a backend is told about the group that it is made for.

    ``store`` belongs to this group alone. ``group_id`` is the same on all members and unique in
    their world of ``world_size``; ``group_desc`` is what the user calls it. ``threads`` says that
    the ranks of the world are threads of this process. ``shared`` is one dict per world and rank:
    what the groups of one rank have in common.
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


class _Plugin(NamedTuple):
    create: Callable[..., GroupBackend]
    extended_api: bool


class Backend(str):
    """The name of a backend, in lower case: ``Backend("PHALANX") == Backend.PHALANX``.

    ``Backend.register_backend`` adds one. Names of engines that this version cannot use yet are
    known, so that a clear error tells so.
    """

    __slots__ = ()

    UNDEFINED: ClassVar[str] = "undefined"
    PHALANX: ClassVar[str] = "phalanx"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    MPI: ClassVar[str] = "mpi"
    XCCL: ClassVar[str] = "xccl"

    backend_list: ClassVar[list[str]] = [UNDEFINED, PHALANX]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": PHALANX, "cuda": NCCL}
    backend_capability: ClassVar[dict[str, list[str]]] = {PHALANX: ["cpu"]}
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


_ENGINES = {Backend.GLOO, Backend.NCCL, Backend.UCC, Backend.MPI, Backend.XCCL}


def is_backend_available(backend: str) -> bool:
    """Say whether all of ``backend``, a name or a ``"device:name,…"`` string, can be used here."""
    names = [pair.rpartition(":")[2] for pair in backend.lower().split(",")]
    return all(name in Backend.backend_list for name in names)


class BackendConfig:
    """Which backend serves which device type, read from ``"phalanx"`` or ``"cpu:phalanx,…"``."""

    def __init__(self, backend: str | None) -> None:
        name = Backend(Backend.UNDEFINED if backend is None else backend)
        self.device_backend_map: dict[str, Backend] = {}
        if name == Backend.UNDEFINED:
            name = Backend(Backend.default_device_backend_map["cpu"])
        self.name = name
        if ":" not in name:
            for device in Backend.backend_capability.get(name, ["cpu"]):
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

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def create(self, options: BackendOptions, pg_options: object = None) -> GroupBackend:
        """Make the backend that serves CPU tensors, which every group needs.

        Engines of other devices may be named; using such a tensor is an error until they exist.
        """
        for name in self.device_backend_map.values():
            if name not in _ENGINES and name not in Backend.backend_list:
                known = ", ".join(sorted(set(Backend.backend_list) - {Backend.UNDEFINED}))
                raise ValueError(f"unknown backend {str(name)!r} (known: {known})")
        cpu = self.device_backend_map.get("cpu")
        if cpu is None or cpu not in Backend.backend_list:
            raise DistBackendError(
                f"backend {str(self.name)!r} has no usable engine for CPU tensors in this version; "
                "use 'phalanx', or 'cpu:phalanx,cuda:nccl' to name an engine per device"
            )
        plugin = Backend._plugins.get(cpu)
        if plugin is None:
            from phalanx.backends.hierarchy import create

            return create.create(options, pg_options)
        if plugin.extended_api:
            return plugin.create(options, pg_options)
        return plugin.create(options.store, options.group_rank, options.group_size, options.timeout)
