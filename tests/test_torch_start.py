"""How jobs on the backend start and end, and what else may be used beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import run_torch, run_torch_on

import phalanx

SIZE = 2


def total(group=None):
    """Return the sum of the ranks of a group, each plus one."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _again_on_one_store():
    rank, path = dist.get_rank(), Path.cwd() / "again"
    dist.destroy_process_group()
    store = dist.FileStore(str(path), SIZE)
    results = []
    for _ in range(3):
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=SIZE)
        results += [total(), total(dist.new_group([0, 1]))]
        dist.destroy_process_group()
    return results


def test_groups_come_and_go_on_one_store():
    for results in run_torch(_again_on_one_store, SIZE):
        assert results == [3] * 6


def test_one_rank_on_a_store_in_memory():
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert total() == 1
        assert phalanx.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert not phalanx.is_initialized()


def _on_tcp(rank, port, results):
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=SIZE)
    results.put(total())
    dist.destroy_process_group()


def test_ranks_started_by_torch_meet_in_a_tcp_store():
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_on_tcp, args=(server.port, results), nprocs=SIZE)
    assert [results.get() for _ in range(SIZE)] == [3, 3]


PROGRAM = """
import atexit, pathlib, time
import torch, torch.distributed as dist

told = pathlib.Path("told")

def wait_for_the_other():  # the launcher ends it once this process has ended
    limit = time.monotonic() + 60
    while rank == 1 and not told.exists() and time.monotonic() < limit:
        time.sleep(0.01)

atexit.register(wait_for_the_other)
dist.init_process_group("phalanx")
rank = dist.get_rank()
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
assert tensor.item() == 3
if rank == 1:
    raise ArithmeticError("rank 1 has had enough")
try:
    dist.all_reduce(tensor)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    told.touch()
    raise
"""


def test_a_launched_program_needs_no_import_and_its_failure_is_recorded(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    source = Path(phalanx.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source), "PHALANX_FLIGHT_RECORDER": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode != 0
    line = 1 + PROGRAM.splitlines().index("    dist.all_reduce(tensor)")
    for fact in ("PeerFailed", f"program.py:{line}", "rank 1 has had enough"):
        assert fact in done.stdout, done.stderr
    (record,) = tmp_path.glob("phalanx-flight-rank0-*.json")
    assert "rank 1 has had enough" in record.read_text()


def _engines():
    group = dist.group.WORLD
    engine = group._get_backend(torch.device("cuda"))
    assert engine is group._get_backend(torch.device("cuda"))
    assert group._get_backend(torch.device("cpu")) is group
    tensor = torch.tensor([dist.get_rank() + 1.0])  # what Gloo does not mind
    engine.allreduce([tensor]).wait()
    return (
        type(engine).__name__,
        tensor.item(),
        total(),
        sorted(d.type for d in group._device_types),
    )


def test_other_devices_have_engines_of_their_own():
    names = "cpu:phalanx,cuda:gloo", "cuda:gloo,cpu:phalanx"
    for results in run_torch_on(names, _engines, SIZE):
        assert results == [("ProcessGroupGloo", 3, 3, ["cpu", "cuda"])] * 2


def _beside():
    ours, theirs = dist.new_group(backend="phalanx"), dist.new_group(backend="gloo")
    alone = dist.new_group([1], backend="phalanx")
    results = [total(), total(ours), total(theirs), total(ours)]
    if dist.get_rank() == 1:
        results.append(total(alone))
    dist.destroy_process_group(ours)
    results.append(total())
    return results, [dist.get_backend(group) for group in (None, theirs)]


def test_groups_of_several_backends_in_one_job():
    for rank, results in enumerate(run_torch_on(["phalanx", "gloo"], _beside, SIZE)):
        totals = [3, 3, 3, 3, 2, 3] if rank == 1 else [3] * 5
        assert results == [(totals, ["phalanx", "gloo"]), (totals, ["gloo", "gloo"])]


def _both_vocabularies():
    tensor = torch.tensor([phalanx.get_rank() + 1.0])
    phalanx.all_reduce(tensor)
    part = phalanx.new_group([1, 0])
    phalanx.all_reduce(tensor, group=part)
    group = dist.new_group([0, 1])
    phalanx.all_reduce(tensor, group=group.inner)
    return tensor.item(), total(), phalanx.get_world_size()


def test_both_vocabularies_in_one_program():
    for result in run_torch(_both_vocabularies, SIZE):
        assert result == (12, 3, SIZE)


def normed(sync):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    return phalanx.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model


def trained(model, ranks):
    generators = [torch.Generator().manual_seed(rank) for rank in ranks]
    inputs = torch.cat([torch.randn(4, 6, generator=generator) for generator in generators])
    model(inputs).square().mean().backward()
    return [p.grad for p in model.parameters()]


def _phalanx_layers_in_torchs_model():
    return trained(DistributedDataParallel(normed(True)), [dist.get_rank()])


def test_batch_norm_of_phalanx_in_a_model_of_torch():
    # Torch's own SyncBatchNorm is for GPUs.
    expected = trained(normed(False), range(SIZE))
    for gradients in run_torch(_phalanx_layers_in_torchs_model, SIZE):
        torch.testing.assert_close(gradients, expected)
