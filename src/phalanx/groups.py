"""A group of ranks: who is in it, and the transport they share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, cast
from weakref import WeakSet

from phalanx import forks
from phalanx.backends.base import GroupBackend
from phalanx.backends.registry import BackendConfig
from phalanx.errors import DistBackendError
from phalanx.group_calls import GroupCalls
from phalanx.types import Timeout, seconds


class _Outsider:
    """What ``new_group`` gives to ranks that are not in the new group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def __reduce__(self) -> str:
        return "_OUTSIDER"  # the one instance, also after pickling


_OUTSIDER = _Outsider()


class _Destroyed:
    """Stands where the transport of a destroyed group was."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, operation: str) -> NoReturn:
        raise ValueError(
            f"{operation} on group {self._name!r}, which has been destroyed: "
            "make the call before destroy_process_group, or create the group again"
        )


class _Inherited:
    """Stands where the transport of a group was, in a child that was forked from its rank."""

    def __init__(self, group: str, backend: GroupBackend) -> None:
        self._group = group
        self.name, self.rank, self.size = backend.name, backend.rank, backend.size
        self.timeout, self.global_ranks = backend.timeout, backend.global_ranks

    def close(self) -> None:
        """Do nothing: the group is the parent's."""

    def fail(self, reason: str) -> None:
        """Do nothing: a child does not speak for its parent's rank."""

    def __getattr__(self, operation: str) -> NoReturn:
        raise DistBackendError(
            f"{operation} on group {self._group!r}, which belongs to the process that this one was "
            "forked from: a child is no rank of it (make the group after the fork, or start ranks "
            "with spawn)"
        )


class ProcessGroup(GroupCalls):
    """Some ranks of a world, numbered from 0, as one of them sees them.

    Made by ``init_process_group``, ``new_group`` and their relatives. ``ranks`` are the members'
    global ranks, in the order of their group ranks. Groups compare by identity.
    """

    # Whoever stands here gets the operations: the backend itself, or while calls are being
    # coalesced the one who collects them. The public functions only look here.
    transport: GroupBackend

    NON_GROUP_MEMBER: ClassVar[Any] = _OUTSIDER

    def __init__(
        self,
        name: str,
        description: str,
        ranks: Sequence[int],
        backend: GroupBackend,
        config: BackendConfig,
        store: Any,
    ) -> None:
        self.group_name = name
        self.group_desc = description
        self.ranks = list(ranks)
        self.group_ranks = {rank: index for index, rank in enumerate(self.ranks)}
        self.backend = self.transport = backend
        backend.global_ranks = self.ranks
        self.config = config
        self._store = store
        self._rank = backend.rank
        self.num_splits = 0  # of this group, by all its members alike
        _groups.add(self)

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def name(self) -> str:
        """Return the name of the backend that serves CPU tensors."""
        return self.backend.name

    def get_group_store(self) -> Any:
        """Return the store that the members of this group share."""
        return self._store

    def to_group_rank(self, global_rank: int) -> int:
        """Translate a global rank, ValueError if it is not a member."""
        try:
            return self.group_ranks[global_rank]
        except (KeyError, TypeError):
            index = _index(global_rank)  # of a tensor, say, which has a hash of its own
            if index in self.group_ranks:
                return self.group_ranks[index]
            raise ValueError(
                f"global rank {global_rank!r} is not in group {self.group_name!r} "
                f"(its ranks: {self.ranks})"
            ) from None

    def to_global_rank(self, group_rank: int) -> int:
        """Translate a group rank, ValueError if there is none such."""
        index = _index(group_rank)
        if not 0 <= index < len(self.ranks):
            raise ValueError(
                f"group rank {group_rank!r} does not exist in group {self.group_name!r} "
                f"of {len(self.ranks)} ranks"
            )
        return self.ranks[index]

    def monitored_barrier(
        self, timeout: Timeout | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Do a barrier in which rank 0 names who is missing."""
        limit = None if timeout is None else seconds(timeout)
        self.transport.monitored_barrier(timeout=limit, wait_all_ranks=wait_all_ranks)

    def sequence_number(self) -> int:
        """Return how many collectives this rank has issued on the group."""
        return self.backend.sequence_number()

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of the group's operations, on this rank."""
        self.backend.timeout = seconds(timeout)

    def abort(self, reason: str = "the group was aborted") -> None:
        """Make everybody who waits on this group raise."""
        self.backend.abort(reason)

    def shutdown(self) -> None:
        """Close the transport; later operations raise ValueError. Does not wait for other ranks."""
        self.transport = cast(GroupBackend, _Destroyed(self.group_name))
        self.backend.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        return self  # a copied model communicates as the model did

    def __repr__(self) -> str:
        return (
            f"<ProcessGroup {self.group_name!r} ({self.group_desc}): "
            f"rank {self._rank} of {self.ranks}, {self.config!r}>"
        )


_groups: WeakSet[ProcessGroup] = WeakSet()


@forks.after_fork_in_child
def _leave_to_parent() -> None:
    for group in list(_groups):
        forks.leave_alone(group.backend)
        forks.leave_alone(group.transport)
        inherited = cast(GroupBackend, _Inherited(group.group_name, group.backend))
        if not isinstance(group.transport, _Destroyed):
            group.transport = inherited
        group.backend = inherited
    _groups.clear()


def _index(rank: Any) -> int:
    """Read an integer of any library's, -1 if it is none."""
    try:
        return operator.index(rank)
    except TypeError:
        return -1
