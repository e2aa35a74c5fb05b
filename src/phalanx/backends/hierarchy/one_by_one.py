"""Collectives over hosts in which each rank has something of its own for each other one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from phalanx.backends.base import GroupBackend
from phalanx.backends.engines.calls import Call, dtype_name
from phalanx.backends.hierarchy.crossing import Crossing, flat, put
from phalanx.backends.hierarchy.topology import Topology
from phalanx.backends.local import LocalBackend
from phalanx.types import Deadline


class OneByOne(GroupBackend):
    """Sends what is for another host straight to its rank, with the collective it belongs to.

    The ranks of a host meet first: so it is found if one of them is in another collective.
    """

    local: LocalBackend
    global_ranks: list[int]
    _topology: Topology
    _crossing: Crossing
    _running: Call | None

    @abstractmethod
    def _call(self, what: str, *agreed: object, tensor: Tensor | None = None) -> Call: ...

    def _root(self, root: int) -> str:
        return f"root {self.global_ranks[root]}"

    def _meet(self, deadline: Deadline, what: str, tensor: Tensor | None = None) -> None:
        self._call(what, tensor=tensor)
        self.local.barrier(timeout=deadline.left())

    def _gather(
        self, deadline: Deadline, outputs: Sequence[Tensor] | None, input: Tensor, root: int
    ) -> None:
        self._meet(deadline, f"gather({{}}, {self._root(root)})", input)
        super()._gather(deadline, outputs, input, root)

    def _scatter(
        self, deadline: Deadline, output: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        self._meet(deadline, f"scatter({{}}, {self._root(root)})", output)
        super()._scatter(deadline, output, inputs, root)

    def _all_to_all(
        self, deadline: Deadline, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._meet(deadline, f"all_to_all({dtype_name(outputs[0].dtype)})")
        super()._all_to_all(deadline, outputs, inputs)

    def _begin(
        self, messages: Sequence[tuple[Tensor, int]], deadline: Deadline
    ) -> Callable[[], None]:
        assert self._running is not None
        is_local = self._topology.is_local
        far = [
            self._crossing.send(peer, self._running, flat(tensor))
            for tensor, peer in messages
            if not is_local(peer)
        ]
        finish_near = super()._begin([each for each in messages if is_local(each[1])], deadline)

        def finish() -> None:
            finish_near()
            for sending in far:
                sending.wait(deadline)

        return finish

    def _give(self, messages: Sequence[tuple[Tensor, int]], deadline: Deadline) -> None:
        self._begin(messages, deadline)()

    def _take(self, tensor: Tensor, peer: int, deadline: Deadline) -> None:
        if self._topology.is_local(peer):
            super()._take(tensor, peer, deadline)
            return
        assert self._running is not None
        buffer = flat(tensor)
        self._crossing.receive(peer, self._running, buffer).wait(deadline)
        put(tensor, buffer)
