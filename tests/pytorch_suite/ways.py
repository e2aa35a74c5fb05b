"""Load PyTorch's tests, with what is to be tested in the place of what they were written for."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from pytorch_suite.settings import Settings

TESTS = "torch.testing._internal.distributed.distributed_test"

# Where torch's distributed parts live that the tests import.
REPLACED = ("torch.distributed", "torch.nn.parallel", "torch.utils.data.distributed")


def load(settings: Settings) -> ModuleType:
    """Return the module of PyTorch's tests, which test what the settings say.

    This changes torch in this process for good.
    """
    if settings.way == "backend":
        _admit(settings.backend)
    if settings.shim:
        from pytorch_suite import shim

        with shim.skips_lifted():
            tests = importlib.import_module(TESTS)
        shim.pretend(tests)
    else:
        tests = importlib.import_module(TESTS)
    if settings.way == "package":
        _replace(tests)
    else:
        _rename(settings)
    if settings.way == "as-gloo":
        from phalanx.testing.asynchronous import make_events_asynchronous

        make_events_asynchronous(settings.backend)
    return tests


def imported_names(source: str) -> Iterator[tuple[str, str]]:
    """Yield what the tests import of torch's distributed parts: module or member, and its name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [
                (f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names
            ]
        else:
            continue
        yield from [one for one in found if one[0].startswith(REPLACED)]


def _admit(backend: str) -> None:
    """Let tests run on a backend as PyTorch lets them on those that others provide."""
    importlib.import_module("phalanx.torch_backend")
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(backend)


def _rename(settings: Settings) -> None:
    """Give torch.distributed the backend to be tested where the tests say another."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    meant = "gloo" if settings.way == "gloo" else "phalanx"
    said = {settings.backend, "nccl"} if settings.shim else {settings.backend}
    if meant == "phalanx":
        importlib.import_module("phalanx.torch_backend")

    def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if bound.arguments.get("backend") in said:
                bound.arguments["backend"] = meant
            return function(*bound.args, **bound.kwargs)

        return inner

    get_backend = distributed_c10d.get_backend

    @functools.wraps(get_backend)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        name = get_backend(*args, **kwargs)
        return dist.Backend(settings.backend) if name == meant else name

    taking_names = (
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    )
    functions = {name: renaming(getattr(distributed_c10d, name)) for name in taking_names}
    for name, function in (functions | {"get_backend": renamed}).items():
        for module in (distributed_c10d, dist):
            setattr(module, name, function)


def _replace(tests: ModuleType) -> None:
    """Put Phalanx where the tests have torch's distributed parts; nothing may be missing."""
    from phalanx.testing import pytorch_suite as stand_in

    names = [name for _, name in imported_names(inspect.getsource(tests)) if name != "dist"]
    missing = [name for name in names if not hasattr(stand_in, name)]
    if missing:
        raise SystemExit(f"phalanx.testing.pytorch_suite lacks {', '.join(sorted(missing))}")
    for name in names:
        setattr(tests, name, getattr(stand_in, name))
    tests.dist = stand_in

    # The tests reach these through torch as well.
    import torch.nn
    from torch.testing._internal import common_distributed

    torch.nn.parallel.DistributedDataParallel = stand_in.DistributedDataParallel
    torch.nn.SyncBatchNorm = stand_in.SyncBatchNorm
    common_distributed.c10d = stand_in
