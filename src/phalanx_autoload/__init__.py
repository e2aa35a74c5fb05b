"""Make the backend "phalanx" known to torch.

``import torch`` calls `register` as its last step (entry point group ``torch.backends``). It stands
outside the package so that this costs next to nothing: the package is imported with the first
group.
"""

from __future__ import annotations

import warnings
from typing import Any

NAME = "phalanx"


def register() -> None:
    """Tell torch.distributed who makes groups of the backend. Never raises."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except Exception as error:  # it would make `import torch` fail
        warnings.warn(f"the backend {NAME!r} cannot be offered to torch: {error}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from phalanx.torch_backend.group import create

    return create(options, pg_options)
