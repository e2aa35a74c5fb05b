"""torch_world judged by others: PyTorch's base class for tests on threads, and its operators.

PyTorch tests operators on distributed tensors with both. Here the threads are ours.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal import common_methods_invocations as operators
from torch.testing._internal.distributed._tensor import common_dtensor

from phalanx.testing import torch_world

OPERATORS = ["add", "addmm", "cat", "cumsum", "nn.functional.layer_norm", "softmax", "topk"]


@pytest.fixture(autouse=True)
def _sizes_that_four_ranks_can_share(monkeypatch):
    for name, size in {"S": 4, "M": 12, "L": 24}.items():
        monkeypatch.setattr(operators, name, size)


class OnThreadsOfPhalanx(common_dtensor.DTensorOpTestBase):
    """Runs its tests on our threads and not on those that torch would start."""

    def _spawn_threads(self):
        pass

    @classmethod
    def _join_threads(cls, threads, fn):
        world = torch_world(cls(fn.__name__).world_size, backend="threaded")
        world.run(lambda: cls._run(fn.__name__, dist.get_rank(), dist.get_world_size()))

    def run_test_with_threaded_pg(self, test_name, rank, world_size):
        getattr(self, test_name)()


class TestOperators(OnThreadsOfPhalanx):
    def test_operators_on_all_shardings(self):
        mesh = self.build_device_mesh()
        compared = 0
        for operator in (op for op in operators.op_db if op.name in OPERATORS):
            torch.manual_seed(0)
            samples = operator.sample_inputs("cpu", torch.float32)
            for sample in itertools.islice(samples, 4):
                arguments = sample.input, *sample.args
                expected = operator(*arguments, **sample.kwargs)
                shardings = common_dtensor.DTensorConverter(mesh, arguments, sample.kwargs)
                for args, kwargs in itertools.islice(shardings, 8):
                    found = operator(*args, **kwargs)
                    torch.testing.assert_close(_whole(found), _whole(expected))
                    compared += 1
        assert compared > 10 * len(OPERATORS)


def _whole(found):
    if isinstance(found, DTensor):
        return found.full_tensor()
    return tuple(map(_whole, found)) if isinstance(found, tuple) else found


class Failing(OnThreadsOfPhalanx):
    def fail_on_one(self):
        if self.rank == 1:
            raise ArithmeticError("only here")
        dist.barrier()


def test_a_failure_on_one_rank():
    with pytest.raises(ArithmeticError, match="only here") as caught:
        Failing("fail_on_one").debug()
    assert "rank 1 of 4" in "".join(caught.value.__notes__)
