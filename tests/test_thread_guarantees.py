"""Ranks that are threads keep every promise that processes keep, with the same outcome.

Each program is run on both, the results are compared bit by bit, and of errors the class and the
ranks, operations and lines that they name.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from models import batches, loss_of, mlp, own
from torch import nn

import phalanx as dist
from phalanx import functional
from phalanx.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.testing import run_ranks

SIZE = 4
PROGRAMS = {}
FAILURES = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def failure(function):
    FAILURES[function.__name__] = function
    return function


def mine(count=3):
    """Return this rank's tensor: one that sums differently in another order."""
    return torch.linspace(0.1, 1.7, count) / (dist.get_rank() + 3)


# What goes well


@program
def subgroups():
    low, odd = dist.new_group([0, 1, 2]), dist.new_group([3, 1])
    own_group, others = dist.new_subgroups(2)
    found = [dist.get_process_group_ranks(own_group), len(others)]
    for group in (low, odd, own_group):
        x = mine()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(x, group=group)
            found.append((dist.get_rank(group), dist.get_group_rank(group, dist.get_rank())))
        found.append(x.tolist())
    return found


@program
def split():
    part = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    x = mine()
    dist.all_reduce(x, group=part, op=dist.ReduceOp.AVG)
    return dist.get_process_group_ranks(part), x.tolist()


@program
def collectives():
    size, rank = dist.get_world_size(), dist.get_rank()
    x, parts = mine(8), [torch.zeros(8) for _ in range(size)]
    dist.all_gather(parts, x)
    dist.reduce(x, 2, dist.ReduceOp.PRODUCT)
    dist.broadcast(parts[1], 3)
    piece = torch.zeros(2)
    dist.reduce_scatter_single(piece, mine(8))
    exchanged = torch.zeros(8)
    dist.all_to_all_single(exchanged, mine(8))
    scattered = torch.zeros(8)
    dist.scatter(scattered, parts if rank == 1 else None, src=1)
    return [t.tolist() for t in (x, *parts, piece, exchanged, scattered)]


@program
def messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(mine() * tag, right, tag=tag) for tag in (1, 2)]
    second, first = torch.zeros(3), torch.zeros(3)
    sources = [dist.recv(second, left, tag=2), dist.recv(first, left, tag=1)]
    for work in works:
        work.wait()
    ops = [dist.P2POp(dist.isend, first, right), dist.P2POp(dist.irecv, second, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return sources, first.tolist(), second.tolist()


@program
def any_source():
    if dist.get_rank() != 0:
        dist.send(mine(), 0)
        return None
    found = []
    for _ in range(dist.get_world_size() - 1):
        x = torch.zeros(3)
        found.append((dist.recv(x), x.tolist()))
    return sorted(found)


@program
def works_and_futures():
    tensors = [mine(1000) * i for i in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    future = works[3].get_future().then(lambda done: done.value()[0].sum().item())
    found = [works[i].wait() for i in (2, 0, 1)]
    return found, future.wait(), [t.sum().item() for t in tensors], works[0].is_success()


@program
def coalesced():
    a, b, output = mine(), mine(5), torch.zeros(3 * dist.get_world_size())
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b, dist.ReduceOp.MAX)
        dist.all_gather_single(output, mine())
    manager.wait()
    return [t.tolist() for t in (a, b, output)]


@program
def functional_autograd():
    x = mine().requires_grad_()
    total = functional.all_reduce(x * x)
    gathered = torch.stack(functional.all_gather(x * 2))
    (total.sum() + (gathered * torch.arange(3)).sum()).backward()
    return total.tolist(), gathered.tolist(), x.grad.tolist()


@program
def mesh():
    made = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = [made.get_coordinate()]
    for name in ("dp", "tp"):
        x = mine()
        dist.all_reduce(x, group=made.get_group(name))
        found.append((made.get_local_rank(name), x.tolist()))
    return found


@program
def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody, got = [None] * size, [None]
    dist.all_gather_object(everybody, {"rank": rank, "text": "é" * rank})
    dist.scatter_object_list(got, [(i, "to") for i in range(size)] if rank == 2 else None, src=2)
    words = ["from", rank]
    dist.broadcast_object_list(words, src=1)
    gathered = [None] * size if rank == 3 else None
    dist.gather_object(words[:rank], gathered, dst=3)
    if rank == 0:
        dist.send_object_list([{"last": 1}], 1)
    elif rank == 1:
        dist.recv_object_list(got, 0)
    return everybody, got, words, gathered


# Training


def trained(model, steps=3, part=own, optimizers=None):
    optimizers = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    losses = []
    for batch in batches(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model(part(batch)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


@program
def ddp_with_buckets():
    model = dist.DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
    return trained(model)


@program
def ddp_without_sync():
    model = dist.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    for i, batch in enumerate(batches(4)):
        if i % 2 == 0:
            with model.no_sync():
                loss_of(model(own(batch))).backward()
        else:
            loss_of(model(own(batch))).backward()
    return [p.grad.tolist() for p in model.parameters()]


class Branches(nn.Module):
    """Uses one of two branches, and each rank another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        return self.branches[dist.get_rank() % 2](x)


@program
def ddp_with_unused_parameters():
    model = dist.DistributedDataParallel(Branches(), find_unused_parameters=True)
    loss_of(model(own(batches(1)[0]))).backward()
    return [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()]


@program
def ddp_with_hooks():
    found = []
    for state, hook in (
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ):
        model = dist.DistributedDataParallel(mlp(width=20), bucket_cap_mb=0.002)
        model.register_comm_hook(state, hook)
        found.append(trained(model))
    return found


@program
def ddp_with_dropout_and_batchnorm():
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.4), nn.Linear(12, 3))
    model = dist.DistributedDataParallel(dist.SyncBatchNorm.convert_sync_batchnorm(body))
    torch.manual_seed(dist.get_rank())
    return trained(model), [buffer.tolist() for buffer in model.buffers()]


@program
def join():
    model = dist.DistributedDataParallel(mlp())
    with model.join():
        for batch in batches(2 + dist.get_rank() % 3):
            loss_of(model(own(batch))).backward()
    return [p.grad.tolist() for p in model.parameters()]


@program
def zero():
    model = dist.DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return trained(model, optimizers=[optimizer])


@program
def shared_memory():
    x = dist.empty_shared(1000)
    x.copy_(mine(1000))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return dist.is_shared(x), x.tolist()


# What goes wrong. All ranks come back, and the group is as before.


@failure
def mismatch_of_shapes():
    dist.all_reduce(torch.ones(2 if dist.get_rank() == 1 else 3))


@failure
def mismatch_of_operations():
    if dist.get_rank() == 2:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


@failure
def mismatch_in_a_work():
    work = dist.all_reduce(torch.ones(2 + dist.get_rank() % 2), async_op=True)
    work.wait()


@failure
def deadlock():
    dist.recv(torch.empty(3), (dist.get_rank() + 1) % dist.get_world_size())


@failure
def deadlock_over_groups():
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="second")
    if rank < 2:
        for group in (first, second) if rank else (second, first):
            dist.all_reduce(torch.ones(1), group=group)
    raise dist.Deadlock("not concerned") if rank > 1 else AssertionError("no deadlock")


@failure
def message_of_another_size():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)
    raise dist.DistBackendError("it is for rank 1 to say")


@failure
def timeout():
    store, group = dist.group.WORLD.get_group_store(), dist.new_group([0, 3])
    if dist.get_rank() == 0:  # of a larger group others could be late as well
        group.set_timeout(0.2)
        try:
            dist.all_reduce(torch.ones(2), group=group)
        finally:
            store.set("timed out", "")
    store.wait(["timed out"])
    raise dist.DistTimeout("it is for rank 0 to say")


@failure
def a_missing_rank():
    store, group = dist.group.WORLD.get_group_store(), dist.new_group([0, 2])
    if dist.get_rank() == 0:
        try:
            dist.monitored_barrier(group, timeout=0.2, wait_all_ranks=True)
        finally:
            store.set("monitored", "")
    store.wait(["monitored"])
    raise dist.DistTimeout("it is for rank 0 to say")


@failure
def wrong_arguments():
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)


def facts(error):
    """Return the class of an error, and the ranks, operations and lines that it names."""
    text = re.sub(r"pid \d+", "", str(error))
    ranks = re.findall(r"\branks? (\d[\d, -]*)", text, re.IGNORECASE)
    operations = re.findall(r"\b[a-z_]+ #\d+", text)
    lines = re.findall(r"\btest_\w+\.py:\d+(?: in \w+)?", text)
    return (
        type(error).__name__,
        sorted({r.strip(", -") for r in ranks}),
        sorted({*operations, *lines}),
    )


# All in one world of each kind: processes take a while to start.


def run_all():
    torch.set_num_threads(1)  # how torch divides its sums depends on it
    found = {}
    for name, function in PROGRAMS.items():
        torch.manual_seed(0)
        found[name] = function()
    for name, function in FAILURES.items():
        try:
            function()
        except (dist.DistError, ValueError, TypeError) as error:
            found[name] = facts(error)
        # In the store: a rank in a barrier could be part of the next deadlock.
        dist.group.WORLD.get_group_store().barrier(f"after {name}", SIZE)
    return found


@functools.cache
def outcomes(ranks):
    return run_ranks(run_all, SIZE, ranks=ranks, timeout=120, group_timeout=60)


@pytest.mark.parametrize("name", [*PROGRAMS, *FAILURES])
def test_threads_do_what_processes_do(name):
    for rank, (threads, processes) in enumerate(
        zip(outcomes("threads"), outcomes("processes"), strict=True)
    ):
        assert threads[name] == processes[name], f"rank {rank}"


CLASSES = {
    "mismatch_of_shapes": ["CollectiveMismatch"] * 4,
    "mismatch_of_operations": ["CollectiveMismatch"] * 4,
    "mismatch_in_a_work": ["CollectiveMismatch"] * 4,
    "deadlock": ["Deadlock"] * 4,
    "deadlock_over_groups": ["Deadlock"] * 4,
    "timeout": ["DistTimeout"] * 4,
    "a_missing_rank": ["DistTimeout"] * 4,
}


@pytest.mark.parametrize("name", CLASSES)
def test_threads_name_who_and_where(name):
    told = [outcome[name] for outcome in outcomes("threads")]
    assert [kind for kind, *_ in told] == CLASSES[name]
    concerned = [each for each in told if each[1]]
    assert concerned
    if name != "a_missing_rank":
        assert any(f" in {name}" in place for _, _, places in concerned for place in places)


# The failure of a rank ends the world, so each has one of its own.


def raises():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    dist.all_reduce(torch.ones(2))


def leaves():
    if dist.get_rank() == 1:
        return
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("body", [raises, leaves])
def test_the_end_of_a_rank_is_told_alike(body):
    told = []
    for ranks in ("threads", "processes"):
        results = run_ranks(body, 3, ranks=ranks, return_exceptions=True)
        told.append([facts(each) if each is not None else None for each in results])
        assert all(isinstance(results[rank], dist.PeerFailed) for rank in (0, 2))
        assert all("rank 1" in str(results[rank]) for rank in (0, 2))
    assert told[0] == told[1]
