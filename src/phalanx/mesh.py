"""Ranks arranged in a grid, with a group along each of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.groups import ProcessGroup
from phalanx.subgroups import new_group
from phalanx.world import (
    get_process_group_ranks,
    get_rank,
    here,
    init_process_group,
    is_initialized,
)

# A dimension of a view is one axis of the whole grid or, flattened, several of them.
Axes = tuple[int, ...]
Override = Mapping[int | str, str | tuple[str, object]]


class DeviceMesh:
    """An n-dimensional grid of global ranks, or a view of one.

    All ranks of the world must make the same meshes, and flatten them, in the same order, also
    those that are not in the grid. ``mesh["dp"]`` or ``mesh["dp", "tp"]`` is a view: for each rank
    the part of the grid that it is in. A rank's number in the group along a dimension is its
    coordinate there. ``mesh`` is a tensor, or lists in lists, of ranks; ``mesh_dim_names`` are what
    to call its dimensions.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Tensor | Sequence[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Override | None = None,
        _init_backend: bool = True,
    ) -> None:
        if not is_initialized():
            init_process_group()
        grid = torch.as_tensor(mesh, dtype=torch.int, device="cpu").detach()
        ranks = grid.flatten().tolist()
        size = here().size
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a mesh must hold each rank once, got {grid.tolist()}")
        if ranks and (min(ranks) < 0 or max(ranks) >= size):
            raise RuntimeError(f"a mesh must be of ranks 0 to {size - 1}, got {grid.tolist()}")
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if names is not None and (len(names) != grid.dim() or len(set(names)) != len(names)):
            raise RuntimeError(
                f"mesh_dim_names must be one name, used once, per dimension: got {names} for "
                f"{grid.dim()} dimensions"
            )
        self.device_type = device_type
        self.mesh_dim_names = names
        self._grid = grid
        self._rank = get_rank()
        self._axes: tuple[Axes, ...] = tuple((axis,) for axis in range(grid.dim()))
        # Shared by all views of this grid:
        self._groups: dict[Axes, ProcessGroup] = {}
        self._flattened: dict[str, DeviceMesh] = {}
        if _init_backend:
            overrides = _overrides(backend_override, grid.dim(), names)
            for axes, override in zip(self._axes, overrides, strict=True):
                name = names[axes[0]] if names else f"dim_{axes[0]}"
                self._make_groups(axes, name, *override)

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Make a mesh of groups that exist: one, or one per dimension of ``mesh``."""
        if isinstance(group, ProcessGroup):
            ranks = get_process_group_ranks(group)
            if mesh is not None and torch.as_tensor(mesh).tolist() != ranks:
                raise ValueError(f"mesh {mesh} does not fit a group of ranks {ranks}")
            groups, mesh = [group], ranks
        else:
            groups = list(group)
            if not groups or mesh is None or mesh_dim_names is None:
                raise ValueError("from_group needs a mesh and mesh_dim_names with several groups")
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if made.ndim != len(groups):
            raise ValueError(f"from_group got {len(groups)} groups for {made.ndim} dimensions")
        made._groups = dict(zip(made._axes, groups, strict=True))
        return made

    @property
    def mesh(self) -> Tensor:
        """The grid of global ranks; of a view, the part that this rank is in."""
        lines = self._lines(tuple(axis for axes in self._axes for axis in axes))
        if len(lines) > 1:
            lines = lines[(lines == self._rank).any(dim=1)]
            if not len(lines):
                raise RuntimeError(
                    f"rank {self._rank} is not in {self!r} and has no part of this view"
                )
        return lines[0].reshape(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(math.prod(self._grid.shape[axis] for axis in axes) for axes in self._axes)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._axes)

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, in all or along a dimension."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """Return this rank's number in the world."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return where in ``mesh`` this rank is, None if it is not in the grid."""
        found = (self._grid == self._rank).nonzero()
        if not len(found):
            return None
        place = found[0].tolist()
        coordinate = []
        for axes in self._axes:
            index = 0
            for axis in axes:
                index = index * self._grid.shape[axis] + place[axis]
            coordinate.append(index)
        return tuple(coordinate)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group along a dimension that this rank is in."""
        if isinstance(mesh_dim, str) and mesh_dim in self._flattened:
            return self._flattened[mesh_dim].get_group()
        axes = self._axes[self._dim(mesh_dim)]
        if axes not in self._groups:
            raise RuntimeError(f"rank {self._rank} has no group along dimension {mesh_dim!r}")
        return self._groups[axes]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the groups along all dimensions."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's number in the group along a dimension."""
        return self.get_group(mesh_dim).rank()

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return a view of some dimensions, which are named in their order in the grid."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self.mesh_dim_names is None:
            raise RuntimeError("a mesh without mesh_dim_names cannot be sliced")
        if names == self.mesh_dim_names:
            return self
        known = dict(zip(self.mesh_dim_names, self._axes, strict=True))
        known |= {name: flat._axes[0] for name, flat in self._flattened.items()}
        if not names or not all(name in known for name in names):
            raise KeyError(f"unknown mesh dimension in {names} (known: {', '.join(known)})")
        axes = tuple(known[name] for name in names)
        flat = [axis for each in axes for axis in each]
        if flat != sorted(set(flat)):
            raise KeyError(f"mesh dimensions {names} must be named once and in the grid's order")
        return self._view(axes, names)

    def _flatten(
        self,
        mesh_dim_name: str | None = None,
        backend_override: str | tuple[str, object] | None = None,
    ) -> DeviceMesh:
        """Return a view with one dimension instead of all of these, and a group along it."""
        if self.mesh_dim_names is None:
            raise RuntimeError("a mesh without mesh_dim_names cannot be flattened")
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        axes = tuple(axis for each in self._axes for axis in each)
        if name in self._flattened and self._flattened[name]._axes != (axes,):
            raise ValueError(f"another flattened view is named {name!r} already")
        if name in self.mesh_dim_names:
            raise ValueError(f"{name!r} is the name of a dimension already")
        if name not in self._flattened:
            (override,) = _overrides(
                None if backend_override is None else {0: backend_override}, 1, None
            )
            self._make_groups(axes, name, *override)
            self._flattened[name] = self._view((axes,), (name,))
        return self._flattened[name]

    def _view(self, axes: tuple[Axes, ...], names: tuple[str, ...]) -> DeviceMesh:
        view = object.__new__(DeviceMesh)
        view.__dict__.update(self.__dict__, _axes=axes, mesh_dim_names=names)
        return view

    def _lines(self, axes: Axes) -> Tensor:
        """Return the ranks along ``axes``, one row per place on the other axes."""
        others = [axis for axis in range(self._grid.dim()) if axis not in axes]
        length = math.prod(self._grid.shape[axis] for axis in axes)
        return self._grid.permute(*others, *axes).reshape(-1, length)

    def _make_groups(self, axes: Axes, name: str, backend: str | None, options: object) -> None:
        world = here()
        for ranks in self._lines(axes).tolist():
            if ranks == world.default.ranks and backend is None:
                self._groups[axes] = world.default
                continue
            group = new_group(
                ranks, None, backend, options, group_desc=f"mesh_{name}", sort_ranks=False
            )
            if self._rank in ranks:
                self._groups[axes] = group

    def _dim(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(f"mesh_dim is needed to choose one of {self.ndim} dimensions")
            return 0
        if isinstance(mesh_dim, int):
            return mesh_dim
        if self.mesh_dim_names is None or mesh_dim not in self.mesh_dim_names:
            known = ", ".join(self.mesh_dim_names or ())
            raise KeyError(f"unknown mesh dimension {mesh_dim!r} (known: {known})")
        return self.mesh_dim_names.index(mesh_dim)

    def _key(self) -> tuple[Any, ...]:
        grid = self._grid
        ranks = tuple(grid.flatten().tolist())
        return self.device_type, ranks, tuple(grid.shape), self._axes, self.mesh_dim_names

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        if self.mesh_dim_names is None:
            return f"DeviceMesh({self.shape}, {self.device_type!r})"
        pairs = zip(self.mesh_dim_names, self.shape, strict=True)
        return f"DeviceMesh(({', '.join(f'{n}={k}' for n, k in pairs)}), {self.device_type!r})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Override | None = None,
) -> DeviceMesh:
    """Arrange the first ranks of the world, in order, in a grid of ``mesh_shape``.

    All ranks must call this. The world is initialised first if it is not yet.
    ``backend_override`` gives a backend, or a backend and its options, to single dimensions.
    """
    if not device_type.isalpha():
        raise RuntimeError(f"device_type is a type without an index, got {device_type!r}")
    shape = tuple(mesh_shape)
    return DeviceMesh(
        device_type,
        torch.arange(math.prod(shape), dtype=torch.int, device="cpu").reshape(shape),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
    )


def _overrides(
    given: Override | None, ndim: int, names: Sequence[str] | None
) -> list[tuple[str | None, object]]:
    """Read a backend and its options for each dimension."""
    left = dict(given or {})
    found: list[tuple[str | None, object]] = []
    for dim in range(ndim):
        keys = [dim, names[dim]] if names else [dim]
        values = [left.pop(key) for key in keys if key in left]
        if len(values) > 1:
            raise RuntimeError(f"backend_override names dimension {keys} twice")
        value = values[0] if values else None
        found.append(value if isinstance(value, tuple) else (value, None))
    if left:
        raise RuntimeError(f"backend_override has unknown dimensions {list(left)}")
    return found
