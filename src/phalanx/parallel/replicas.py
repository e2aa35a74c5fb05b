"""Making sure that all ranks train the same model: comparing it, and copying one rank's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._native import copy_all
from phalanx.collectives import all_gather_single
from phalanx.groups import ProcessGroup
from phalanx.heap import empty_shared
from phalanx.objects import all_gather_object
from phalanx.parallel.packing import places, room
from phalanx.world import active

_CHUNK_BYTES = 16 * 1024 * 1024
_SHOWN = 8  # differences listed in a message


def verify_parameters(
    group: ProcessGroup, names: Sequence[str], parameters: Sequence[Tensor]
) -> None:
    """Raise RuntimeError on all ranks unless they have parameters alike: shapes, dtypes, order.

    Names may differ, as long as none stands for another parameter on another rank.
    """
    own = [
        f"{name}: {str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
        + ("" if p.is_contiguous() else f" strides {list(p.stride())}")
        for name, p in zip(names, parameters, strict=True)
    ]
    digest = hashlib.sha256("\n".join(own).encode()).digest()[:8]
    digests = torch.empty(group.size(), dtype=torch.int64)
    all_gather_single(
        digests, torch.tensor([int.from_bytes(digest, "little", signed=True)]), group=group
    )
    if bool((digests == digests[0]).all()):
        return
    models: list[Any] = [None] * group.size()
    all_gather_object(models, own, group=group)
    if _fit(models):
        return
    raise RuntimeError(
        f"rank {group.ranks[group.rank()]}: DistributedDataParallel needs the same model on all "
        f"ranks, but the parameters differ:\n{_differences(group, models)}\n"
        "build the model from the same configuration on every rank"
    )


def _fit(models: Sequence[Sequence[str]]) -> bool:
    """Say whether models differ in nothing but the names of parameters."""
    places: dict[str, int] = {}
    forms: set[tuple[str, ...]] = set()
    for model in models:
        names, kinds = zip(*(entry.rsplit(": ", 1) for entry in model), strict=True)
        forms.add(kinds)
        if any(places.setdefault(name, place) != place for place, name in enumerate(names)):
            return False
    return len(forms) == 1


def _differences(group: ProcessGroup, models: Sequence[Sequence[str]]) -> str:
    """Say what each rank has that not all others have."""
    common = set(models[0]).intersection(*models[1:])
    lines: dict[str, list[int]] = {}
    for rank, model in zip(group.ranks, models, strict=True):
        own = [entry for entry in model if entry not in common]
        if not own and len(common) == max(map(len, models)):
            text = f"in the order {_listed([entry.rsplit(': ', 1)[0] for entry in model])}"
        else:
            text = f"of these {_listed(own) or 'nothing of its own'}"
        lines.setdefault(f"{len(model)} parameters, {text}", []).append(rank)
    return "\n".join(
        f"  {'rank ' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in lines.items()
    )


def _listed(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


def sync_module_states(
    module: nn.Module,
    process_group: ProcessGroup,
    broadcast_bucket_size: int = _CHUNK_BYTES,
    src: int = 0,
    params_and_buffers_to_ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
) -> None:
    """Copy the parameters and buffers of group rank ``src`` to all ranks of the group."""
    ignored = set(params_and_buffers_to_ignore)
    states = [p.detach() for name, p in module.named_parameters() if name not in ignored]
    if broadcast_buffers:
        states += [b.detach() for name, b in module.named_buffers() if name not in ignored]
    broadcast_coalesced(process_group, states, broadcast_bucket_size, src)


def broadcast_coalesced(
    group: ProcessGroup, tensors: Sequence[Tensor], buffer_size: int = _CHUNK_BYTES, src: int = 0
) -> None:
    """Copy tensors of group rank ``src`` to all ranks of the group, many at a time."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + room(tensor) > min(buffer_size, _CHUNK_BYTES):
            _broadcast_packed(group, batch, size, src)
            batch, size = [], 0
        batch.append(tensor)
        size += room(tensor)
    if batch:
        _broadcast_packed(group, batch, size, src)


def _broadcast_packed(group: ProcessGroup, tensors: list[Tensor], size: int, src: int) -> None:
    memory = empty_shared(size, dtype=torch.uint8)
    packed = list(places(tensors, memory))
    if group.rank() == src:
        copy_all(packed, tensors, False)
    active(group).broadcast(memory, src)
    if group.rank() != src:
        copy_all(tensors, packed, False)
