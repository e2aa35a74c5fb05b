"""Gradients through collectives, checked numerically on whole worlds.

All ranks hold the same stack of everybody's inputs and see the same stack of everybody's outputs:
so a collective becomes an ordinary function, and gradcheck can differentiate it on every rank in
step.
"""

import pytest
import torch
from torch.autograd import Function, gradcheck, gradgradcheck

import phalanx as dist
import phalanx.testing.memory
from phalanx import functional as F
from phalanx.testing.ranks import run_ranks

SIZE = 3


class Replicated(Function):
    """Identity on what all ranks hold alike; a gradient is the average of all ranks'."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return F.all_reduce(grad, dist.ReduceOp.AVG)


def everybodys(outputs):
    """Stack the outputs of all ranks, flattened."""
    flat = torch.cat([output.reshape(-1) for output in outputs])
    return torch.stack(F.all_gather(flat))


def check(function, shape, dtype=torch.float64):
    """Check `function(own input) -> tensors` for inputs of `shape` on each rank."""

    def body():
        def whole(inputs):
            result = function(Replicated.apply(inputs)[dist.get_rank()])
            return everybodys([result] if isinstance(result, torch.Tensor) else result)

        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(SIZE, *shape, dtype=dtype, generator=generator) + 0.5
        inputs.requires_grad_()
        assert gradcheck(whole, (inputs,))
        assert gradgradcheck(whole, (inputs,))

    run_ranks(body, SIZE, backend="memory")


def test_broadcast():
    check(lambda x: F.broadcast(x, 1), (2,))


def test_gather_and_scatter():
    check(lambda x: F.gather(x, 1), (2,))
    check(lambda x: F.scatter(list(x), 2), (SIZE, 2))


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_reductions(op):
    check(lambda x: F.reduce(x, 1, dist.ReduceOp(op)), (2,))
    check(lambda x: F.reduce_scatter(torch.empty(2).double(), list(x), dist.ReduceOp(op)), (3, 2))


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_all_reduce(op):
    check(lambda x: F.all_reduce(x, dist.ReduceOp(op)), (2,))


def test_all_reduce_with_a_factor():
    check(lambda x: F.all_reduce(x, dist.ReduceOp.premul_sum(1.5)), (2,))


def test_all_reduce_without_gradient_is_refused():
    def body():
        with pytest.raises(ValueError, match="BOR"):
            F.all_reduce(torch.ones(2, requires_grad=True), dist.ReduceOp.BOR)
        with pytest.raises(ValueError, match="MAX"):
            F.reduce(torch.ones(2, requires_grad=True), 0, dist.ReduceOp.MAX)

    run_ranks(body, 2, backend="memory")


def test_what_has_no_gradient_can_be_reduced_in_every_way():
    def body():
        rank = dist.get_rank()
        assert F.all_reduce(torch.tensor([1 << rank]), dist.ReduceOp.BOR).tolist() == [3]
        largest = F.reduce(torch.tensor([5.0 - rank, rank]), 1, dist.ReduceOp.MAX)
        assert largest.tolist() == ([5.0, 1.0] if rank == 1 else [0.0, 0.0])
        inputs = [torch.tensor([rank + 2 * each + 1]) for each in range(2)]
        product = F.reduce_scatter(torch.tensor([0]), inputs, dist.ReduceOp.PRODUCT)
        assert product.tolist() == [[2], [12]][rank]

    run_ranks(body, 2, backend="memory")


def test_complex_gradients():
    check(lambda x: F.all_reduce(x * x), (2,), torch.complex128)
    check(lambda x: F.all_gather(x.conj()), (2,), torch.complex128)


def test_all_gather():
    check(lambda x: F.all_gather(x), (2,))
    check(lambda x: F.all_gather_into_tensor(torch.empty(6).double(), x), (2,))


def test_all_to_all():
    check(lambda x: F.all_to_all([torch.empty(2).double() for _ in x], list(x)), (SIZE, 2))


def test_all_to_all_single_with_splits():
    def exchange(x):
        rank = dist.get_rank()
        theirs = [1 + (rank == 0)] * SIZE  # everybody sends two rows to rank 0 and one to others
        output = torch.empty(sum(theirs), 2, dtype=x.dtype)
        result = F.all_to_all_single(output, x, theirs, [2, 1, 1])
        assert torch.equal(output, result)
        return torch.nn.functional.pad(result, (0, 0, 0, 6 - len(result)))

    check(exchange, (4, 2))


def test_buffers_are_filled_like_torch_does():
    def body():
        rank = dist.get_rank()
        x = torch.full((2,), float(rank), requires_grad=True)
        output = torch.empty(4)
        result = F.all_gather_into_tensor(output, x)
        assert output.tolist() == [0, 0, 1, 1]
        result.sum().backward()
        assert x.grad.tolist() == [2, 2]  # each rank's loss counts it once
        piece = torch.empty(2)
        F.reduce_scatter(piece, [x, x])
        assert piece.tolist() == [1, 1]
        buffers = [torch.empty(2), torch.empty(2)]
        F.all_to_all(buffers, [x, x])
        assert [b[0].item() for b in buffers] == [0, 1]

    run_ranks(body, 2, backend="memory")
