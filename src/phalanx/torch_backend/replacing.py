"""Groups that a program asks Gloo for, served by Phalanx: ``PHALANX_REPLACE=gloo``.

The program finds what it would find on Gloo: `get_backend` and `get_backend_config` answer as torch
would have. Only `ProcessGroup.name()` says who serves the group. Tensors on other devices go where
they would have gone, be that Gloo.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from phalanx.errors import DistError
from phalanx.torch_backend import lifted
from phalanx.torch_backend.theirs import state
from phalanx_autoload import NAME, REPLACE

_GLOO = "gloo"


def call(name: str, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what torch does in a function that `phalanx_autoload` has taken the place of."""
    if name in lifted.lift():
        return lifted.lift()[name](*args, **kwargs)
    bound = inspect.signature(theirs).bind(*args, **kwargs)
    return _new_group(theirs, bound)


def _new_group(theirs: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    """Make a group of torch's, on Phalanx if Gloo was to serve its CPU tensors."""
    asked = bound.arguments
    backend = asked["backend"]
    names = _by_device(backend)
    if names.get("cpu") != _GLOO:
        return theirs(*bound.args, **bound.kwargs)
    _check(asked, names)
    told = ",".join(f"{device}:{name}" for device, name in names.items())
    # The CPU comes first: torch makes no other engines once it has a group in Python.
    config = f"cpu:{NAME}" + "".join(
        f",{device}:{name}" for device, name in names.items() if device != "cpu"
    )
    group, store = make(theirs, bound, config, told)
    if group in state._world.pg_map:  # it is not where this rank is no member
        ranks = asked["global_ranks_in_group"]  # none for the default group
        if (ranks[group.rank()] if ranks else group.rank()) == 0:
            _announce()
    return group, store


def make(
    theirs: Callable[..., Any], bound: inspect.BoundArguments, config: str, told: str
) -> tuple[Any, Any]:
    """Make a group served as `config` says, by device, and known as it was asked for.

    `told` is which backend serves which device, as the program is to hear it.
    """
    backend = bound.arguments["backend"]
    bound.arguments["backend"] = config
    group, store = theirs(*bound.args, **bound.kwargs)
    if group in state._world.pg_map:
        group.known_as = dict(pair.split(":") for pair in told.split(",")).get("cpu", NAME)
        state._world.pg_map[group] = (backend, store)
        state._world.pg_backend_config[group] = told
    return group, store


def _by_device(backend: str) -> dict[str, str]:
    """Return who serves which device in a group of a backend, or of several."""
    names: dict[str, str] = state.BackendConfig(state.Backend(backend)).get_device_backend_map()
    if ":" in backend or torch.accelerator.is_available():
        return names
    # An engine for a device that is not there would be made as soon as somebody asks for it.
    return {device: name for device, name in names.items() if device == "cpu"}


def _check(asked: dict[str, Any], names: dict[str, str]) -> None:
    """Refuse what Phalanx cannot do for Gloo."""
    options = asked.pop("backend_options", None)
    # Torch itself does not look at options for Gloo.
    if options is not None and set(names.values()) != {_GLOO}:
        raise DistError(
            f"{_GLOO} cannot be replaced: a group of '{asked['backend']}' has options "
            f"({type(options).__name__}); run without {REPLACE}={_GLOO}"
        )


@functools.cache
def _announce() -> None:
    line = f"phalanx: {_GLOO} is replaced by {NAME} ({REPLACE}={_GLOO})"
    print(line, file=sys.stderr, flush=True)
