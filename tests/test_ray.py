"""Ranks that are actors of a Ray cluster."""

import importlib.util
import os
import sys
import time

import pytest
import torch

import phalanx as dist
from phalanx.errors import DistError, DistTimeout, PeerFailed
from phalanx.extras import MissingExtra
from phalanx.launch import on_ray

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='there is no Ray: pip install "phalanx[ray]"'
)


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    yield ray
    ray.shutdown()


def total(scale, *, more):
    values = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(values)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "COLOUR")
    return values.tolist(), more, *(os.environ[name] for name in names)


@needs_ray
def test_results_come_back_by_rank(cluster):
    env = {"COLOUR": "red"}
    assert dist.launch.ray(total, 2.0, more="x", num_workers=3, env=env) == [
        ([12.0] * 3, "x", str(rank), str(rank), "3", "3", "0", "red") for rank in range(3)
    ]


def in_torch():
    import torch.distributed as theirs

    theirs.init_process_group("gloo")
    values = torch.ones(1)
    theirs.all_reduce(values)
    dist.all_reduce(values)
    theirs.destroy_process_group()
    return values.item()


@needs_ray
def test_programs_of_torch_find_a_port_of_their_own(cluster):
    assert dist.launch.ray(in_torch, num_workers=2) == [4.0, 4.0]


class Unhappy(Exception):
    pass


def fail_on(rank):
    if dist.get_rank() == rank:
        raise Unhappy("this one fails")
    dist.barrier()


@needs_ray
def test_the_first_real_failure_is_raised(cluster):
    with pytest.raises(Unhappy, match="this one fails") as failed:
        dist.launch.ray(fail_on, 1, num_workers=2)
    notes = "\n".join(failed.value.__notes__)
    assert "raised by rank 1 of 2" in notes
    assert "in fail_on" in notes
    errors = dist.launch.ray(fail_on, 0, num_workers=2, return_exceptions=True)
    assert [type(error) for error in errors] == [Unhappy, PeerFailed]


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


@needs_ray
def test_a_rank_that_dies_is_named(cluster):
    with pytest.raises(DistError, match=r"rank 1 of 2 \(pid \d+ on host .*\) died") as failed:
        dist.launch.ray(die_on, 1, num_workers=2)
    assert "exited with code 3" in "\n".join(failed.value.__notes__)


@needs_ray
def test_a_deadline_ends_the_ranks(cluster):
    with pytest.raises(DistTimeout, match=r"ranks 0, 1 of 2 did not return within 0\.5 s"):
        dist.launch.ray(time.sleep, 1000, num_workers=2, backend=None, deadline=0.5)
    # All of it can be had again: nothing is left.
    assert dist.launch.ray(os.getppid, num_workers=3, backend=None)


@needs_ray
def test_a_cluster_that_is_too_small(cluster):
    with pytest.raises(DistTimeout, match=r"no place for 4 workers with 1 CPU each .*of 3 CPU"):
        dist.launch.ray(total, num_workers=4, placement_timeout=1)


def generator():
    return (each for each in [])


@needs_ray
def test_what_cannot_be_returned(cluster):
    with pytest.raises(TypeError, match=r"rank 0 could not .*'generator' object"):
        dist.launch.ray(generator, num_workers=1)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="num_workers to be at least 1, got 0"):
        dist.launch.ray(total, num_workers=0)
    with pytest.raises(ValueError, match=r"'NEAR' \(known: PACK, SPREAD"):
        dist.launch.ray(total, num_workers=1, placement_strategy="NEAR")


def test_what_is_missing_is_named(monkeypatch):
    def need(module, extra, purpose):
        raise MissingExtra(f"{purpose} {module} {extra}")

    monkeypatch.setattr(on_ray, "need", need)
    with pytest.raises(MissingExtra, match=r"phalanx.launch.ray ray ray"):
        dist.launch.ray(total, num_workers=1)
    with pytest.raises(AttributeError, match="no attribute 'roy'"):
        _ = dist.launch.roy
