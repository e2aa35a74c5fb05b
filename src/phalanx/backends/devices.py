"""One group, several devices: each operation goes to the engine of its tensors' device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from phalanx.backends.base import COLLECTIVES, MESSAGES, Call, GroupBackend
from phalanx.backends.registry import served
from phalanx.errors import DistBackendError
from phalanx.work import JoinedWork, Work

Make = Callable[[str, str], GroupBackend]


class DeviceRouter(GroupBackend):
    """The engines of one group, by device type.

    That of CPU tensors is there from the start; barriers, and all that is not about tensors, are
    its own. Another is made when the first tensor needs it, by all ranks alike.
    """

    def __init__(self, cpu: GroupBackend, names: Mapping[str, str], make: Make) -> None:
        self._engines = {"cpu": cpu}
        self._names = dict(names)
        self._make = make
        self._making = threading.Lock()
        super().__init__(cpu.rank, cpu.size, cpu.timeout)
        self.name = cpu.name
        served.update(names)

    @property
    def timeout(self) -> float:
        return self._engines["cpu"].timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        for engine in self._engines.values():
            engine.timeout = timeout

    @property
    def global_ranks(self) -> list[int]:
        return self._engines["cpu"].global_ranks

    @global_ranks.setter
    def global_ranks(self, ranks: list[int]) -> None:
        for engine in self._engines.values():
            engine.global_ranks = ranks

    def engine(self, device: str) -> GroupBackend:
        """Return the engine of a device type, made if need be."""
        found = self._engines.get(device)
        if found is not None:
            return found
        if device not in self._names:
            known = ", ".join(sorted({"cpu", *self._names}))
            raise DistBackendError(
                f"the group has no engine for tensors on device {device!r} (it has: {known}); move "
                "them with .cpu(), or name an engine per device, such as 'cpu:phalanx,cuda:nccl'"
            )
        with self._making:
            if device not in self._engines:
                made = self._make(self._names[device], device)
                made.global_ranks, made.timeout = self.global_ranks, self.timeout
                self._engines[device] = made
        return self._engines[device]

    def _routed(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        devices = {tensor.device.type for tensor in _tensors(args)}
        if len(devices) > 1:
            raise DistBackendError(
                f"{name} needs all its tensors on one device, got {', '.join(sorted(devices))}"
            )
        engine = self.engine(devices.pop() if devices else "cpu")
        return getattr(engine, name)(*args, **kwargs)

    def _run_batch(
        self, calls: Sequence[Call], timeout: float | None, async_op: bool
    ) -> Work | None:
        """Hand calls to their engines, those in a row on one device together."""
        works: list[Work | None] = []
        batch: list[Call] = []
        before = ""

        def hand_over() -> None:
            works.append(self.engine(before)._run_batch(batch, timeout, async_op))

        for call in calls:
            devices = sorted({tensor.device.type for tensor in _tensors(call[1])}) or ["cpu"]
            if batch and devices[0] != before:
                hand_over()
                batch = []
            before = devices[0]
            batch.append(call)
        if batch:
            hand_over()
        return JoinedWork([work for work in works if work is not None]) if async_op else None

    def sequence_number(self) -> int:
        return sum(engine.sequence_number() for engine in self._engines.values())

    def close(self) -> None:
        super().close()
        for engine in self._engines.values():
            engine.close()

    def abort(self, reason: str) -> None:
        for engine in self._engines.values():
            engine.abort(reason)

    def fail(self, reason: str) -> None:
        for engine in self._engines.values():
            engine.fail(reason)

    def describe(self, rank: int) -> str:
        return self._engines["cpu"].describe(rank)

    def note(self, text: str) -> None:
        self._engines["cpu"].note(text)

    def notes(self) -> list[str]:
        return self._engines["cpu"].notes()

    def history(self) -> list[dict[str, Any]]:
        return self._engines["cpu"].history()

    def send(self, *args: Any, **kwargs: Any) -> Any:
        return self._routed("send", args, kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        return self._routed("recv", args, kwargs)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [each for each in arg if isinstance(each, Tensor)]
    return found


def _route(name: str) -> Any:
    def routed(self: DeviceRouter, *args: Any, **kwargs: Any) -> Any:
        return self._routed(name, args, kwargs)

    routed.__name__ = name
    routed.__doc__ = f"Do `GroupBackend.{name}` on the engine of the tensors."
    return routed


for _name in (COLLECTIVES | MESSAGES) - {"coalesce"} - DeviceRouter.__dict__.keys():
    setattr(DeviceRouter, _name, _route(_name))
