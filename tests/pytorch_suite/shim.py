"""Let tests that were written for GPUs, or that PyTorch itself leaves out, run on CPU tensors.

No assertion is changed. What changes: skips are lifted, unless what is missing is missing; "on the
GPU" means a copy in the memory of the CPU; and images of a million pixels are cropped.
"""

from __future__ import annotations

import functools
import os
import re
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

CPU = torch.device("cpu")

KEPT = re.compile(r"world size|torchvision")

# PyTorch runs tests of the group of ranks 1 and 2 with eight ranks or more; they need three.
LEAST_RANKS = 3

# A side of the images that models are trained on, of 1000 on GPUs.
PIXELS = 32

_skip = unittest.skip


def _same(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def _wrap(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)  # the tests look for what was wrapped
    def inner(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return inner


def _anything_goes(*_: Any, **__: Any) -> Callable[..., Any]:
    return _wrap


def _skip_if(condition: object, reason: str) -> Callable[..., Any]:
    return _skip(reason) if condition and KEPT.search(reason) else _same


def _skip_if_small(test: Callable[..., Any]) -> Callable[..., Any]:
    too_small = int(os.environ["WORLD_SIZE"]) < LEAST_RANKS
    return _skip_if(too_small, f"Test requires world size of {LEAST_RANKS}")(test)


@contextmanager
def skips_lifted() -> Iterator[None]:
    """Have no test skipped for want of a GPU or another backend, or because it failed elsewhere.

    For the time in which the tests are imported.
    """
    instead = [
        (common_distributed, "skip_if_no_gpu", _same),
        (common_distributed, "skip_if_lt_x_gpu", _anything_goes),
        (common_distributed, "requires_nccl_version", _anything_goes),
        (common_distributed, "skip_if_small_worldsize", _skip_if_small),
        (common_distributed, "init_multigpu_helper", _one_gpu_per_rank),
        (common_utils, "skip_but_pass_in_sandcastle", functools.partial(_skip_if, True)),
        (common_utils, "skip_but_pass_in_sandcastle_if", _skip_if),
        (unittest, "skip", functools.partial(_skip_if, True)),
        (unittest, "skipIf", _skip_if),
    ]
    with ExitStack() as stack:
        for module, name, replacement in instead:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _one_gpu_per_rank(world_size: int, backend: str) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}


def pretend(tests: ModuleType) -> None:
    """Make what says GPU mean CPU, in this process and those forked from it, for good."""
    _OnCpu().__enter__()
    tests.torch = _Torch("torch")
    _crop_images(tests)
    for name in ("set_device", "synchronize", "Stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0

    module_to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: module_to(
        self, *map(_device, args), **_devices(kwargs)
    )

    parallel: Any = torch.nn.parallel.DistributedDataParallel
    initialize = parallel.__init__

    @functools.wraps(initialize)
    def initialize_on_cpu(
        self: Any,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if all(parameter.is_cpu for parameter in module.parameters()):
            device_ids = output_device = None
        initialize(self, module, device_ids, output_device, *args, **kwargs)

    parallel.__init__ = initialize_on_cpu

    meshes: Any = torch.distributed.device_mesh
    init_device_mesh = meshes.init_device_mesh
    meshes.init_device_mesh = lambda device_type, *args, **kwargs: init_device_mesh(
        "cpu" if device_type == "cuda" else device_type, *args, **kwargs
    )


def _crop_images(tests: ModuleType) -> None:
    """Train on images that a CPU can cope with; the models take images of any size."""
    whole = tests.DDPUnevenTestInput

    def cropped(*args: Any, **kwargs: Any) -> Any:
        test = whole(*args, **kwargs)
        is_image = isinstance(test.inp, torch.Tensor) and test.inp.dim() == 4
        return test._replace(inp=test.inp[..., :PIXELS, :PIXELS]) if is_image else test

    tests.DDPUnevenTestInput = cropped


def _device(value: Any) -> Any:
    """Return the CPU for what names a GPU, and all else as it is."""
    is_gpu = (
        (isinstance(value, int) and not isinstance(value, bool))
        or (isinstance(value, str) and value.startswith("cuda"))
        or (isinstance(value, torch.device) and value.type == "cuda")
    )
    return CPU if is_gpu else value


def _devices(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: _device(value) if name == "device" else value for name, value in kwargs.items()}


class _Torch(ModuleType):
    """torch, where ``torch.device(0)`` is known without a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*args: Any, **kwargs: Any) -> torch.device:
        return torch.device(*map(_device, args), **kwargs)


class _OnCpu(TorchFunctionMode):
    """Create tensors, and copy them, on the CPU when a GPU is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = _devices(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if func is torch.Tensor.to and len(args) > 1 and _device(args[1]) is not args[1]:
            result = func(args[0], CPU, *args[2:], **kwargs)
            return result.clone() if result is args[0] else result
        return func(*args, **kwargs)
