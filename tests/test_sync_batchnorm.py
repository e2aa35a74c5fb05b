"""SyncBatchNorm against torch's BatchNorm on the concatenated batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import phalanx as dist
from phalanx import functional as F
from phalanx.parallel.batchnorm import SyncBatchNorm
from phalanx.testing import run_ranks

CHANNELS = 3
SPACE = {2: (), 3: (70,), 4: (5, 4), 5: (2, 3, 2)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batches(sizes, dims=4, dtype=torch.float64, step=0):
    """Return a batch and the gradient of its output for each rank."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(2, size, CHANNELS, *SPACE[dims], generator=generator).mul_(3).add_(1).to(dtype)
        for size in sizes
    ]


def disturb(layer):
    """Give parameters values that matter."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(0.5, 2, len(p)))
    return layer


def train(layer, steps):
    """Return outputs, input gradients, parameter gradients and buffers after some steps."""
    outputs, gradients = [], []
    for x, grad in steps:
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(grad)
        outputs.append(y.detach())
        gradients.append(x.grad)
    of_parameters = [p.grad for p in layer.parameters()]
    return outputs, gradients, of_parameters, [b.clone() for b in layer.buffers()]


def check(sizes, dims=4, dtype=torch.float64, num_steps=2, **arguments):
    """Train SyncBatchNorm on ranks with these batch sizes; compare with one BatchNorm."""
    steps = [batches(sizes, dims, dtype, step) for step in range(num_steps)]

    def body():
        layer = disturb(SyncBatchNorm(CHANNELS, dtype=dtype, **arguments))
        return train(layer, [step[dist.get_rank()] for step in steps])

    results = run_ranks(body, len(sizes))
    whole = disturb(PLAIN[dims](CHANNELS, dtype=dtype, **arguments))
    expected = train(whole, [torch.cat(step, dim=1).unbind() for step in steps])
    for kind in (0, 1):  # outputs, input gradients
        for step in range(num_steps):
            ours = torch.cat([result[kind][step] for result in results])
            torch.testing.assert_close(ours, expected[kind][step])
    for i, gradient in enumerate(expected[2]):
        torch.testing.assert_close(sum(result[2][i] for result in results), gradient)
    for i, buffer in enumerate(expected[3]):
        for result in results:
            torch.testing.assert_close(result[3][i], buffer)
            assert torch.equal(result[3][i], results[0][3][i])


@pytest.mark.parametrize("dims", SPACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_batch_norm_of_the_whole(dims, dtype):
    check([3, 3], dims, dtype)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (1, 1), (2, 0, 3), (0, 0, 2)])
@pytest.mark.parametrize("dims", [2, 4])
def test_batches_of_different_sizes(sizes, dims):
    check(sizes, dims)


@pytest.mark.parametrize(
    "arguments",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
)
def test_arguments(arguments):
    check([2, 3], num_steps=3, **arguments)


def test_without_bias():
    layer = SyncBatchNorm(CHANNELS, bias=False)
    assert layer.bias is None
    assert "bias" not in layer.state_dict()
    run_ranks(lambda: copy.deepcopy(layer)(torch.randn(2, CHANNELS)).sum().backward(), 2)


def test_a_world_of_one_is_batch_norm_to_the_bit():
    steps = [batches([4], dtype=torch.float32, step=step)[0] for step in range(2)]
    (ours,) = run_ranks(lambda: train(disturb(SyncBatchNorm(CHANNELS)), steps), 1)
    theirs = train(disturb(nn.BatchNorm2d(CHANNELS)), steps)
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_world_is_batch_norm():
    steps = [batches([4], dtype=torch.float32)[0]]
    ours = train(SyncBatchNorm(CHANNELS), steps)
    theirs = train(nn.BatchNorm2d(CHANNELS), steps)
    assert torch.equal(ours[1][0], theirs[1][0])


def test_all_ranks_empty():
    def body():
        layer = SyncBatchNorm(CHANNELS)
        x = torch.empty(0, CHANNELS, 4, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.equal(layer.running_var, torch.ones(CHANNELS))
        assert layer.weight.grad.tolist() == [0] * CHANNELS

    run_ranks(body, 2)


@pytest.mark.parametrize("sizes", [(1, 0), (0, 1)])
def test_one_value_in_all_is_refused_on_all_ranks(sizes):
    def body():
        layer = SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match=r"more than 1 value per channel.*all 2 ranks"):
            layer(torch.ones(sizes[dist.get_rank()], CHANNELS))
        assert layer.num_batches_tracked == 0
        dist.barrier()

    run_ranks(body, 2)


def test_one_value_in_a_world_of_one_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(CHANNELS)(torch.ones(1, CHANNELS))


@pytest.mark.parametrize(
    ("x", "fact"),
    [
        (torch.ones(4), "1D"),
        (torch.ones(4, 0), "non-zero"),
        (torch.ones(4, CHANNELS + 1), "4 channels.*running_mean is for 3"),
        (torch.ones(4, CHANNELS, dtype=torch.int64), "int64"),
        (torch.ones(4, CHANNELS, device="meta"), "cpu"),
    ],
)
def test_bad_inputs_are_refused_before_the_exchange(x, fact):
    def body():
        before = dist.group.WORLD.sequence_number()
        with pytest.raises(ValueError, match=fact):
            SyncBatchNorm(CHANNELS)(x)
        assert dist.group.WORLD.sequence_number() == before

    run_ranks(body, 2)


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_a_mean_far_from_zero_costs_no_accuracy(dims):
    parts = [0.1 * part[0] + 1e4 for part in batches([20, 30], dims, torch.float32)]

    def body():
        layer = SyncBatchNorm(CHANNELS, momentum=1.0)
        layer(parts[dist.get_rank()])
        return layer.running_mean, layer.running_var

    whole = torch.cat(parts).double().transpose(0, 1).flatten(1)
    for mean, var in run_ranks(body, 2):
        torch.testing.assert_close(mean.double(), whole.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(var.double(), whole.var(1), rtol=1e-3, atol=0)


def test_constant_channels_have_no_variance():
    def body():
        layer = SyncBatchNorm(CHANNELS, momentum=1.0)
        y = layer(torch.full((2, CHANNELS, 10, 10), 7.0))
        assert torch.equal(y, torch.zeros_like(y))
        assert torch.equal(layer.running_var, torch.zeros(CHANNELS))

    run_ranks(body, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["float", "half"])
@pytest.mark.parametrize("sizes", [(3, 5), (4, 0)])
def test_halves(dtype, parameters, sizes):
    parts = batches(sizes, dtype=dtype)

    def body():
        layer = disturb(SyncBatchNorm(CHANNELS))
        layer = layer.to(dtype) if parameters == "half" else layer
        (y,), (of_input,), gradients, _ = train(layer, [parts[dist.get_rank()]])
        kept = dtype if parameters == "half" else torch.float32
        assert y.dtype == of_input.dtype == dtype
        assert [g.dtype for g in gradients] == [kept, kept]
        assert layer.running_var.dtype == kept
        return y, of_input, gradients[0].float()

    results = run_ranks(body, 2)
    x, grad = torch.cat([part.double() for part in parts], dim=1)
    expected = train(disturb(nn.BatchNorm2d(CHANNELS, dtype=torch.float64)), [(x, grad)])
    precision = torch.finfo(dtype).eps
    y, of_input = (torch.cat([result[i] for result in results]).double() for i in (0, 1))
    torch.testing.assert_close(y, expected[0][0], rtol=precision, atol=precision)
    torch.testing.assert_close(of_input, expected[1][0], rtol=2 * precision, atol=2 * precision)
    of_weight = sum(result[2] for result in results).double()
    torch.testing.assert_close(of_weight, expected[2][0], rtol=4 * precision, atol=0.1)


def test_autocast():
    x = torch.randn(4, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return y.detach(), model[0].weight.grad, model[1].weight.grad

    def body():
        model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(network))
        return run(model, x[2 * dist.get_rank() :][:2])

    results = run_ranks(body, 2)
    y, of_conv, of_norm = run(network, x)
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y)
    torch.testing.assert_close(sum(r[1] for r in results), of_conv, rtol=0.02, atol=0.2)
    torch.testing.assert_close(sum(r[2] for r in results), of_norm, rtol=0.02, atol=0.2)


@pytest.mark.parametrize(
    ("dims", "layout"), [(4, torch.channels_last), (5, torch.channels_last_3d)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_stays(dims, layout, dtype):
    parts = batches([2, 3], dims, dtype)

    def body(like):
        layer = SyncBatchNorm(CHANNELS)
        x, grad = (t.to(memory_format=like) for t in parts[dist.get_rank()])
        x.requires_grad_()
        y = layer(x)
        assert y.is_contiguous(memory_format=like)
        y.backward(grad.contiguous())
        assert x.grad.is_contiguous(memory_format=like)
        return y.detach(), x.grad

    for ours, theirs in zip(
        run_ranks(body, 2, layout), run_ranks(body, 2, torch.contiguous_format), strict=True
    ):
        torch.testing.assert_close(ours[0].contiguous(), theirs[0])
        torch.testing.assert_close(ours[1].contiguous(), theirs[1])


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "sliced channels last"])
def test_inputs_of_any_layout(kind):
    x = torch.randn(4, 6, 8, 6, generator=torch.Generator().manual_seed(0))
    x = {
        "transposed": x[0].transpose(1, 2),  # channels innermost: normalized without a copy
        "sliced": x[:, :, 1::2],
        "expanded": x[:, :1].expand(-1, 6, -1, -1),
        "sliced channels last": x.to(memory_format=torch.channels_last)[:, :, 1:],
    }[kind]

    def body():
        layer = nn.Sequential(SyncBatchNorm(x.size(1)), nn.ReLU(inplace=True))
        own = x.detach()[3 * dist.get_rank() :][:3].requires_grad_()
        y = layer(own)
        y.sum().backward()
        assert (y.stride() == own.stride()) == (kind == "transposed")
        assert y.is_contiguous(memory_format=torch.channels_last) == ("last" in kind)
        return y.detach(), own.grad

    results = run_ranks(body, 2)
    plain = (nn.BatchNorm1d if x.dim() == 3 else nn.BatchNorm2d)(x.size(1))
    whole = x.detach().clone().requires_grad_()
    y = plain(whole).relu()
    y.sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y.detach())
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole.grad)


def test_evaluation_asks_nobody():
    def body():
        x = torch.randn(4, CHANNELS, 5)
        if dist.get_rank() == 0:
            for arguments in ({}, {"track_running_stats": False}):
                ours = SyncBatchNorm(CHANNELS, **arguments).eval()
                theirs = nn.BatchNorm1d(CHANNELS, **arguments).eval()
                assert torch.equal(ours(x), theirs(x))
        dist.barrier()

    run_ranks(body, 2)


def test_one_exchange_each_way():
    def body():
        group = dist.group.WORLD
        layer = SyncBatchNorm(CHANNELS)
        x = torch.randn(4, CHANNELS, 5, requires_grad=True)
        counts = [group.sequence_number()]
        y = layer(x)
        counts.append(group.sequence_number())
        y.sum().backward()
        counts.append(group.sequence_number())
        with torch.no_grad():
            layer(x)
        counts.append(group.sequence_number())
        layer(x.detach()).sum().backward()  # no gradient of the input is asked for
        counts.append(group.sequence_number())
        return [b - a for a, b in itertools.pairwise(counts)]

    assert run_ranks(body, 2) == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters(frozen):
    parts = batches([2, 3])

    def body():
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
        layer.weight.requires_grad_(frozen == "bias")
        layer.bias.requires_grad_(frozen == "weight")
        _, (gradient,), _, _ = train(layer, [parts[dist.get_rank()]])
        assert (layer.weight.grad is None) == (frozen != "bias")
        assert (layer.bias.grad is None) == (frozen != "weight")
        return gradient

    x, grad = torch.cat(parts, dim=1)
    expected = train(nn.BatchNorm2d(CHANNELS, dtype=torch.float64), [(x, grad)])[1][0]
    torch.testing.assert_close(torch.cat(run_ranks(body, 2)), expected)


def test_subgroups_are_normalized_apart():
    parts = batches([2, 3, 1, 2])

    def body():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        layer = SyncBatchNorm(CHANNELS, process_group=pairs[rank % 2], dtype=torch.float64)
        copied = copy.deepcopy(layer)
        assert copied.process_group is layer.process_group
        return train(copied, [parts[rank]])

    results = run_ranks(body, 4)
    for a, b in ((0, 2), (1, 3)):
        x, grad = torch.cat([parts[a], parts[b]], dim=1)
        expected = train(nn.BatchNorm2d(CHANNELS, dtype=torch.float64), [(x, grad)])
        for kind in (0, 1):
            ours = torch.cat([results[a][kind][0], results[b][kind][0]])
            torch.testing.assert_close(ours, expected[kind][0])


def test_a_rank_outside_the_group_is_told():
    def body():
        layer = SyncBatchNorm(CHANNELS, process_group=dist.new_group([0, 1]))
        if dist.get_rank() == 2:
            with pytest.raises(ValueError, match="NON_GROUP_MEMBER"):
                layer(torch.ones(2, CHANNELS))
        else:
            layer(torch.ones(2, CHANNELS))

    run_ranks(body, 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    parts = batches([2, 3])

    def run(layer, x, grad):
        x = x.clone().requires_grad_()
        y = checkpoint(lambda x: layer(x * 1.0).sin(), x, use_reentrant=use_reentrant)
        y.backward(grad)
        return y.detach(), x.grad, layer.weight.grad, layer.running_var

    def body():
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
        return run(layer, *parts[dist.get_rank()])

    results = run_ranks(body, 2)
    expected = run(nn.BatchNorm2d(CHANNELS, dtype=torch.float64), *torch.cat(parts, dim=1))
    for kind in (0, 1):
        torch.testing.assert_close(torch.cat([r[kind] for r in results]), expected[kind])
    torch.testing.assert_close(results[0][2] + results[1][2], expected[2])
    torch.testing.assert_close(results[0][3], expected[3])


class Replicated(Function):
    """Identity on what all ranks hold alike; a gradient is the average of all ranks'."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return F.all_reduce(grad, dist.ReduceOp.AVG)


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_and_second_derivatives_numerically(dims, affine):
    """As in test_functional: all ranks see all inputs and outputs, and differentiate in step."""
    sizes = (3, 1)
    space = (2, 1)[: dims - 2]

    def body():
        rank = dist.get_rank()
        layer = SyncBatchNorm(2, affine=affine, dtype=torch.float64)

        def whole(x, *parameters):
            own = Replicated.apply(x).split(sizes)[rank]
            own_parameters = {
                name: Replicated.apply(p)
                for (name, _), p in zip(layer.named_parameters(), parameters, strict=True)
            }
            y = torch.func.functional_call(layer, own_parameters, (own,))
            return torch.stack(F.all_gather(nn.functional.pad(y.flatten(), (0, 12 - y.numel()))))

        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(sum(sizes), 2, *space, dtype=torch.float64, generator=generator)]
        inputs += [torch.rand(2, dtype=torch.float64, generator=generator) + 0.5] * (2 * affine)
        inputs = [t.clone().requires_grad_() for t in inputs]
        assert gradcheck(whole, inputs)
        assert gradgradcheck(whole, inputs)

    run_ranks(body, len(sizes))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("sizes", [(2, 4, 1), (3, 0, 2)])
def test_gradients_with_a_graph_equal_those_of_the_whole(sizes, dims, affine):
    """All ranks' first and second derivatives, with weights that differ by rank."""
    parts = batches(sizes, dims)

    def body():
        rank = dist.get_rank()
        layer = disturb(SyncBatchNorm(CHANNELS, dtype=torch.float64, affine=affine))
        x = parts[rank][0].clone().requires_grad_()
        wanted = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x), wanted, parts[rank][1], create_graph=True)
        second = torch.autograd.grad(first[0].pow(3).sum() * (rank + 1), wanted[:2])
        return [g.detach() for g in first], second

    results = run_ranks(body, len(sizes))
    layer = disturb(PLAIN[dims](CHANNELS, dtype=torch.float64, affine=affine))
    x, grad = (torch.cat([part[i] for part in parts]) for i in range(2))
    x = x.requires_grad_()
    wanted = [x, *layer.parameters()]
    first = torch.autograd.grad(layer(x), wanted, grad, create_graph=True)
    pieces = first[0].split(sizes)
    penalty = sum(piece.pow(3).sum() * (rank + 1) for rank, piece in enumerate(pieces))
    second = torch.autograd.grad(penalty, wanted[:2])  # the bias has no part in it
    for order, whole in enumerate((first, second)):
        found = [result[order] for result in results]
        torch.testing.assert_close(torch.cat([each[0] for each in found]), whole[0].detach())
        for i in range(1, len(whole)):  # each rank has its part
            torch.testing.assert_close(sum(each[i] for each in found), whole[i].detach())


def test_gradients_with_a_graph_of_parameters_alone_ask_nobody():
    parts = batches((2, 3))

    def body():
        rank = dist.get_rank()
        layer = disturb(SyncBatchNorm(CHANNELS, dtype=torch.float64))
        output = layer(parts[rank][0])
        if rank == 1:
            return None  # and does no backward pass
        return torch.autograd.grad(
            output, list(layer.parameters()), parts[rank][1], create_graph=True
        )

    found, _ = run_ranks(body, 2)
    layer = disturb(nn.BatchNorm2d(CHANNELS, dtype=torch.float64))
    output = layer(torch.cat([x for x, _ in parts]))[:2]
    true = torch.autograd.grad(output, list(layer.parameters()), parts[0][1])
    for ours, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_gradients_with_a_graph_keep_the_type(parameters):
    parts = batches((4, 6), dtype=torch.bfloat16)

    def body(graph):
        layer = disturb(SyncBatchNorm(CHANNELS)).to(parameters)
        x, grad = parts[dist.get_rank()]
        x = x.clone().requires_grad_()
        wanted = [x, *layer.parameters()]
        grads = torch.autograd.grad(layer(x), wanted, grad, create_graph=graph)
        return [g.detach() for g in grads]

    for ours, theirs in zip(run_ranks(body, 2, True), run_ranks(body, 2, False), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_gradients_with_a_graph_stay_in_their_group():
    parts = batches((2, 5))

    def body():
        group = dist.new_group([1, 2])
        rank = dist.get_rank()
        if rank == 0:
            return None
        layer = disturb(SyncBatchNorm(CHANNELS, process_group=group, dtype=torch.float64))
        x, grad = parts[rank - 1]
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
        return found.detach()

    _, *found = run_ranks(body, 3)
    layer = disturb(nn.BatchNorm2d(CHANNELS, dtype=torch.float64))
    x, grad = (torch.cat([part[i] for part in parts]) for i in range(2))
    x = x.requires_grad_()
    (true,) = torch.autograd.grad(layer(x), x, grad)
    torch.testing.assert_close(torch.cat(found), true)
