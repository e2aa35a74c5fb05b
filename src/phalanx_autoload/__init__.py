"""Make the backend "phalanx" known to torch, and put it in the place of another if that is asked.

``import torch`` calls `register` as its last step (entry point group ``torch.backends``). It stands
outside the package so that this costs next to nothing: the package is imported with the first
group.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

NAME = "phalanx"

# Names the backend of torch whose groups Phalanx is to serve, in programs that cannot be edited.
REPLACE = "PHALANX_REPLACE"
REPLACEABLE = ("gloo",)

# What torch keeps for its own backends; `phalanx.torch_backend.lifted` has what serves Phalanx's.
LIFTED = ("monitored_barrier", "split_group", "shrink_group", "_set_pg_timeout")


def register() -> None:
    """Tell torch.distributed who makes groups of the backend.

    Never raises, unless PHALANX_REPLACE asks for what cannot be done: a program must not run on
    another backend than its user believes. Then it ends the process, since torch would add to any
    other exception the advice to disable this.
    """
    replaced = os.environ.get(REPLACE, "")
    try:
        check_replaceable(replaced)
    except ValueError as error:
        raise SystemExit(f"phalanx: {REPLACE}={replaced}: {error}") from None
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        elif replaced:
            raise RuntimeError("this torch was built without torch.distributed")
        if replaced:
            _replace()
    except Exception as error:  # it would make `import torch` fail
        if replaced:
            raise SystemExit(
                f"phalanx: {REPLACE}={replaced}: {replaced} cannot be replaced: {error}"
            ) from error
        warnings.warn(f"the backend {NAME!r} cannot be offered to torch: {error}", stacklevel=2)


def check_replaceable(backend: str) -> None:
    """Raise ValueError unless Phalanx can stand in for a backend of torch; "" is for none."""
    if backend not in ("", *REPLACEABLE):
        raise ValueError(f"cannot replace backend {backend!r} (known: {', '.join(REPLACEABLE)})")


def _create(options: Any, pg_options: Any) -> Any:
    from phalanx.torch_backend.group import create

    return create(options, pg_options)


@functools.cache
def _replace() -> None:
    """Have torch make its groups through `phalanx.torch_backend.replacing`.

    All of them go through one private function, which its public ones look up with each call: it
    does not matter who has imported those, or when. The functions for torch's own backends are
    imported by name as well, so that they must know Phalanx's groups before there is one.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d

    for name in ("_new_process_group_helper", *LIFTED):
        theirs = getattr(distributed_c10d, name)
        ours = _late(name, theirs)
        for module in (torch.distributed, distributed_c10d):
            if getattr(module, name, None) is theirs:
                setattr(module, name, ours)


def _late(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that imports the package when it is called: not before it is needed."""

    @functools.wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        if not os.environ.get(REPLACE):
            return theirs(*args, **kwargs)
        from phalanx.torch_backend import replacing

        return replacing.call(name, theirs, *args, **kwargs)

    ours.theirs = theirs  # type: ignore[attr-defined]
    return ours
