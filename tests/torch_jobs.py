"""Programs on torch.distributed, each rank a process of its own, for tests."""

from __future__ import annotations

import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import run_ranks

LIMIT = 110  # seconds that a job may take, on a machine that has other things to do


def run_job(program, size, *args, backends=("phalanx",), return_exceptions=False):
    """Run `program(*args)` on each backend in turn; return by rank what it returned on each.

    Each rank has a directory of the job, empty at first, as its working directory.
    """
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(
            _on_each,
            size,
            program,
            args,
            backends,
            directory,
            ranks="processes",
            timeout=LIMIT,
            return_exceptions=return_exceptions,
        )


class Outcomes:
    """What programs returned, all of them run in one start of processes.

    They run on Phalanx and, to compare, on Gloo, unless told otherwise.
    """

    def __init__(self, *programs, size=2, beside_gloo=True):
        backends = ("phalanx", "gloo") if beside_gloo else ("phalanx",)
        self._by_rank = run_job(_all_of, size, programs, backends=backends)

    def of(self, program, rtol=0.0, atol=0.0):
        """Return by rank what a program returned on Phalanx, once it is what it was on Gloo.

        That is the same bit by bit with two ranks: two numbers can be added in one order only.
        """
        results = []
        for rank, on_backends in enumerate(self._by_rank):
            ours, *theirs = (outcomes[program.__name__] for outcomes in on_backends)
            for result in (ours, *theirs):
                assert not isinstance(result, str), f"on rank {rank}:\n{result}"
            for other in theirs:
                torch.testing.assert_close(ours, other, rtol=rtol, atol=atol)
            results.append(ours)
        return results


def start(backend, rank, size, directory):
    """Initialise torch's default group."""
    path = Path(directory, backend.replace(":", "-"))
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(path), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def _on_each(program, args, backends, directory):
    rank, size = phalanx.get_rank(), phalanx.get_world_size()
    phalanx.destroy_process_group()  # torch's default group makes a world of its own
    os.chdir(directory)
    results = []
    for backend in backends:
        start(backend, rank, size, directory)
        results.append(program(*args))
        dist.destroy_process_group()
    return results


def _all_of(programs):
    return {program.__name__: _result_of(program) for program in programs}


def _result_of(program):
    """Return the result of a program, or its error as text; the programs after it go on."""
    try:
        return program()
    except Exception:
        return f"{dist.get_backend()}: {traceback.format_exc()}"
