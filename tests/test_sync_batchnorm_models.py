"""SyncBatchNorm in models: conversion, training, and what goes wrong between ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import phalanx as dist
from phalanx.parallel.batchnorm import SyncBatchNorm
from phalanx.testing import run_ranks

CHANNELS = 3


class Own(nn.BatchNorm2d):
    """What people derive from torch's layers."""


def network():
    norm = nn.BatchNorm1d(4)
    return nn.ModuleDict(
        {
            "first": nn.Sequential(nn.Linear(4, 4), norm, nn.ModuleList([nn.BatchNorm3d(2)])),
            "again": norm,
            "own": Own(3, eps=0.1, momentum=None, affine=False),
            "synced": nn.SyncBatchNorm(3, track_running_stats=False),
            "instance": nn.InstanceNorm1d(3),
        }
    )


def test_conversion_keeps_everything():
    model = network()
    model["own"].eval()
    model["own"].qconfig = "a config"
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    keys = list(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == keys
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert now.keys() == tensors.keys()
    assert all(now[name] is tensors[name] for name in now)
    kinds = {name: type(module) for name, module in model.named_modules()}
    synced = {name for name, kind in kinds.items() if kind is SyncBatchNorm}
    assert synced == {"first.1", "first.2.0", "own", "synced"}
    assert kinds["instance"] is nn.InstanceNorm1d
    assert model["again"] is model["first"][1]
    own = model["own"]
    assert (own.training, own.eps, own.momentum, own.affine) == (False, 0.1, None, False)
    assert own.qconfig == "a config"
    assert model["first"][1].training


def test_conversion_of_a_layer_itself():
    layer = nn.BatchNorm2d(3, dtype=torch.float64)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(converted) is SyncBatchNorm
    assert converted.weight is layer.weight
    assert isinstance(converted, nn.modules.batchnorm._BatchNorm)
    linear = nn.Linear(2, 2)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear


def test_conversion_passes_the_group_on():
    def body():
        group = dist.new_group([0])
        model = SyncBatchNorm.convert_sync_batchnorm(network(), group)
        assert model["first"][2][0].process_group is group
        again = SyncBatchNorm.convert_sync_batchnorm(model)
        assert again["first"][2][0].process_group is None

    run_ranks(body, 2)


def test_lazy_layers_are_refused_by_name():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"0 is a LazyBatchNorm1d.*run one batch"):
        SyncBatchNorm.convert_sync_batchnorm(model)
    model(torch.ones(2, 3))
    assert type(SyncBatchNorm.convert_sync_batchnorm(model)[0]) is SyncBatchNorm


def test_state_moves_between_plain_and_synced():
    plain = nn.BatchNorm2d(3)
    nn.init.uniform_(plain.weight)
    synced = SyncBatchNorm(3)
    synced.load_state_dict(plain.state_dict())
    again = pickle.loads(pickle.dumps(synced))
    assert torch.equal(again.weight, plain.weight)
    assert repr(again).startswith("SyncBatchNorm(3, eps=1e-05")


def test_a_backward_that_not_all_ranks_do_is_reported():
    def body():
        layer = SyncBatchNorm(CHANNELS)
        y = layer(torch.randn(4, CHANNELS, requires_grad=True))
        following = y.sum().backward if dist.get_rank() == 0 else dist.barrier
        with pytest.raises(dist.CollectiveMismatch) as caught:
            following()
        return str(caught.value)

    for text in run_ranks(body, 2):
        assert "all_reduce" in text
        assert "barrier" in text
        assert text.count("test_sync_batchnorm_models.py") >= 2


def test_a_rank_that_ends_before_its_backward_is_reported():
    def body():
        layer = SyncBatchNorm(CHANNELS)
        y = layer(torch.randn(4, CHANNELS, requires_grad=True))
        if dist.get_rank() == 0:
            with pytest.raises(dist.PeerFailed, match="rank 1"):
                y.sum().backward()

    run_ranks(body, 2)


def test_channels_that_differ_between_ranks_are_reported():
    def body():
        channels = 3 + dist.get_rank()
        with pytest.raises(dist.CollectiveMismatch, match=r"float64\[7\]"):
            SyncBatchNorm(channels)(torch.ones(2, channels))

    run_ranks(body, 2)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
    )


def optimize(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).sin().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_under_distributed_data_parallel_ranks_train_one_model():
    batch = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(0))

    def body():
        model = SyncBatchNorm.convert_sync_batchnorm(convolutional())
        ddp = dist.DistributedDataParallel(model)
        optimize(ddp, batch[2 * dist.get_rank() :][:2])
        return model.state_dict()

    expected = optimize(convolutional(), batch)
    for state in run_ranks(body, 3):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def _compiled() -> list[torch.Tensor]:
    model = SyncBatchNorm.convert_sync_batchnorm(convolutional())
    copied = copy.deepcopy(model)
    x = torch.randn(2 + dist.get_rank(), 1, 6, 6)
    torch.compile(model, backend="eager")(x).sin().sum().backward()
    copied(x).sin().sum().backward()
    pairs = zip(
        [*model.state_dict().values(), *(p.grad for p in model.parameters())],
        [*copied.state_dict().values(), *(p.grad for p in copied.parameters())],
        strict=True,
    )
    return [a - b for a, b in pairs]


def test_in_a_compiled_model():
    for differences in run_ranks(_compiled, 2, ranks="processes"):
        assert not any(difference.any() for difference in differences)


def _train_a_network() -> list[torch.Tensor]:
    torch.set_num_threads(1)  # how torch divides its sums depends on it
    model = SyncBatchNorm.convert_sync_batchnorm(convolutional())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(2 + dist.get_rank(), 1, 6, 6, generator=generator)
        model(x).square().sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.01 * p.grad
            p.grad = None
    return [t.detach() for t in model.state_dict().values()]


def test_threads_and_processes_agree_to_the_bit():
    threads = run_ranks(_train_a_network, 2)
    processes = run_ranks(_train_a_network, 2, ranks="processes")
    for result in (*threads[1:], *processes):
        assert all(torch.equal(a, b) for a, b in zip(result, threads[0], strict=True))
