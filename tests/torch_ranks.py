"""Ranks of torch.distributed for the tests: processes in a world of torch's."""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import phalanx
from phalanx.testing import run_ranks


def run_torch(fn, size, *args, backend="phalanx", timeout=60, return_exceptions=False):
    """Run ``fn(*args)`` on ranks that have called torch's init_process_group."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(
            _run,
            size,
            fn,
            f"file://{Path(directory) / 'store'}",
            backend,
            args,
            ranks="processes",
            timeout=timeout,
            return_exceptions=return_exceptions,
        )


def _run(fn, address, backend, args):
    rank, size = phalanx.get_rank(), phalanx.get_world_size()
    phalanx.destroy_process_group()  # there is no other world than torch's
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=50)
    )
    result = fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
