"""Phalanx under the names that PyTorch's own tests of torch.distributed look up.

PyTorch ships its tests (``torch/testing/_internal/distributed/distributed_test.py``). With this
module in place of ``torch.distributed`` in them, they test Phalanx. What is here beside names:

* Groups may be asked for as ``gloo`` or ``nccl``, which are Phalanx under another name.
* Events of the profiler are asynchronous, as Gloo's are.
* ``DistributedDataParallel`` drops ``device_ids`` and ``output_device`` for modules on the CPU, so
  that tests written for GPUs run on CPU tensors, and tells of unused parameters as late as torch.
* What the tests take of torch.distributed by another way than this module is redirected.

Importing it changes the process for good: it is for a process that does nothing but run those
tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx import world
from phalanx.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from phalanx.algorithms.ddp_comm_hooks import quantization_hooks as quantization_hooks
from phalanx.algorithms.model_averaging import averagers as averagers
from phalanx.algorithms.model_averaging import hierarchical_model_averager, utils
from phalanx.backends import local
from phalanx.backends.base import GroupBackend
from phalanx.backends.registry import Backend, BackendOptions
from phalanx.optim import _apply_optimizer_in_backward as _apply_optimizer_in_backward
from phalanx.optim import post_localSGD_optimizer as post_localSGD_optimizer
from phalanx.parallel import buckets, buffers, ddp, precision, replicas, statistics, unused
from phalanx.testing.asynchronous import make_events_asynchronous

default = default_hooks
post_localSGD = post_localSGD_hook
powerSGD = powerSGD_hook
hierarchicalSGD = hierarchical_model_averager
model_averaging_utils = utils
_BucketCapacityConfig = buckets.BucketCapacityConfig
_DEFAULT_BUCKET_CAP_MB = buckets.DEFAULT_CAP_MB
_DEFAULT_FIRST_BUCKET_BYTES = buckets.DEFAULT_FIRST_BYTES
_MB_TO_BYTES = buckets.MB
_MixedPrecision = precision.MixedPrecision
_compute_bucket_assignment_by_size = buckets.compute_bucket_assignment_by_size
_sync_module_states = replicas.sync_module_states

# What torch's DistributedDataParallel logs where the backend calls itself Gloo.
_GLOO_DATA = {
    "gloo_socket_ifname": os.environ.get("GLOO_SOCKET_IFNAME", "N/A"),
    "gloo_device_transport": os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A"),
    "gloo_num_threads": 2,
}


def _register(name: str) -> None:
    def create(options: BackendOptions, pg_options: object = None) -> GroupBackend:
        backend = local.create(options, pg_options)
        backend.name = name
        return backend

    Backend.register_backend(name, create, extended_api=True)


for _name in (Backend.GLOO, Backend.NCCL):
    _register(_name)
make_events_asynchronous()


def _get_pg_config(group: phalanx.ProcessGroup | None = None) -> dict[str, Any]:
    """Describe a group."""
    member = world.resolve(group)
    return {
        "pg_name": member.group_name,
        "pg_desc": member.group_desc,
        "backend_config": repr(member.config),
        "pg_size": member.size(),
        "ranks": list(member.ranks),
    }


def _dump_DDP_relevant_env_vars() -> None:
    """Print what launchers set, and what the tests ask about NCCL."""
    statistics.dump_environment()
    for name in ("NCCL_TOPO_DUMP_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        print(f"env:{name}={os.environ.get(name, 'N/A')}")


def _verify_param_shape_across_processes(
    process_group: phalanx.ProcessGroup, tensors: Sequence[Tensor], logger: Any = None
) -> None:
    """Raise RuntimeError, and tell the logger, unless all ranks have tensors alike."""
    try:
        replicas.verify_parameters(
            process_group, [f"tensor {i}" for i in range(len(tensors))], tensors
        )
    except RuntimeError as error:
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise


class DistributedDataParallel(ddp.DistributedDataParallel):
    """DistributedDataParallel as the tests want it."""

    _unused_in_next_forward = True

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if all(parameter.is_cpu for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids, output_device, *args, **kwargs)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        data = super()._get_ddp_logging_data()
        return data | _GLOO_DATA if data.get("backend_name") == Backend.GLOO else data


def _redirect() -> None:
    """Put Phalanx where the tests reach for torch.distributed itself."""
    theirs: Any = torch.distributed
    theirs.new_group = phalanx.new_group
    theirs.device_mesh.init_device_mesh = phalanx.init_device_mesh
    parallel: Any = torch.nn.parallel.distributed
    parallel._BufferCommHookLocation = buffers.BufferCommHookLocation
    unused.ADVICE += (
        " To see which they are, set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL."
    )
    tests = sys.modules.get("torch.testing._internal.distributed.distributed_test")
    if tests is None:
        return
    for function in vars(tests.DistributedTest._DistTestBase).values():
        defaults = getattr(function, "__defaults__", None)
        if defaults:
            function.__defaults__ = tuple(_counterpart(value) for value in defaults)


def _counterpart(value: Any) -> Any:
    """Return Phalanx's function for one of torch.distributed, and all else as it is."""
    name = getattr(value, "__name__", "")
    is_theirs = bool(name) and getattr(torch.distributed, name, None) is value
    return getattr(phalanx, name) if is_theirs else value


def __getattr__(name: str) -> Any:
    return getattr(phalanx, name)  # most names are the same


_redirect()
