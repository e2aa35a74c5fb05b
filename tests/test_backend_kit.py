"""The derived collectives, by the kit; and the kit itself, on backends that are wrong."""

import pytest
import torch

from phalanx.testing.backend_kit import check_backend
from phalanx.testing.memory import Exchange, MemoryBackend


def make(rank, size, shared, kind=MemoryBackend):
    return kind(shared.setdefault("exchange", Exchange(size)), rank, size, 30.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_derived_collectives_keep_the_contract(size):
    check_backend(make, [size])


class ForgetsToReduce(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, *, timeout=None, async_op=False):
        return self.barrier(timeout=timeout, async_op=async_op)


class ChangesOtherRanks(MemoryBackend):
    def reduce(self, tensor, root, op, *, timeout=None, async_op=False):
        return self.all_reduce(tensor, op, timeout=timeout, async_op=async_op)


class MixesTags(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        return super().send(tensor, dst, min(tag, 0), **options)

    def recv(self, tensor, src, tag=0, **options):
        return super().recv(tensor, src, min(tag, 0), **options)


class IgnoresAborts(MemoryBackend):
    def abort(self, reason):
        self.send(torch.zeros(1), 1, 9)


@pytest.mark.parametrize("kind", [ForgetsToReduce, ChangesOtherRanks, MixesTags, IgnoresAborts])
def test_the_kit_notices(kind):
    with pytest.raises(AssertionError):
        check_backend(lambda rank, size, shared: make(rank, size, shared, kind), [2])
