"""What DistributedDataParallel can be given."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.futures import Future

from phalanx.groups import ProcessGroup
from phalanx.mesh import DeviceMesh
from phalanx.parallel.buckets import GradBucket
from phalanx.parallel.precision import MixedPrecision
from phalanx.world import resolve


def choose_group(group: ProcessGroup | None, mesh: DeviceMesh | None) -> ProcessGroup:
    """Return the group to train in, of a group or a mesh or neither."""
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return resolve(group)
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    return mesh.get_group(0)


def check_module(module: nn.Module, parameters: Sequence[nn.Parameter], delayed: bool) -> None:
    """Raise unless there is something to train in a module."""
    if not delayed and not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name} is uninitialized: run a dummy forward pass before wrapping the "
                "module"
            )


def check_delayed(
    delayed: Sequence[tuple[str, nn.Parameter]], mixed: MixedPrecision | None
) -> None:
    """Raise if parameters whose reduction is delayed would be of another type than the inputs."""
    dtype = None if mixed is None else mixed.param_dtype
    for name, param in delayed:
        if dtype is not None and param.is_floating_point() and param.dtype is not dtype:
            raise ValueError(
                f"delay_all_reduce_named_params: {name} is {param.dtype} and is left alone by "
                f"mixed_precision, so it does not go with inputs in {dtype}: convert it before, "
                "or do not delay it"
            )


def check_devices(parameters: Sequence[nn.Parameter], device_ids: Any, output_device: Any) -> None:
    """Raise unless everything is on the CPU."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    others = {str(p.device) for p in parameters if p.device.type != "cpu"}
    if others:
        raise ValueError(f"parameters must be on the CPU, some are on {', '.join(sorted(others))}")
    if device_ids or output_device is not None:
        raise ValueError(
            "device_ids and output_device must be None for a module on the CPU, got "
            f"{device_ids} and {output_device}"
        )


def check_comm_hook(hook: Any) -> None:
    """Raise unless a communication hook can be called, with what its annotations say."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # not known of some functions that are not written in Python
        return
    bucket = signature.parameters.get("bucket")
    given = inspect.Parameter.empty if bucket is None else bucket.annotation
    if given not in (inspect.Parameter.empty, GradBucket) and not _names(given, "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, Future[Tensor]) and not _names(returned, "Future"):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def _names(annotation: Any, name: str) -> bool:
    """Say whether an annotation that may be text or a generic names a type."""
    return name in (
        annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    )
