"""Programs that ask torch for Gloo and get Phalanx."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import run_torch

import phalanx
import phalanx_autoload
from phalanx.errors import DistError

SIZE = 2


@pytest.fixture(autouse=True)
def _replaced(monkeypatch):
    monkeypatch.setenv("PHALANX_REPLACE", "gloo")


def total(group=None):
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def served(group):
    """Return who serves a group, and what torch says of it."""
    return group.name(), dist.get_backend(group), dist.get_backend_config(group)


def _default_group():
    return served(dist.group.WORLD), total(), phalanx.get_world_size()


@pytest.mark.parametrize(
    ("asked", "said", "config"),
    [
        (None, "undefined", "cpu:gloo"),
        ("gloo", "gloo", "cpu:gloo"),
        ("GLOO", "gloo", "cpu:gloo"),
        ("cpu:gloo", "cpu:gloo", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo"),
        ("phalanx", "phalanx", "cpu:phalanx"),
    ],
)
def test_the_default_group(asked, said, config):
    for result in run_torch(_default_group, SIZE, backend=asked):
        assert result == (("phalanx", said, config), 3, SIZE)


def _other_groups():
    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("a", "b"))
    override = init_device_mesh(
        "cpu", (SIZE, 1), mesh_dim_names=("a", "b"), backend_override={"a": "gloo"}
    )
    groups = {
        "new": dist.new_group(),
        "named": dist.new_group([0, 1], backend="gloo"),
        "per device": dist.new_group(backend="cpu:gloo"),
        "split": dist.split_group(dist.group.WORLD, [[0, 1]]),
        "mesh": mesh.get_group("a"),
        "part of mesh": mesh.get_group("b"),
        "overridden": override.get_group("a"),
        "subgroups": dist.new_subgroups(2)[0],
    }
    alone = dist.new_group([1], backend="gloo")
    if dist.get_rank() == 0:
        assert alone is dist.GroupMember.NON_GROUP_MEMBER
    else:
        groups["alone"] = alone
    totals = {name: total(group) for name, group in groups.items()}
    return {name: served(group) for name, group in groups.items()}, totals


def test_other_groups():
    for rank, (groups, totals) in enumerate(run_torch(_other_groups, SIZE, backend="gloo")):
        config = "cpu:gloo"
        assert groups.pop("per device") == ("phalanx", "cpu:gloo", config)
        assert set(groups.values()) == {("phalanx", "gloo", config)}
        for alone in ("part of mesh", "alone"):
            assert totals.pop(alone, rank + 1) == rank + 1
        assert set(totals.values()) == {3}


def _as_torch_sees_it():
    group = dist.group.WORLD
    dist.monitored_barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33), group)
    shrunk = dist.shrink_group([1]) if dist.get_rank() == 0 else None
    return (
        group._get_backend_name(),
        [device.type for device in group._device_types],
        group.options._timeout,
        shrunk and served(shrunk),
    )


def test_functions_for_torchs_own_backends_serve_it():
    first, second = run_torch(_as_torch_sees_it, SIZE, backend="gloo")
    seen = ("gloo", ["cpu"], timedelta(seconds=33))
    assert first == (*seen, ("phalanx", "gloo", "cpu:gloo"))
    assert second == (*seen, None)


def _without_the_variable():
    del os.environ["PHALANX_REPLACE"]
    group = dist.new_group(backend="gloo")
    return served(group), total(group)


def test_it_is_over_without_the_variable():
    for result in run_torch(_without_the_variable, SIZE, backend="gloo"):
        assert result == (("gloo", "gloo", "cpu:gloo,cuda:gloo"), 3)


def _options():
    plain = dist.new_group(backend="gloo", pg_options=dist.ProcessGroupGloo._Options())
    with pytest.raises(DistError) as caught:
        dist.new_group(backend="cpu:gloo,cuda:nccl", pg_options=object())
    return plain.name(), str(caught.value)


def test_options_of_other_backends_are_refused():
    for name, error in run_torch(_options, SIZE, backend="gloo"):
        assert name == "phalanx"
        for fact in ("gloo cannot be replaced", "cpu:gloo,cuda:nccl", "PHALANX_REPLACE=gloo"):
            assert fact in error


@pytest.mark.parametrize("name", ["nccl", "foo", "gloo,nccl", "GLOO"])
def test_other_backends_cannot_be_replaced(name, monkeypatch):
    with pytest.raises(ValueError, match=f"'{name}'.*known: gloo"):
        phalanx_autoload.check_replaceable(name)
    monkeypatch.setenv("PHALANX_REPLACE", name)
    with pytest.raises(SystemExit, match=f"PHALANX_REPLACE={name}: .*known: gloo"):
        phalanx_autoload.register()


def run_python(code, *launcher):
    source = Path(phalanx.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *launcher, *([] if launcher else ["-c"]), code],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_wrong_name_ends_the_program_as_it_imports_torch(monkeypatch):
    monkeypatch.setenv("PHALANX_REPLACE", "nccl")
    done = run_python("import torch\nprint('here')")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "'nccl'" in done.stderr


# Names are taken from torch before and after the package is there, and before the first group.
PROGRAM = """
from torch.distributed import all_reduce, init_process_group, monitored_barrier, split_group
from torch.distributed.distributed_c10d import _set_pg_timeout
{first}
import torch.distributed as dist
from datetime import timedelta
import torch

init_process_group()
group = dist.group.WORLD
monitored_barrier()
_set_pg_timeout(timedelta(seconds=33), group)
part = split_group(group, [[0, 1]])
tensor = torch.ones(1)
all_reduce(tensor, group=part)
print(group.name(), part.name(), group.options._timeout, tensor.item())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("first", ["", "import phalanx.world"])
def test_the_order_of_imports_does_not_matter(tmp_path, first):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(first=first))
    launcher = "-m", "phalanx", "run", "-n", "2"
    done = run_python(str(program), *launcher)
    assert done.returncode == 0, done.stderr
    for rank in range(SIZE):
        assert f"[rank {rank}] phalanx phalanx 0:00:33 2.0" in done.stdout, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "replaced" in line]
    assert line.startswith("[rank 0] phalanx: gloo is replaced by phalanx")
