"""Who serves tensors that are not on the CPU, in a group such as "cpu:phalanx,cuda:nccl"."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from phalanx.torch_backend.theirs import c10d, dist, state
from phalanx_autoload import NAME


def refusing(rank: int, size: int) -> Any:
    """Return an engine that refuses all operations.

    Torch's C++ asks a group for an engine, before it calls methods of the group that are written in
    Python (`batch_isend_irecv` in a compiled function), and does nothing else with it.
    """
    options = c10d.FakeProcessGroup.Options()
    options.error_on_collective = True
    return c10d.FakeProcessGroup._create_internal(rank, size, options)


class Engines:
    """The engines of one group, by device type: each made with the first tensor that needs it.

    Torch makes none itself once a group in Python, such as Phalanx's, is among those named.
    """

    def __init__(self, group: Any, store: Any) -> None:
        self._group = group
        self._store = store
        self._made: dict[str, Any] = {}

    def _names(self) -> dict[str, str]:
        config = state._world.pg_backend_config.get(self._group, "")
        pairs = (pair.partition(":")[::2] for pair in config.split(",") if ":" in pair)
        return {device: name for device, name in pairs if device != "cpu"}

    def devices(self) -> list[torch.device]:
        """Return the devices, beside the CPU, that the group was made for."""
        return [torch.device(device) for device in self._names()]

    def get(self, device: torch.device) -> Any:
        """Return the engine of a device, RuntimeError if the group has none for it."""
        kind = device.type
        if kind not in self._made:
            name = self._names().get(kind)
            if name is None or name == NAME:
                raise RuntimeError(
                    f"{NAME} serves CPU tensors, and group {self._group.group_name!r} was made "
                    f"with no other backend for device {kind!r}: name one per device, such as "
                    f"init_process_group('cpu:{NAME},cuda:nccl')"
                )
            self._made[kind] = self._make(kind, name)
        return self._made[kind]

    def _make(self, kind: str, name: str) -> Any:
        group = self._group
        # Torch has perhaps used the name of the device, for an engine that it threw away.
        store = dist.PrefixStore(f"{NAME}-{kind}/", self._store)
        timeout: timedelta = group.options._timeout
        rank, size = group.rank(), group.size()
        if name == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            options.global_ranks_in_group = list(group.inner.ranks)
            options.group_name = group.group_name
            return dist.ProcessGroupNCCL(store, rank, size, options)
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is None:
            raise RuntimeError(f"backend {name!r} of device {kind!r} cannot be used beside {NAME}")
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        told = state._DistributedBackendOptions()
        told.store, told.group_rank, told.group_size = store, rank, size
        told.timeout, told.group_id = timeout, group.group_name
        told.global_ranks_in_group = list(group.inner.ranks)
        return plugin.creator_fn(told, None)

    def abort(self) -> None:
        """Abort what runs on all engines."""
        for engine in self._made.values():
            engine.abort()

    def close(self) -> None:
        """Shut all engines down."""
        while self._made:
            self._made.popitem()[1].shutdown()
