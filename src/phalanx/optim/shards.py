"""Parameters of which each rank updates a share: who gets which, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx._native import copy_all
from phalanx.collectives import all_gather
from phalanx.groups import ProcessGroup
from phalanx.heap import empty_shared
from phalanx.parallel.packing import places, room
from phalanx.work import Work

_PIECE = 1 << 20  # bytes of one rank that are packed at a time: what a cache holds


def assign(sizes: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Give each item to the rank with the smallest load, the largest items first.

    Returns the items of each rank, as indices into ``sizes``. ``loads`` grows by what is given.
    """
    given: list[list[int]] = [[] for _ in loads]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        rank = min(range(len(loads)), key=lambda rank: loads[rank])
        given[rank].append(item)
        loads[rank] += sizes[item]
    return given


def cut(sizes: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Give each rank one run of neighbouring items, all runs about equally large.

    Returns the items of each rank, as indices into ``sizes``; the largest run goes to the rank
    with the smallest load. ``loads`` grows by what is given.
    """
    runs: list[list[int]] = [[] for _ in loads]
    total, before = sum(sizes), 0
    for item, size in enumerate(sizes):
        middle = before + size / 2
        runs[min(int(middle * len(runs) / total), len(runs) - 1) if total else 0].append(item)
        before += size
    runs.sort(key=lambda run: -sum(sizes[item] for item in run))
    given: list[list[int]] = [[] for _ in loads]
    for rank, run in zip(
        sorted(range(len(loads)), key=lambda rank: loads[rank]), runs, strict=True
    ):
        given[rank] = run
        loads[rank] += sum(sizes[item] for item in run)
    return given


class FlatShards:
    """Shards whose parameters lie in one piece of shared memory, ordered by rank.

    ``param.data`` becomes a view of it, so that an exchange packs and unpacks nothing.
    """

    def __init__(self, shards: Sequence[Sequence[Tensor]], group: ProcessGroup) -> None:
        self._shards = shards
        self._group = group
        self._adopt()

    def _adopt(self) -> None:
        sizes = [sum(room(param) for param in shard) for shard in self._shards]
        self._sections = list(torch.split(empty_shared(sum(sizes), dtype=torch.uint8), sizes))
        for shard, section in zip(self._shards, self._sections, strict=True):
            for param, place in zip(shard, places(shard, section), strict=True):
                place.copy_(param.data)
                param.data = place
        self._pointers = self._addresses()

    def _addresses(self) -> list[int]:
        return [param.data_ptr() for shard in self._shards for param in shard]

    def exchange(self, async_op: bool = False) -> Work | None:
        """Give all ranks the parameters of each rank's shard."""
        if self._addresses() != self._pointers:  # somebody has given a parameter other memory
            self._adopt()
        own = self._sections[self._group.rank()]
        return all_gather(self._sections, own, self._group, async_op)


class LooseShards:
    """Shards whose parameters lie anywhere.

    Large ones travel from where they are to where they belong, small ones packed together.
    """

    def __init__(self, shards: Sequence[Sequence[Tensor]], group: ProcessGroup) -> None:
        self._shards = shards
        self._group = group
        self._plan()

    def _plan(self) -> None:
        self._planned_for = self._kinds()
        large = [[p for p in shard if _is_large(p)] for shard in self._shards]
        self._rounds = [
            [shard[i] if i < len(shard) else None for shard in large]
            for i in range(max(map(len, large)))
        ]
        pieces = [list(_pieces(shard)) for shard in self._shards]
        self._packed = [
            [shard[i] if i < len(shard) else [] for shard in pieces]
            for i in range(max(map(len, pieces)))
        ]
        sizes = [[sum(map(room, piece)) for piece in pieces] for pieces in self._packed]
        self._memory = empty_shared(max(map(sum, sizes), default=0), dtype=torch.uint8)
        self._sections = [list(torch.split(self._memory[: sum(each)], each)) for each in sizes]
        self._slots = [
            [list(places(piece, section)) for piece, section in zip(pieces, sections, strict=True)]
            for pieces, sections in zip(self._packed, self._sections, strict=True)
        ]

    def _kinds(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(param.dtype, param.stride()) for shard in self._shards for param in shard]

    @torch.no_grad()
    def exchange(self) -> None:
        """Give all ranks the parameters of each rank's shard."""
        if self._kinds() != self._planned_for:
            self._plan()
        rank = self._group.rank()
        nothing = torch.empty(0, dtype=torch.uint8)
        for params in self._rounds:
            parts = [nothing if param is None else _bytes(param) for param in params]
            all_gather(parts, parts[rank], self._group)
        for pieces, sections, slots in zip(self._packed, self._sections, self._slots, strict=True):
            copy_all(slots[rank], pieces[rank], False)
            all_gather(sections, sections[rank], self._group)
            for other, piece in enumerate(pieces):
                if other != rank:
                    copy_all(piece, slots[other], False)


def _is_large(param: Tensor) -> bool:
    return param.is_contiguous() and param.numel() * param.itemsize >= _PIECE


def _pieces(shard: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the small parameters of a shard in lists that fit into a piece."""
    piece: list[Tensor] = []
    left = _PIECE
    for param in shard:
        if _is_large(param) or not param.numel():
            continue
        if piece and room(param) > left:
            yield piece
            piece, left = [], _PIECE
        piece.append(param)
        left -= room(param)
    if piece:
        yield piece


def _bytes(param: Tensor) -> Tensor:
    return param.detach().view(-1).view(torch.uint8)
