"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx import logs
from phalanx.algorithms.join import Join, Joinable, JoinHook
from phalanx.groups import ProcessGroup
from phalanx.objects import all_gather_object, gather_object
from phalanx.optim.shards import FlatShards, LooseShards, assign, cut
from phalanx.optim.subset import check_steps_without_closure, step_only
from phalanx.work import Work
from phalanx.world import resolve

_log = logs.area("optim")
_OF_PARAMS = ("params", "param_names")  # what a parameter group says of each of its parameters


class _ZeroJoinHook(JoinHook):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        # When overlapping, the hook that DDP runs for this rank makes the step.
        if not self._zero._overlap_with_ddp:
            self._zero.step()


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Update, on each rank, a share of the parameters, and exchange the results.

    Each rank holds the optimizer state of its own share only (ZeRO, stage 1:
    https://arxiv.org/abs/1910.02054). All ranks of the group pass the same parameters in the same
    order, have the same gradients when they call ``step`` (as under DistributedDataParallel), and
    call it together; then they have the same parameters as after a step of the plain optimizer.
    A parameter belongs to one rank as a whole: the largest first, to the rank that has least.

    Args:
        params: Parameters, named parameters or parameter groups.
        optimizer_class: The optimizer of each rank's share, ``self.optim``.
        process_group: The ranks that share (default: all).
        parameters_as_bucket_view: Move all parameters into one piece of shared memory. A step
            then copies less; ``param.data`` becomes a view.
        overlap_with_ddp: Have the step made during backward, by one of the hooks of
            ``phalanx.algorithms.ddp_comm_hooks.ddp_zero_hook``, and not by ``step``. Buckets
            must have been seen first: the first two iterations (three with a static graph) change
            no parameter.
        defaults: Passed to ``optimizer_class``.
    """

    optim: Optimizer

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            check_steps_without_closure(optimizer_class)
        self.initialized = False  # until then, add_param_group is the base class's
        Optimizer.__init__(self, params, defaults)
        Joinable.__init__(self)
        _check_dense(self._all_params)
        self.process_group = resolve(process_group)
        self.world_size = self.process_group.size()
        self.rank = self.process_group.rank()
        self.global_rank = self.process_group.to_global_rank(self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        self._optimizer_class = optimizer_class
        self._optim_defaults = defaults
        self._all_state_dicts: list[dict[str, Any]] = []
        self._loads = [0] * self.world_size
        # The parameters of each rank: of rank r in the g-th group, self._shards[r][g].
        self._shards: list[list[list[Tensor]]] = [[] for _ in range(self.world_size)]
        self._verified = False
        self._exchange: FlatShards | LooseShards | None = None
        self._buckets: list[_Bucket] = []
        if not overlap_with_ddp:
            for group in self.param_groups:
                self._divide(group["params"])
            self._make_local_optimizer()
            self._plan_exchange()
        self.initialized = True

    @property
    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _divide(self, params: Sequence[Tensor]) -> None:
        """Give each rank its share of another group."""
        given = assign([param.numel() for param in params], self._loads)
        for shard, items in zip(self._shards, given, strict=True):
            shard.append([params[item] for item in items])

    def _local_groups(self) -> list[dict[str, Any]]:
        groups = []
        for group, own in zip(self.param_groups, self._shards[self.rank], strict=True):
            local = {**group, "params": own}
            if "param_names" in group:
                names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
                local["param_names"] = [names[id(param)] for param in own]
            groups.append(local)
        return groups

    def _make_local_optimizer(self) -> None:
        self.optim = self._optimizer_class(self._local_groups(), **self._optim_defaults)
        _copy_options(self.optim.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and divide it among the ranks. All ranks must call this alike."""
        if self.initialized and self._buckets:
            raise RuntimeError(
                "add_param_group: with overlap_with_ddp, parameters are divided as DDP's buckets "
                "are, which has been done; add all groups before the first backward"
            )
        super().add_param_group(param_group)
        if not self.initialized or self._overlap_with_ddp:
            return
        group = self.param_groups[-1]
        try:
            _check_dense(self._all_params)
        except ValueError:
            self.param_groups.pop()
            raise
        self._divide(group["params"])
        self.optim.add_param_group(self._local_groups()[-1])
        _copy_options(self.optim.param_groups, self.param_groups)
        self._plan_exchange()
        self._verified = False

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's share and take over the shares of the others.

        All ranks must call this. ``closure`` and ``kwargs`` go to the optimizer of the share, whose
        result is returned. With ``overlap_with_ddp`` this does nothing.
        """
        if self._overlap_with_ddp:
            _log.warning("step() does nothing with overlap_with_ddp: backward has made the step")
            return None
        notified = Join.notify_join_context(self)
        if self._has_joined:
            self._agree(self._options())
        options = self._options()
        _copy_options(self.param_groups, self.optim.param_groups)
        if closure is not None:
            kwargs["closure"] = closure
        loss: float | None = self.optim.step(**kwargs)
        if not self._has_joined:
            # Not before the closure, whose passes a rank that has joined shadows first.
            self._agree(options)
        _copy_options(self.optim.param_groups, self.param_groups)
        if notified is not None:
            notified.wait()
        if self._exchange is not None:
            self._exchange.exchange()
        return loss

    def _plan_exchange(self) -> None:
        if self.world_size > 1:
            shards = [[param for params in shard for param in params] for shard in self._shards]
            kind = FlatShards if self.parameters_as_bucket_view else LooseShards
            self._exchange = kind(shards, self.process_group)

    def _verify_across_ranks(self) -> None:
        """Raise ValueError, on all ranks, if they have different parameters."""
        if self._verified or self.world_size == 1:
            return
        own = [f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for p in self._all_params]
        theirs: list[Any] = [None] * self.world_size
        all_gather_object(theirs, own, self.process_group)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                raise ValueError(
                    "ZeroRedundancyOptimizer: the ranks have different parameters; "
                    f"{_first_difference(self.process_group, theirs[0], rank, other)}; all ranks "
                    "must pass the same parameters in the same order"
                )
        self._verified = True

    def _agree(self, options: list[dict[str, Any]]) -> None:
        """Make sure that all ranks have the same parameters and, under Join, the same options."""
        self._verify_across_ranks()
        if self._join_config.enable:
            self._take_over_options(self._has_joined, options)

    def _options(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups as they are now."""
        return [
            {k: v for k, v in group.items() if k not in _OF_PARAMS} for group in self.param_groups
        ]

    def _take_over_options(
        self, has_joined: bool, options: list[dict[str, Any]] | None = None
    ) -> None:
        """Let ranks that have joined, whose schedules stand still, have the others' options."""
        everybody: list[Any] = [None] * self.world_size
        own = options or self._options()
        all_gather_object(everybody, None if has_joined else own, self.process_group)
        if has_joined:
            _copy_options(next(filter(None, everybody)), self.param_groups)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without input updates and exchanges its share.

        The gradients must be set before, as DistributedDataParallel's hook does: pass it first.
        """
        return _ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that share."""
        return self.process_group

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on group rank ``to``, for its ``state_dict``.

        All ranks of the group must call this.
        """
        self._check_divided("consolidate_state_dict")
        if not 0 <= to < self.world_size:
            raise ValueError(
                f"consolidate_state_dict: to={to}, but the group has ranks 0 to "
                f"{self.world_size - 1}"
            )
        _copy_options(self.param_groups, self.optim.param_groups)
        states: list[Any] | None = [None] * self.world_size if self.rank == to else None
        gather_object(self.optim.state_dict(), states, group=self.process_group, group_dst=to)
        self._all_state_dicts = states or []

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's share, as its own optimizer numbers parameters."""
        self._check_divided("local_state_dict")
        _copy_options(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as it was when it was last consolidated on this rank.

        It has the form that the plain optimizer's has, which can load it.
        """
        self._check_divided("state_dict")
        if not self._all_state_dicts:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before state_dict() here"
            )
        whole = super().state_dict()
        numbers = self._numbers()
        state = {}
        for shard, local in zip(self._shards, self._all_state_dicts, strict=True):
            for params, group in zip(shard, local["param_groups"], strict=True):
                for param, number in zip(params, group["params"], strict=True):
                    if number in local["state"]:
                        state[numbers[id(param)]] = local["state"][number]
        whole["state"] = dict(sorted(state.items()))
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state, of this optimizer or of the plain one.

        Does not communicate, and does not change ``state_dict``.
        """
        self._check_divided("load_state_dict")
        numbers = self._numbers()
        own = {numbers[id(param)] for params in self._shards[self.rank] for param in params}
        state = {number: value for number, value in state_dict["state"].items() if number in own}
        super().load_state_dict({**state_dict, "state": state})

        local = self.optim.state_dict()
        _copy_options(self.param_groups, local["param_groups"])
        local["state"] = {}
        for params, group in zip(self._shards[self.rank], local["param_groups"], strict=True):
            for param, number in zip(params, group["params"], strict=True):
                if param in self.state:
                    local["state"][number] = self.state[param]
        self.optim.load_state_dict(local)
        self.state.clear()

    def _numbers(self) -> dict[int, int]:
        """Return the number that each parameter has in the whole state, by its identity."""
        return {id(param): number for number, param in enumerate(self._all_params)}

    @property
    def _is_divided(self) -> bool:
        return bool(self._buckets) or not self._overlap_with_ddp

    def _check_divided(self, operation: str) -> None:
        if not self._is_divided:
            raise RuntimeError(
                f"{operation}: with overlap_with_ddp this optimizer has no state before the first "
                "iterations, which show how DDP puts parameters into buckets"
            )

    def _divide_buckets(self, buckets: Sequence[Sequence[Tensor]], shard_buckets: bool) -> None:
        """Divide the parameters as they lie in DDP's buckets, which is the same on all ranks.

        A bucket belongs to one rank or, with ``shard_buckets``, to all.
        """
        known = {id(param) for param in self._all_params}
        _check_all_in_buckets(self.param_groups, buckets)
        owners: dict[int, int] = {}
        for index, params in enumerate(buckets):
            items = [item for item, param in enumerate(params) if id(param) in known]
            given: list[list[int]] = [[] for _ in range(self.world_size)]
            if shard_buckets:
                runs = cut([params[item].numel() for item in items], self._loads)
                given = [[items[i] for i in run] for run in runs]
            else:
                given[index % self.world_size] = items
            shards = [[params[item] for item in run] for run in given]
            owners.update((id(p), rank) for rank, shard in enumerate(shards) for p in shard)
            exchange = FlatShards(shards, self.process_group)
            self._buckets.append(_Bucket(list(params), given[self.rank], exchange))
        for rank, shard in enumerate(self._shards):
            for group in self.param_groups:
                shard.append([param for param in group["params"] if owners.get(id(param)) == rank])
        self._make_local_optimizer()

    def _check_bucket(self, index: int, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a bucket is not the one that was divided."""
        known = self._buckets[index].params if index < len(self._buckets) else []
        if len(known) != len(params) or any(a is not b for a, b in zip(known, params, strict=True)):
            raise RuntimeError(
                f"overlap_with_ddp: bucket {index} holds other parameters than when they were "
                "divided among the ranks; DistributedDataParallel must keep its buckets"
            )

    def _step_bucket(self, index: int, gradients: Sequence[Tensor]) -> Work | None:
        """Update this rank's share of a bucket, and start to exchange the shares of all."""
        bucket = self._buckets[index]
        if bucket.own:
            _copy_options(self.param_groups, self.optim.param_groups)
            params = [bucket.params[item] for item in bucket.own]
            step_only(self.optim, params, [gradients[item] for item in bucket.own])
            _copy_options(self.optim.param_groups, self.param_groups)
        self._opt_called = True  # what schedulers look for
        return bucket.exchange.exchange(async_op=True) if self.world_size > 1 else None


class _Bucket:
    """A bucket of DDP: its parameters, which of them this rank updates, and how all get them."""

    def __init__(self, params: list[Tensor], own: list[int], exchange: FlatShards) -> None:
        self.params = params
        self.own = own
        self.exchange = exchange


def _copy_options(source: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    """Make parameter groups have the options, such as the learning rate, that others have."""
    for from_group, to_group in zip(source, to, strict=True):
        for key, value in from_group.items():
            if key not in _OF_PARAMS:
                to_group[key] = value


def _check_dense(params: Sequence[Tensor]) -> None:
    for i, param in enumerate(params):
        if param.layout is not torch.strided:
            raise ValueError(
                f"ZeroRedundancyOptimizer needs dense parameters: parameter {i} is {param.layout}"
            )


def _check_all_in_buckets(
    groups: Sequence[dict[str, Any]], buckets: Sequence[Sequence[Tensor]]
) -> None:
    reduced = {id(param) for params in buckets for param in params}
    missing = [
        f"parameter {i} of group {g} ({list(param.shape)})"
        for g, group in enumerate(groups)
        for i, param in enumerate(group["params"])
        if param.requires_grad and id(param) not in reduced
    ]
    if missing:
        raise ValueError(
            f"overlap_with_ddp: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} "
            "would never be updated: the model under DistributedDataParallel does not reduce "
            "it. Pass parameters of that model only, and none that it ignores"
        )


def _first_difference(
    process_group: ProcessGroup, first: list[str], rank: int, other: list[str]
) -> str:
    names = [f"rank {process_group.to_global_rank(r)}" for r in (0, rank)]
    if len(first) != len(other):
        return f"{names[0]} has {len(first)}, {names[1]} has {len(other)}"
    i = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"parameter {i} is {first[i]} on {names[0]} and {other[i]} on {names[1]}"
