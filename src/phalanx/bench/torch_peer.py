"""Ranks that measure torch.distributed, which this module imports: on Gloo, and as threads."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def gloo(directory: Path, rank: int, size: int, timeout: timedelta) -> Iterator[Any]:
    """Be in a world on Gloo, over the loopback interface; its ranks meet in `directory`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'gloo'}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    yield dist
    dist.destroy_process_group()


class ThreadedWorld:
    """A world of torch's ThreadedPG, set up as torch's own tests do."""

    def __init__(self, size: int) -> None:
        tests = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
        native: Any = torch._C._distributed_c10d
        native._set_thread_isolation_mode(True)
        tests._install_threaded_pg()
        self.size, self.store = size, native.HashStore()
        self.line = threading.Barrier(size).wait

    @contextmanager
    def rank(self, rank: int) -> Iterator[Any]:
        """Be one rank of it, in a thread."""
        dist.init_process_group("threaded", rank=rank, world_size=self.size, store=self.store)
        yield dist
        dist.destroy_process_group()
