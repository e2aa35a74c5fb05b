"""Collectives and messages of picklable objects.

Objects travel as pickles. Unpickling can run code that the sender chose: with ``weights_only`` the
receiving rank accepts only tensors, plain containers and what
``torch.serialization.add_safe_globals`` allows. ``device`` has no effect anywhere.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import checks
from phalanx.collectives import all_gather, broadcast, gather, scatter
from phalanx.groups import ProcessGroup
from phalanx.p2p import recv, send
from phalanx.world import membership


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Put rank i's ``obj`` into everybody's ``object_list[i]``."""
    member = membership(group, "all_gather_object")
    if member is None:
        return
    _room(object_list, "object_list", "all_gather_object", member.size())
    data = _pack(obj)
    sizes = _sizes_of_all(data, member)
    packed = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    all_gather(packed, data, member)
    for i, each in enumerate(packed):
        object_list[i] = _unpack(each, weights_only)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Put rank i's ``obj`` into ``object_gather_list[i]`` of ``dst`` (default: 0)."""
    member = membership(group, "gather_object")
    if member is None:
        return
    if dst is None and group_dst is None:
        dst = 0
    root = checks.peer(member, dst, group_dst, "dst", "gather_object")
    is_root = root == member.rank()
    checks.only_on_root(object_gather_list, "object_gather_list", is_root, "dst", "gather_object")
    if object_gather_list is not None and is_root:
        _room(object_gather_list, "object_gather_list", "gather_object", member.size())
    data = _pack(obj)
    sizes = _sizes_of_all(data, member)
    longest = max(sizes)
    packed = torch.empty(member.size(), longest, dtype=torch.uint8) if is_root else None
    gather(
        _padded(data, longest),
        None if packed is None else list(packed.unbind(0)),
        group=member,
        group_dst=root,
    )
    if packed is not None and object_gather_list is not None:
        for i, size in enumerate(sizes):
            object_gather_list[i] = _unpack(packed[i, :size], weights_only)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Replace everybody's ``object_list``, of one length on all ranks, by that of ``src``."""
    member = membership(group, "broadcast_object_list")
    if member is None:
        return
    if src is None and group_src is None:
        src = 0
    root = checks.peer(member, src, group_src, "src", "broadcast_object_list")
    packed = _pack_each(object_list) if root == member.rank() else None
    sizes = _sizes(packed, len(object_list))
    broadcast(sizes, group=member, group_src=root)
    data = _joined(packed, sizes)
    broadcast(data, group=member, group_src=root)
    if packed is None:
        _unpack_into(object_list, data, sizes, weights_only)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Put the i-th input object of ``src`` (default: 0) first into rank i's output list."""
    member = membership(group, "scatter_object_list")
    if member is None:
        return
    if src is None and group_src is None:
        src = 0
    root = checks.peer(member, src, group_src, "src", "scatter_object_list")
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            "Expected argument scatter_object_output_list to be a list of size at least 1."
        )
    packed = None
    if root == member.rank():
        if scatter_object_input_list is None:
            raise ValueError("scatter_object_list needs scatter_object_input_list on the src rank")
        _room(
            scatter_object_input_list,
            "scatter_object_input_list",
            "scatter_object_list",
            member.size(),
            spare=False,
        )
        packed = _pack_each(scatter_object_input_list)
    sizes = _sizes(packed, member.size())
    broadcast(sizes, group=member, group_src=root)
    longest = int(sizes.max())
    data = torch.empty(longest, dtype=torch.uint8)
    pieces = None if packed is None else [_padded(each, longest) for each in packed]
    scatter(data, pieces, group=member, group_src=root)
    own = data[: int(sizes[member.rank()])]
    scatter_object_output_list[0] = _unpack(own, weights_only)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to another rank, which receives as many with ``recv_object_list``.

    ``use_batch`` has no effect here: messages need no batch to make their way.
    """
    member = membership(group, "send_object_list")
    if member is None:
        return
    peer = checks.peer(member, dst, group_dst, "dst", "send_object_list")
    packed = _pack_each(object_list)
    sizes = _sizes(packed, len(packed))
    send(sizes, group=member, group_dst=peer)
    send(_joined(packed, sizes), group=member, group_dst=peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    weights_only: bool = False,
) -> int:
    """Receive objects into ``object_list`` and return the global rank that sent them.

    With neither ``src`` nor ``group_src``, take them from whoever sends first.
    """
    member = membership(group, "recv_object_list")
    if member is None:
        return -1
    sizes = torch.empty(len(object_list), dtype=torch.int64)
    source = recv(sizes, src, member, group_src=group_src)
    data = _joined(None, sizes)
    recv(data, source, member)
    _unpack_into(object_list, data, sizes, weights_only)
    return source


def _room(objects: Sequence[Any], name: str, operation: str, size: int, spare: bool = True) -> None:
    if len(objects) < size or (len(objects) > size and not spare):
        raise ValueError(
            f"{operation} needs one place per rank in {name}: got {len(objects)} for {size} ranks"
        )


def _pack(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _pack_each(objects: Sequence[Any]) -> list[Tensor]:
    return [_pack(obj) for obj in objects]


def _unpack(data: Tensor, weights_only: bool) -> Any:
    stream = io.BytesIO(data.numpy().tobytes())
    return _Restricted(stream).load() if weights_only else pickle.load(stream)


def _sizes(packed: list[Tensor] | None, count: int) -> Tensor:
    """Return the sizes of packed objects, or room for ``count`` of them."""
    if packed is None:
        return torch.empty(count, dtype=torch.int64)
    return torch.tensor([each.numel() for each in packed], dtype=torch.int64)


def _sizes_of_all(data: Tensor, member: ProcessGroup) -> list[int]:
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(member.size())]
    all_gather(sizes, torch.tensor([data.numel()]), member)
    return [int(size) for size in sizes]


def _joined(packed: list[Tensor] | None, sizes: Tensor) -> Tensor:
    """Return packed objects in one piece, or room for objects of these sizes."""
    if packed is None:
        return torch.empty(int(sizes.sum()), dtype=torch.uint8)
    return torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8)


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))


def _unpack_into(objects: list[Any], data: Tensor, sizes: Tensor, weights_only: bool) -> None:
    for i, each in enumerate(torch.split(data, sizes.tolist())):
        objects[i] = _unpack(each, weights_only)


class _Restricted(pickle.Unpickler):
    """Unpickles only what ``torch.load(weights_only=True)`` would."""

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == "torch.storage._load_from_bytes":  # how a pickled tensor brings its data
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        torch_rules: Any = torch._weights_only_unpickler
        allowed = {**torch_rules._get_allowed_globals(), **torch_rules._get_user_allowed_globals()}
        if path not in allowed:
            raise pickle.UnpicklingError(
                f"{path} is not allowed with weights_only: allow it with "
                "torch.serialization.add_safe_globals, or trust the sender with weights_only=False"
            )
        return allowed[path]
