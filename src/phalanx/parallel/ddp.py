"""Training one model on several ranks, each with its own part of the data."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.futures import Future

from phalanx.algorithms.join import Join, Joinable, JoinHook
from phalanx.groups import ProcessGroup
from phalanx.mesh import DeviceMesh
from phalanx.parallel.arguments import (
    check_comm_hook,
    check_delayed,
    check_devices,
    check_module,
    choose_group,
)
from phalanx.parallel.buckets import BucketCapacityConfig, GradBucket, Slot
from phalanx.parallel.buffers import BufferCommHookLocation, Buffers
from phalanx.parallel.delayed import DelayedReduction
from phalanx.parallel.health import GradientHealth
from phalanx.parallel.outputs import tensors_in
from phalanx.parallel.parameters import trainable
from phalanx.parallel.precision import LowPrecision, MixedPrecision, cast_buffers, cast_floats
from phalanx.parallel.reducer import Reducer
from phalanx.parallel.replicas import broadcast_coalesced, sync_module_states, verify_parameters
from phalanx.parallel.shadow import DDPJoinHook, announce_sync, find_common_rank
from phalanx.parallel.statistics import Statistics
from phalanx.world import default_group, is_outside

_BROADCAST_BYTES = 250 * 1024 * 1024


class BuiltinCommHookType(Enum):
    """Communication hooks that are known by name."""

    ALLREDUCE = auto()
    FP16_COMPRESS = auto()


class DistributedDataParallel(nn.Module, Joinable):
    """Wrap a module so that its gradients are averaged over the ranks of a group.

    Takes what torch's class of this name takes, on CPU. Every rank wraps the same module; rank 0's
    parameters and buffers are copied to all. After ``backward()`` every rank has the average of all
    ranks' gradients, bitwise the same on each. Gradients of one dtype lie in buckets in shared
    memory, which are reduced while backward computes further ones; ``.grad`` of a parameter is its
    piece of a bucket. A gradient that is kept elsewhere when a step begins keeps its content,
    unless ``gradient_as_bucket_view`` says that pieces may always be written again.

    Args:
        module: What to train.
        broadcast_buffers: False copies no buffers between ranks, also not at construction.
            Deprecated, as in torch 2.13, in favour of ``forward_sync_buffers``.
        forward_sync_buffers: Copy rank 0's buffers to all ranks before each forward pass; True
            unless one of the two says otherwise.
        init_sync: Compare the model over the ranks, and copy it, now.
        process_group: Whose ranks train together; None is the default group.
        bucket_cap_mb: How large buckets become, in MiB.
        bucket_cap_mb_list: The same, one number for each bucket.
        find_unused_parameters: Allow that parameters take no part in a backward pass. A gradient
            that no rank has computed is left as it was.
        gradient_as_bucket_view: Let every step write over the gradients of the one before, also
            over those that are kept elsewhere.
        static_graph: Promise that every iteration uses the same parameters equally often. Allows
            several reentrant backward passes in one.
        delay_all_reduce_named_params: Parameters, with names, that are reduced all together.
        param_to_hook_all_reduce: Whose gradient starts that, when it is there.
        mixed_precision: Types to compute and to reduce in.
        device_mesh: A mesh of one dimension, in place of a group.
        skip_all_reduce_unused_params: Do not reduce buckets of which no gradient was computed;
            the unused parameters must then be the same on all ranks.
        device_ids: None; torch takes devices here, and there is the CPU alone.
        output_device: None, likewise.
        dim: No effect.
        check_reduction: No effect but a warning.
        batched_grad_copy: No effect.
    """

    # torch tells of unused parameters in the next forward pass; True does as torch does.
    _unused_in_next_forward: ClassVar[bool] = False

    process_group: ProcessGroup
    _authoritative_rank: int  # whose model all have after a join

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.logger = Statistics()
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time"
            )
        delayed = list(delay_all_reduce_named_params or ())
        check_delayed(delayed, mixed_precision)
        self.process_group = choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._module_parameters = [
            p for name, p in module.named_parameters() if name not in self.parameters_to_ignore
        ]
        check_module(module, self._module_parameters, bool(delayed))
        check_devices(self._module_parameters, device_ids, output_device)
        if check_reduction:
            warnings.warn("check_reduction has no effect any more", FutureWarning, stacklevel=2)
        if broadcast_buffers is not None:
            warnings.warn(
                "broadcast_buffers is deprecated in favour of forward_sync_buffers, which has the "
                "last word if both are given and leaves the copy at construction alone",
                FutureWarning,
                stacklevel=2,
            )

        self.module = module
        self.dim = dim
        self.device_ids = None
        self.output_device = None
        self.device = torch.device("cpu")
        self.device_type = "cpu"
        self.is_multi_device_module = False
        self.static_graph = False
        self.forward_sync_buffers = (
            forward_sync_buffers
            if forward_sync_buffers is not None
            else broadcast_buffers is not False
        )
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.broadcast_bucket_size = _BROADCAST_BYTES
        self._bucket_config = BucketCapacityConfig.create(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._bucket_config.bucket_bytes_cap
        self.bucket_bytes_cap_list = list(self._bucket_config.per_bucket_bytes_caps)
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._module_buffers = Buffers(module, self.parameters_to_ignore)
        self._divide_by_initial_world_size = True
        self._low: LowPrecision | None = None
        self._lowered = False  # by the present forward pass

        parameters, _ = self._build_params_for_reducer()
        if init_sync:
            verify_parameters(self.process_group, self._names, parameters)
            init_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
            sync_module_states(
                module,
                self.process_group,
                self.broadcast_bucket_size,
                0,
                self.parameters_to_ignore,
                broadcast_buffers=init_buffers,
            )
        self._delayed: DelayedReduction | None = None
        if delayed:
            assert param_to_hook_all_reduce is not None
            self._delayed = DelayedReduction(
                self.process_group, [p for _, p in delayed], param_to_hook_all_reduce
            )
        if mixed_precision is not None:
            if mixed_precision.param_dtype or mixed_precision.reduce_dtype:
                self._low = LowPrecision(self._module_parameters, mixed_precision.param_dtype)
            if mixed_precision.buffer_dtype is not None:
                cast_buffers(module, mixed_precision.buffer_dtype)
        self._make_reducer(parameters, static_graph)
        if static_graph:
            self._set_static_graph()

    # Construction

    def _make_reducer(self, parameters: Sequence[nn.Parameter], static_graph: bool) -> None:
        if not parameters:
            return
        mixed = self.mixed_precision
        self.reducer = Reducer(
            [
                Slot(i, name, param, sparse)
                for i, (name, param, sparse) in enumerate(
                    zip(self._names, parameters, self._sparse, strict=True)
                )
            ],
            self.process_group,
            self._bucket_config,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            low=self._low,
            reduce_dtype=(mixed.reduce_dtype or mixed.param_dtype) if mixed else None,
            statistics=self.logger,
        )
        self.reducer.late = self._unused_in_next_forward
        self.logger.describe(self, parameters, static_graph)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters that are reduced, in order, and which get sparse gradients."""
        found, self._frozen = trainable(self.module, self.parameters_to_ignore)
        self._names = [each.name for each in found]
        self._sparse = [each.sparse for each in found]
        return [each.param for each in found], self._sparse

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        """Return the name of each parameter by its number."""
        numbers = {param: i for i, param in enumerate(parameters)}
        mapping = {}
        for name, param in zip(self._names, self._build_params_for_reducer()[0], strict=True):
            if param not in numbers:
                self._raise(ValueError, f"Param with name {name} is not among those given")
            mapping[numbers[param]] = name
        if len(mapping) != len(numbers):
            self._raise(
                ValueError,
                f"Expected param to name mapping of {len(numbers)} parameters, but the module has "
                f"{len(mapping)}",
            )
        return mapping

    # Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and expect a backward pass if gradients are enabled."""
        if not profiler._is_profiler_enabled:
            return self._forward(*inputs, **kwargs)
        with profiler.record_function("DistributedDataParallel.forward"):
            return self._forward(*inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._lowered = False
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self.module(*inputs, **kwargs))
        except BaseException:
            if self._low is not None and self._lowered:
                self._low.restore(failed=True)
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._is_recomputed():
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()
            self._lazy_init_ran = True
        syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        reducer = getattr(self, "reducer", None)
        if syncing and reducer is not None:
            self._check_frozen()
            self.logger.forward_begins(reducer.num_iterations)
            reducer.prepare_for_forward()
        work = Join.notify_join_context(self)
        if reducer is not None:
            reducer.joining = self._join_config.enable
            if not reducer.joining:  # an exception may have left the last context
                reducer.exchange.divisor = None
        if self._join_config.enable:
            announce_sync(self.process_group, syncing)
            if work is not None:
                work.wait()
                if reducer is not None and not self._divide_by_initial_world_size:
                    reducer.exchange.divisor = int(work.result()[0].item())
        if syncing and reducer is not None and reducer.rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self._will_sync_buffers(BufferCommHookLocation.PRE_FORWARD):
            self._sync_buffers()
        if self._low is not None:
            self._lowered = self._low.lower()
            if (dtype := self._low.dtype) is not None:
                inputs, kwargs = cast_floats(inputs, dtype), cast_floats(kwargs, dtype)
        return inputs, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _post_forward(self, output: Any) -> Any:
        if self._is_recomputed():
            return output
        if self._will_sync_buffers(BufferCommHookLocation.POST_FORWARD):
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            if hasattr(self, "reducer"):
                self.reducer.arm(list(tensors_in(output)))
        else:
            self.require_forward_param_sync = False
            if self._low is not None:
                if torch.is_grad_enabled():
                    self._low.restore_after_backward(tensors_in(output))
                elif self._lowered:  # unless another forward pass waits for its backward
                    self._low.restore()
        if self._delayed is not None:
            self._delayed.attach()
        return output

    def _is_recomputed(self) -> bool:
        """Say whether a running backward pass, from this forward pass, has called it again."""
        inside = torch._C._current_graph_task_id() != -1
        return inside and hasattr(self, "reducer") and self.reducer.running

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when DistributedDataParallel was made and "
                    "requires a gradient now, which would not be reduced: unfreeze parameters "
                    "before wrapping the module, or wrap it again"
                )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes of forward passes in this block only accumulate, on this rank.

        The first backward pass after the block reduces what has accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # Buffers

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are copied from rank 0 before each forward pass."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Say whether the next forward pass copies buffers between ranks."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self._module_buffers.named) > 0
        )

    def _will_sync_buffers(self, location: BufferCommHookLocation) -> bool:
        return self._module_buffers.location is location and self.will_sync_module_buffers()

    def _sync_buffers(self) -> None:
        # With uneven inputs rank 0 may have joined, and its buffers be old.
        source = find_common_rank(self.process_group, True) if self._join_config.enable else 0
        self._module_buffers.refresh()
        self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        futures = self._module_buffers.sync(self.process_group, authoritative_rank)
        if hasattr(self, "reducer"):
            self.reducer.after_backward += [future.wait for future in futures]
        else:
            for future in futures:
                future.wait()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy buffers from one rank to all, as is done without a hook; hooks may call it."""
        buffers = self.modules_buffers if bufs is None else bufs
        size = bucket_size or self.broadcast_bucket_size
        broadcast_coalesced(self.process_group, buffers, size, authoritative_rank)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, buffers by name)`` synchronise buffers, before or after forward.

        It may return futures, which are waited for at the end of backward.
        """
        self._module_buffers.register_hook(state, hook, comm_hook_location)

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by name."""
        return self._module_buffers.named

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronised."""
        return list(self._module_buffers.named.values())

    # Communication hooks

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, GradBucket], Future[Any]]
    ) -> None:
        """Let ``hook(state, bucket)`` reduce the gradients, once and for all.

        It is called with each bucket, in one order on all ranks, as soon as its gradients are
        there, and returns a future of the flat result. Callbacks of the futures of asynchronous
        collectives that it starts run at the end of backward, in that order, too.
        """
        try:
            check_comm_hook(hook)
        except (TypeError, ValueError) as error:
            self._raise(type(error), str(error))
        self._check_reduces("register_comm_hook")
        if self.reducer.exchange.hook is not None:
            self._raise(
                RuntimeError,
                "register_comm_hook or register_builtin_comm_hook can only be called once.",
            )
        self.reducer.exchange.hook = (state, hook)
        self.logger.set_fact("comm_hook", getattr(hook, "__qualname__", type(hook).__qualname__))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Reduce gradients in one of the ways that are known by name."""
        from phalanx.algorithms.ddp_comm_hooks import default_hooks

        name = getattr(comm_hook_type, "name", comm_hook_type)
        hooks = {
            "ALLREDUCE": default_hooks.allreduce_hook,
            "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        }
        if name not in hooks:
            raise ValueError(f"unknown builtin hook {comm_hook_type!r} (known: {', '.join(hooks)})")
        self.register_comm_hook(self.process_group, hooks[name])
        self.logger.set_fact("comm_hook", str(comm_hook_type))

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Step each parameter with an optimizer of this class as soon as its bucket is reduced."""
        from phalanx.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _setup_in_backward_optimizers(self) -> None:
        delayed = () if self._delayed is None else self._delayed.parameters
        if any(hasattr(p, "_in_backward_optimizers") for p in delayed):
            raise RuntimeError(
                "a parameter is stepped during backward, but reduced at its end "
                "(delay_all_reduce_named_params): give it another optimizer, or do not delay it"
            )
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from phalanx.algorithms.ddp_comm_hooks import optimizer_overlap_hooks

        optimizer_overlap_hooks._setup_in_backward(self)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs.

        A rank that has run out of them goes along with the others, contributing zeros. Gradients
        are divided by the number of all ranks, or of those that still have inputs if
        ``divide_by_initial_world_size`` is False. In the end all ranks have the model of one that
        had the most inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without input does for this module."""
        self._check_reduces("join")
        return DDPJoinHook(
            self, divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True)
        )

    @property
    def join_device(self) -> torch.device:
        """The device of the gradients."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that trains together."""
        return self.process_group

    # The rest of torch's surface

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts and times, under the names of torch's DDPLoggingData; times in ns."""
        data = self.logger.data()
        if hasattr(self, "reducer"):
            data["can_set_static_graph"] = bool(self.reducer._ddp_graph_static())
        return data

    def statistics(self) -> str:
        """Return a table to read: how the model is set up, its buckets, averages of its times."""
        return f"{type(self).__name__} of {type(self.module).__name__}\n{self.logger.table()}"

    def watch_gradients(self, raises: bool = True) -> GradientHealth:
        """Measure gradients from now on: norms, and who brings in NaN or Inf.

        Costs next to nothing: sums of squares are taken while gradients are copied and reduced.
        Returns what holds the figures of the last backward pass. If gradients are not finite,
        backward raises FloatingPointError on all ranks, which names ranks and parameters, unless
        ``raises`` is False. Every rank must call it.
        """
        self._check_reduces("watch_gradients")
        health = self.reducer.exchange.health = GradientHealth(raises)
        return health

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Keep the times of every ``sample_rate``'th iteration, after the first ten."""
        if sample_rate < 1:
            self._raise(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1, "
                f"got {sample_rate}",
            )
        self.logger.set_sample_rate(sample_rate)

    def _set_static_graph(self) -> None:
        """Promise that the graph stays the same, before the first iteration."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self._check_reduces("static_graph")
        if self.reducer.num_iterations:
            self._raise(
                RuntimeError, "_set_static_graph should be called before training loop starts"
            )
        self.static_graph = self.reducer.static_graph = True
        self.logger.set_fact("static_graph", 1)
        if self.find_unused_parameters:
            warnings.warn(
                "static_graph finds unused parameters by itself: find_unused_parameters=True is "
                "not needed with it",
                stacklevel=2,
            )

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Let parameters and buffers, by their full names, be left alone when it is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        ignored = set(params_and_buffers_to_ignore)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters that are not ignored."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _remove_autograd_hooks(self) -> None:
        """Reduce nothing any more."""
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if gradients of the last backward pass are missing."""
        self.reducer.check_finished()

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Go on with other ranks; hooks with groups of their own must be told apart."""
        self._has_rebuilt_buckets = False
        if is_outside(new_process_group):
            return
        self.process_group = new_process_group
        self.reducer.change_group(new_process_group)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted for torch's sake: outputs are never copied here."""

    def _check_reduces(self, what: str) -> None:
        if not hasattr(self, "reducer"):
            raise RuntimeError(
                f"{what} has nothing to act on: the reduction of all parameters is delayed "
                "(delay_all_reduce_named_params)"
            )

    def _raise(self, kind: type[Exception], message: str) -> NoReturn:
        self.logger.set_error_and_log(f"{kind}: {message}")
        raise kind(message)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group, since a copy can only find that one again"
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_delayed"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = default_group()
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.logger = Statistics()
        self._delayed = None
        parameters, _ = self._build_params_for_reducer()
        self._make_reducer(parameters, self.static_graph)
