"""Launchers of clusters, on several hosts: every rank finds the others by what it is told."""

import os
import sys
from pathlib import Path

import pytest
from hosts import needs_hosts

import phalanx
from phalanx.bench.peers import mpi
from phalanx.testing.hosts import HostError, Hosts

pytestmark = needs_hosts

PYTHON = sys.executable
SOURCE = str(Path(phalanx.__file__).parents[1])
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
# Beside this Python, and at further prefixes that are named, with a colon between them.
PREFIXES = [sys.prefix, *filter(None, os.environ.get("PHALANX_MPI_PREFIXES", "").split(":"))]

PROGRAM = """
import os, sys, torch, phalanx as dist
dist.init_process_group(timeout=60)
values = torch.ones(10)
dist.all_reduce(values)
if sys.argv[1:] and dist.get_rank() == 3 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os._exit(7)
dist.all_reduce(values)
said = f"sum {values[0].item():g} on {os.uname().nodename}, rank {dist.get_rank()}\\n"
dist.destroy_process_group()
os.write(1, said.encode())
"""
SAID = [f"sum 16 on host{rank // 2}, rank {rank}" for rank in range(4)]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def agents(hosts, options, words):
    """Start an agent of torchrun on each host."""
    return [
        host.start(
            [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            + [option.format(host.number) for option in options]
            + words,
            env=ENV,
        )
        for host in hosts
    ]


def torchrun(hosts, options, words):
    """Return what all ranks have printed."""
    started = agents(hosts, options, words)
    return sorted(line for agent in started for line in agent.check(100).stdout.splitlines())


IN_TORCH = """
import os, torch, torch.distributed as dist
import phalanx.torch_backend
dist.init_process_group("phalanx")
values = torch.ones(10)
dist.all_reduce(values)
dist.all_reduce(values)
said = f"sum {values[0].item():g} on {os.uname().nodename}, rank {dist.get_rank()}\\n"
dist.destroy_process_group()
os.write(1, said.encode())
"""


STATIC = ["--node-rank={}", "--master-addr=host0", "--master-port=29400"]
ELASTIC = ["--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=job"]


@pytest.mark.parametrize("names", ["all", "loopback"])
def test_torchrun(program, names):
    with Hosts(2, shared=[program.parent], names=names) as hosts:
        assert torchrun(hosts, STATIC, [program]) == SAID


@pytest.mark.parametrize("options", [STATIC, ELASTIC], ids=["static", "elastic"])
def test_torchrun_starts_programs_of_torch(tmp_path, options):
    program = tmp_path / "program.py"
    program.write_text(IN_TORCH)
    with Hosts(2, shared=[tmp_path]) as hosts:
        assert torchrun(hosts, options, [program]) == SAID


def test_torchrun_behind_a_firewall(tmp_path):
    """Ranks reach the agent's store, and not that of rank 0."""
    program = tmp_path / "program.py"
    program.write_text(f"from phalanx.stores import arrival\narrival._SILENT = 5\n{PROGRAM}")
    with Hosts(2, shared=[tmp_path]) as hosts:
        hosts.firewall([29400])
        with pytest.raises(HostError) as failed:
            agents(hosts, STATIC, [program])[1].check(100)
    for fact in ("on host 'host1' has not reached rank 0", "10.77.0.1:", "does not answer"):
        assert fact in str(failed.value)


def test_torchrun_starts_ranks_again(program, tmp_path):
    """The ranks of one agent are told of another number of restarts than those of the other."""
    options = [*ELASTIC, "--max-restarts=2"]
    with Hosts(2, shared=[tmp_path]) as hosts:
        assert torchrun(hosts, options, [program, tmp_path / "has-failed"]) == SAID
    assert (tmp_path / "has-failed").exists()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_mpirun(program, prefix):
    peer = mpi(Path(prefix))
    if peer.missing:
        pytest.skip(f"no MPI in {prefix}: {peer.missing}")
    with Hosts(2, shared=[program.parent, prefix]) as hosts:
        if peer.name == "openmpi":
            words = ["--host", "host0:2,host1:2", "--mca", "plm_ssh_agent", hosts.remote_shell()]
        else:
            words = ["-hosts", "host0:2,host1:2", "-launcher", "ssh"]
            words += ["-launcher-exec", hosts.remote_shell()]
        done = hosts[0].run(
            [*peer.launcher, *words, peer.python, program], env={**peer.environment, **ENV}
        )
    assert sorted(done.stdout.splitlines()) == SAID


def test_srun(program):
    """Slurm's variables, as it sets them for a step with two tasks on each of two nodes."""
    with Hosts(2, shared=[program.parent]) as hosts:
        tasks = []
        for rank in range(4):
            step = {
                "SLURM_PROCID": rank,
                "SLURM_LOCALID": rank % 2,
                "SLURM_JOB_ID": 4711,
                "SLURM_STEP_ID": 0,
                "SLURM_STEP_NUM_TASKS": 4,
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_STEP_NODELIST": "host[0-1]",
            }
            env = {**ENV, **{name: str(value) for name, value in step.items()}}
            tasks.append(hosts[rank // 2].start([PYTHON, program], env=env))
        assert sorted("".join(task.check(60).stdout for task in tasks).splitlines()) == SAID
