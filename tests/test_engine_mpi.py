"""Groups on MPI, under the mpirun of every MPI that can be found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx as dist
from phalanx import extras, world
from phalanx.bench.peers import environment_of_ranks, mpi
from phalanx.stores import over_mpi

# Beside this Python, and at further prefixes that are named, with a colon between them.
PREFIXES = [sys.prefix, *filter(None, os.environ.get("PHALANX_MPI_PREFIXES", "").split(":"))]


# Launchers mix what ranks print at the same time, within lines too: each writes to its own file.
PRINT = """
import os

def print(*words):
    with open(f"{os.environ['SAID']}/{os.getpid()}", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")
"""


@pytest.fixture(params=PREFIXES)
def mpirun(request, program, tmp_path):
    """Run a program on ranks of an MPI: ``mpirun(source, size)`` returns what they have printed."""
    said = tmp_path / "said"
    said.mkdir()
    peer = mpi(Path(request.param))
    if peer.missing:
        pytest.skip(f"no MPI in {request.param}: {peer.missing}")

    def run(source, size, fails=False):
        done = subprocess.run(
            [*peer.launcher, "-n", str(size), peer.python, str(program(PRINT + source))],
            env={
                **environment_of_ranks(),
                "OMP_NUM_THREADS": "1",
                "SAID": str(said),
                **peer.environment,
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return sorted(line for file in said.iterdir() for line in file.read_text().splitlines())

    return run


CONTRACT = """
import torch
import phalanx as dist
from phalanx import world
from phalanx.testing.backend_kit import check_endings, check_group

dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
check_group(world.here().default.backend)
if size > 1:
    pair = dist.new_group([0, 2])
    if rank != 1:
        check_group(pair.backend)
    check_endings(lambda: dist.new_group().backend)
dist.barrier()  # other groups have not suffered
dist.destroy_process_group()
dist.init_process_group("mpi")  # and again
print(dist.get_backend(), rank, size)
"""

WHOLE = """
pair = dist.new_group([0, 2])
mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
found = [None, None]
if rank != 1:
    dist.all_gather_object(found, rank, group=pair)
model = dist.DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
model(torch.full((1, 4), float(rank))).sum().backward()
gradient = model.module.weight.grad.unique().item()
try:
    dist.all_reduce(torch.ones(3 if rank else 4), group=mesh.get_group())
except dist.CollectiveMismatch as error:
    print(rank, found, gradient, "rank 0: all_reduce(SUM, float32[4])" in str(error))
"""


def test_mpi_keeps_the_contract_on_one_rank(mpirun):
    assert mpirun(CONTRACT, 1) == ["mpi 0 1"]


def test_everything_runs_on_mpi(mpirun):
    """Programs take seconds to start: what three ranks show, they show in one."""
    assert mpirun(CONTRACT + WHOLE, 3) == [
        "0 [0, 2] 1.0 True",
        "1 [None, None] 1.0 True",
        "2 [0, 2] 1.0 True",
        *(f"mpi {rank} 3" for rank in range(3)),
    ]


MEETINGS = """
import os, sys
import phalanx as dist

def meet(step, *args, **kwargs):
    dist.init_process_group(*args, **kwargs)
    dist.barrier()
    print(step, dist.get_backend(), dist.get_rank(), "mpi4py" in sys.modules)
    dist.destroy_process_group()

meet("usual")
# The launcher's variables say that each machine has one rank.
os.environ.update(OMPI_COMM_WORLD_LOCAL_SIZE="1", MPI_LOCALNRANKS="1")
meet("several machines", "gloo")
meet("asked for", init_method="mpi://")
"""


def test_ranks_of_other_backends_meet_under_mpirun(mpirun):
    assert mpirun(MEETINGS, 2) == [
        "asked for phalanx 0 True",
        "asked for phalanx 1 True",
        "several machines gloo 0 True",
        "several machines gloo 1 True",
        "usual phalanx 0 False",
        "usual phalanx 1 False",
    ]


def test_a_rank_that_raises_is_told_of(mpirun):
    source = "import phalanx as dist\ndist.init_process_group('mpi')\n"
    source += "if dist.get_rank(): raise ValueError('enough')\n"
    source += (
        "try: dist.barrier()\nexcept dist.PeerFailed as error: print('enough' in str(error))\n"
    )
    said = mpirun(source, 2, fails=True)
    assert said in (["True"], [])  # mpirun may end rank 0 before it has printed


def test_mpi_may_serve_only_one_thread(mpirun):
    source = "import mpi4py\nmpi4py.rc.thread_level = 'single'\nfrom mpi4py import MPI\n"
    source += "import phalanx as dist\n"
    source += "print(MPI.Query_thread() < MPI.THREAD_SERIALIZED)\n"
    source += "try: dist.init_process_group('mpi')\nexcept dist.DistBackendError as e: print(e)\n"
    said = mpirun(source, 1)
    if "True" in said:
        assert any("thread_level" in line for line in said)
    else:
        assert said == ["False"]  # an MPI that gives more than it is asked for


def test_what_is_missing_for_mpi_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(extras.MissingExtra, match=r'pip install "phalanx\[mpi\]"'):
        over_mpi.mpi()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with world.bind(world.Slot()), pytest.raises(extras.MissingExtra, match="mpi4py"):
        dist.init_process_group("mpi")


def test_mpi_knows_ranks_by_itself():
    with pytest.raises(ValueError, match="MPI says"):
        next(dist.rendezvous("mpi://", rank=0, world_size=1))
