"""Ranks of torch.distributed for the tests: processes in a world of torch's."""

import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import run_ranks


def run_torch(fn, size, *args, backend="phalanx", timeout=60, return_exceptions=False):
    """Run ``fn(*args)`` on ranks that have called torch's init_process_group.

    Their working directory is one of the job alone, and empty at first.
    """
    results = run_torch_on([backend], fn, size, *args, timeout=timeout, patient=return_exceptions)
    return [result[0] if isinstance(result, list) else result for result in results]


def run_torch_on(backends, fn, size, *args, timeout=100, patient=False):
    """Do the same on several backends in turn; return by rank the list of results."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(
            _run,
            size,
            fn,
            directory,
            backends,
            args,
            ranks="processes",
            timeout=timeout,
            return_exceptions=patient,
        )


def _run(fn, directory, backends, args):
    rank, size = phalanx.get_rank(), phalanx.get_world_size()
    phalanx.destroy_process_group()  # there is no other world than torch's
    os.chdir(directory)
    results = []
    for index, backend in enumerate(backends):
        address = f"file://{directory}/store{index}"
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=50)
        )
        results.append(fn(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


class Outcomes:
    """What programs returned, all of them run in one start of processes.

    They run on Phalanx and, to compare, on Gloo, unless told otherwise.
    """

    def __init__(self, *programs, size=2, beside_gloo=True):
        backends = ["phalanx", "gloo"] if beside_gloo else ["phalanx"]
        self._by_rank = run_torch_on(backends, _all_of, size, programs)

    def of(self, program, rtol=0.0, atol=0.0):
        """Return by rank what a program returned on Phalanx, once it is what it was on Gloo.

        That is the same bit by bit with two ranks: two numbers can be added in one order only.
        """
        results = []
        for ours, theirs in self._both(program):
            for other in theirs:
                torch.testing.assert_close(ours, other, rtol=rtol, atol=atol)
            results.append(ours)
        return results

    def equal(self, program):
        """Do the same for results that are no tensors."""
        results = []
        for ours, theirs in self._both(program):
            for other in theirs:
                assert ours == other
            results.append(ours)
        return results

    def _both(self, program):
        """Yield for each rank the result on Phalanx and those on others, if there are no errors."""
        for rank, on_backends in enumerate(self._by_rank):
            ours, *theirs = (outcomes[program.__name__] for outcomes in on_backends)
            for result in (ours, *theirs):
                assert not isinstance(result, str), f"on rank {rank}:\n{result}"
            yield ours, theirs


def _all_of(programs):
    return {program.__name__: _result_of(program) for program in programs}


def _result_of(program):
    """Return the result of a program, or its error as text; the programs after it go on."""
    try:
        return program()
    except Exception:
        return f"{dist.get_backend()}: {traceback.format_exc()}"
