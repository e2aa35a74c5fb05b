"""Who is in a group of torch.distributed, and how long it lives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx.backends.local import LocalBackend
from phalanx.groups import ProcessGroup
from phalanx.torch_backend import theirs, worlds
from phalanx.torch_backend.engines import Engines, refusing
from phalanx.torch_backend.futures import Completer
from phalanx.torch_backend.theirs import c10d, dist
from phalanx.torch_backend.untraced import untraced
from phalanx.types import seconds
from phalanx.work import Work
from phalanx.world import World
from phalanx_autoload import NAME

_CPU = torch.device("cpu")


@untraced
class Membership(theirs.ProcessGroup):  # type: ignore[misc]
    """One rank's place in a group of torch.distributed.

    It is its own backend for CPU tensors, in torch's sense of the word.
    """

    supports_splitting = True
    supports_shrinking = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(self, world: World, inner: ProcessGroup, store: Any, name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        self._register_backend(_CPU, kind, refusing(inner.rank(), inner.size()))
        self._world = world
        self._inner = inner
        backend = inner.backend
        self._native = backend.engine if isinstance(backend, LocalBackend) else None  # over hosts
        self._store = store
        self._name = name
        self._description = "undefined"
        self.known_as = NAME  # the backend that torch takes it for: see `replacing`
        self._completer = Completer()
        self._engines = Engines(self, store)
        self._coalesced: list[Work] | None = None

    # Who it is

    def rank(self) -> int:
        return self._inner.rank()

    def size(self) -> int:
        return self._inner.size()

    getRank, getSize = rank, size

    def name(self) -> str:
        return NAME

    getBackendName = name

    def _get_backend_name(self) -> str:
        return self.known_as

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self._store

    @property
    def inner(self) -> ProcessGroup:
        """Phalanx's own group of the same ranks."""
        return self._inner

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *self._engines.devices()]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._engines.get(device)

    @property
    def options(self) -> Any:
        options = c10d.Backend.Options(NAME, self._timeout)
        options.global_ranks_in_group = list(self._inner.ranks)
        options.group_name = self._name
        return options

    # How long it lives

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._inner.backend.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self._inner.abort("torch.distributed aborted the group")
        self._engines.abort()
        self.shutdown()

    def shutdown(self) -> None:
        worlds.leave(self._world, self._inner)
        self._engines.close()
        self._completer.close()

    def _set_sequence_number_for_group(self) -> None:
        pass  # it counts from the beginning

    def _get_sequence_number_for_group(self) -> int:
        return self._inner.sequence_number()

    def splitGroup(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        *_: Any,
    ) -> Membership | None:
        """Make a group of some of this group's ranks; all of its ranks must."""
        if self.rank() not in ranks:
            return None
        members = [self._inner.ranks[rank] for rank in ranks]
        name = group_name or f"{self._name}:{'-'.join(map(str, ranks))}"
        purpose = group_desc or f"{self._description}:split"
        limit = self._inner.backend.timeout if timeout is None else seconds(timeout)
        inner = worlds.add(self._world, name, members, limit, purpose)
        part = type(self)(self._world, inner, dist.PrefixStore(f"{name}/", self._store), name)
        part.setGroupDesc(purpose)
        part.known_as = self.known_as
        return part

    split_group = splitGroup
