"""What stands between a group and its transport while somebody looks on, or interferes.

A `Layer` gets every operation of a group before the layer below it does, and at the bottom is the
backend. Groups without layers pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from phalanx.backends.base import COLLECTIVES, MESSAGES, GroupBackend
from phalanx.groups import ProcessGroup
from phalanx.types import Timeout
from phalanx.work import Work
from phalanx.world import World


class Layer:
    """Passes a group's operations on to what is below; `call` is for subclasses to override."""

    below: GroupBackend

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.below, name)
        if name in COLLECTIVES or name in MESSAGES:
            return partial(self.call, name, found)
        return found

    def call(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do one operation: the arguments are those of `GroupBackend`'s method of that name."""
        return operation(*args, **kwargs)


class LayeredWork(Work):
    """Passes on what is asked of a work; for subclasses to override in part."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: Timeout | None = None) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()


Make = Callable[[ProcessGroup], Layer]
L = TypeVar("L", bound=Layer)


def add(world: World, make: Make) -> None:
    """Put a layer on all groups of one rank's world, and on those that it makes later."""
    world.layers.append(make)
    for group in list(world.groups.values()):
        put(group, make(group))


def remove(world: World, make: Make, kind: type[Layer]) -> None:
    """Undo `add`; `kind` is what `make` makes."""
    if make in world.layers:
        world.layers.remove(make)
    for group in list(world.groups.values()):
        take(group, kind)


def dress(world: World, group: ProcessGroup) -> None:
    """Put on a new group what has been added to its world."""
    for make in world.layers:
        put(group, make(group))


def put(group: ProcessGroup, layer: Layer) -> None:
    """Put a layer on top of a group's others."""
    layer.below = group.transport
    group.transport = cast(GroupBackend, layer)


def take(group: ProcessGroup, kind: type[Layer]) -> None:
    """Take a group's topmost layer of a kind away, if there is one."""
    above: Layer | None = None
    layer: Any = group.transport
    while isinstance(layer, Layer) and not isinstance(layer, kind):
        above, layer = layer, layer.below
    if not isinstance(layer, Layer):
        return
    if above is None:
        group.transport = layer.below
    else:
        above.below = layer.below


def find(group: ProcessGroup, kind: type[L]) -> L | None:
    """Return a group's topmost layer of a kind."""
    layer: Any = group.transport
    while isinstance(layer, Layer):
        if isinstance(layer, kind):
            return layer
        layer = layer.below
    return None
