"""The final proof: two ranks that really reduce something, as threads and as processes.

Each runs in a process of its own, so that whatever goes wrong there can be told and ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phalanx
from phalanx.debug.text import duration
from phalanx.doctor.findings import Host, Said, good, problem

DEADLINE = 60.0  # seconds, on a machine that is very busy
_SIZE = 2
_PR_SET_PDEATHSIG = 1


def threads(host: Host) -> Iterator[Said]:
    """Let two ranks that are threads reduce a tensor."""
    yield _outcome("threads")


def processes(host: Host) -> Iterator[Said]:
    """Let two ranks that are processes reduce a tensor."""
    yield _outcome("processes")


def _outcome(kind: str) -> Said:
    # The same package, also where it is a source tree.
    source = str(Path(phalanx.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx.doctor.proof", kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        try:
            output, errors = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
            return _failed(kind, f"no result within {DEADLINE:g} s")
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line.strip()]
        return _failed(kind, output or [*lines, f"exit code {process.returncode}"][-1])
    seconds = float(output)
    took = duration(time.monotonic() - start)
    return good(
        f"all_reduce on {_SIZE} ranks as {kind} is right; {seconds * 1e6:.1f} µs for one number, "
        f"{took} with the start of Python"
    )


def _failed(kind: str, why: str) -> Said:
    return problem(
        f"all_reduce on {_SIZE} ranks as {kind} failed: {why}",
        f"mend the problems above first; all that it says: {Path(sys.executable).name} -m "
        f"phalanx.doctor.proof {kind}",
    )


def work() -> float:
    """Reduce a few numbers, check them, and return how many seconds one reduction takes."""
    dist: Any = phalanx
    import torch

    large = torch.full((10_000,), float(dist.get_rank() + 1))
    dist.all_reduce(large)
    expected = float(sum(range(1, _SIZE + 1)))
    if not bool((large == expected).all()):
        raise ArithmeticError(f"the sum is {large[large != expected][0]:g}, not {expected:g}")
    one, rounds = torch.ones(1), 200
    for _ in range(rounds):
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
    return (time.perf_counter() - start) / rounds


def main(kind: str) -> None:
    from phalanx.doctor.proof import work  # under the name by which processes can import it
    from phalanx.launch.processes import run_processes
    from phalanx.launch.threads import run_threads

    # Whoever asked may be killed: nothing goes on without it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    run: Any = run_threads if kind == "threads" else run_processes
    try:
        print(min(run(work, _SIZE, timeout=20.0, deadline=50.0)))
    except Exception as error:
        text = str(error).partition("\n")[0]
        print(f"{type(error).__name__}: {text}", end="", flush=True)  # the rest goes to stderr
        raise


if __name__ == "__main__":
    main(sys.argv[1])
