"""The public functions: arguments, roots, kinds of tensors. What moves is the kit's concern."""

from functools import partial

import numpy as np
import pytest
import torch

import phalanx as dist
from phalanx.types import ReduceOp

# Types of less than a byte, which DLPack shows as whole bytes, and those of bits.
PACKED = [
    *(getattr(torch, f"{kind}{bits}") for kind in ("uint", "int") for bits in range(1, 8)),
    *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
]


def test_roots_are_global_or_in_the_group(run):
    def body():
        rank = dist.get_rank()
        pair = dist.new_group([1, 2])
        if rank == 0:
            return
        for options in ({"src": 2}, {"group_src": 1}):
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, group=pair, **options)
            assert tensor.item() == 2
        for options in ({"dst": 1}, {"group_dst": 0}):
            tensor = torch.tensor([rank])
            dist.reduce(tensor, group=pair, **options)
            assert tensor.item() == (3 if rank == 1 else 2)
            outputs = [torch.zeros(1), torch.zeros(1)] if rank == 1 else None
            dist.gather(torch.tensor([float(rank)]), outputs, group=pair, **options)
            assert rank != 1 or torch.cat(outputs).tolist() == [1, 2]
        output = torch.zeros(1)
        pieces = [torch.ones(1), torch.ones(1) * 2] if rank == 2 else None
        dist.scatter(output, pieces, group=pair, group_src=1)
        assert output.item() == rank
        for wrong in ({}, {"src": 0}, {"group_src": 2}, {"src": 1, "group_src": 0}):
            with pytest.raises(ValueError, match=r"src|rank"):
                dist.broadcast(torch.ones(1), group=pair, **wrong)

    run(body, 3)


def test_gather_and_scatter_default_to_rank_0(run):
    def body():
        outputs = [torch.zeros(1) for _ in range(3)] if dist.get_rank() == 0 else None
        dist.gather(torch.tensor([dist.get_rank() + 3.0]), outputs)
        output = torch.zeros(1)
        dist.scatter(output, outputs and [10 * each for each in outputs[::-1]])
        assert output.item() == [50, 40, 30][dist.get_rank()]

    run(body, 3)


def test_async_ops_return_works(run):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        a, b = torch.ones(4), torch.ones(2)
        root = rank == 0
        works = [
            dist.broadcast(a, 0, async_op=True),
            dist.all_reduce(a, async_op=True),
            dist.reduce(b, 0, async_op=True),
            dist.all_gather([torch.empty(4)] * size, a, async_op=True),
            dist.all_gather_into_tensor(torch.empty(size, 4), a, async_op=True),
            dist.gather(a, [torch.empty(4)] * size if root else None, async_op=True),
            dist.scatter(a, [torch.ones(4)] * size if root else None, async_op=True),
            dist.reduce_scatter(b, [torch.ones(2)] * size, async_op=True),
            dist.reduce_scatter_tensor(b, torch.ones(4), async_op=True),
            dist.all_to_all([torch.empty(2)] * size, [b, b], async_op=True),
            dist.all_to_all_single(torch.empty(4), a, async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            assert isinstance(work, dist.Work)
            assert work.wait()
        assert works[1].result()[0] is a
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        assert future.then(lambda f: f.value()[0].item() + 1).wait() == 3

    run(body, 2)


def test_errors_of_one_rank_are_found_before_anything_is_sent(run):
    ones = torch.ones

    def body():
        cases = [
            (TypeError, "list", lambda: dist.all_reduce([ones(1)])),
            (
                ValueError,
                "does not support",
                lambda: dist.all_reduce(ones(1).cfloat(), ReduceOp.MAX),
            ),
            (ValueError, "does not support", lambda: dist.all_reduce(ones(1).int(), ReduceOp.AVG)),
            (
                ValueError,
                "does not support",
                lambda: dist.all_reduce(ones(1).to(torch.float8_e5m2)),
            ),
            (ValueError, "factor", lambda: dist.all_reduce(ones(1), ReduceOp.PREMUL_SUM)),
            (ValueError, "unknown reduce op", lambda: dist.all_reduce(ones(1), "plus")),
            (ValueError, "resolve_conj", lambda: dist.all_reduce(ones(1).cfloat().conj())),
            *(
                (TypeError, str(dtype), partial(operation, ones(4, dtype=torch.uint8).view(dtype)))
                for dtype in PACKED
                for operation in (
                    dist.all_reduce,
                    lambda tensor: dist.broadcast(tensor, 0),
                    lambda tensor: dist.all_gather([tensor] * 2, tensor),
                    lambda tensor: dist.all_to_all_single(tensor, tensor),
                )
            ),
            (RuntimeError, "meta", lambda: dist.broadcast(ones(1, device="meta"), 0)),
            (ValueError, "dense", lambda: dist.broadcast(ones(1).to_sparse(), 0)),
            (TypeError, "tensor_list", lambda: dist.all_gather(ones(2), ones(1))),
            (TypeError, r"tensor_list\[1\]", lambda: dist.all_gather([ones(1), 3], ones(1))),
            (ValueError, "1 for 2 ranks", lambda: dist.all_gather([ones(1)], ones(1))),
            (ValueError, "dtype", lambda: dist.all_gather([ones(1), ones(1).int()], ones(1))),
            (ValueError, "dtype", lambda: dist.all_gather([ones(1)] * 2, ones(1).int())),
            (ValueError, "shapes", lambda: dist.all_gather([ones(1)] * 2, ones(2))),
            (ValueError, "2 times", lambda: dist.all_gather_into_tensor(ones(3), ones(1))),
            (ValueError, "dtype", lambda: dist.all_gather_into_tensor(ones(2), ones(1).int())),
            (ValueError, "2 times", lambda: dist.reduce_scatter_tensor(ones(2), ones(3))),
            (ValueError, "shapes", lambda: dist.reduce_scatter(ones(2), [ones(1)] * 2)),
            (
                ValueError,
                "gather_list",
                lambda: dist.gather(ones(1), None if dist.get_rank() == 0 else [ones(1)] * 2),
            ),
            (
                ValueError,
                "scatter_list",
                lambda: dist.scatter(ones(1), None if dist.get_rank() == 0 else [ones(1)] * 2),
            ),
            (RuntimeError, "equally", lambda: dist.all_to_all_single(ones(3), ones(3))),
            (RuntimeError, "add up", lambda: dist.all_to_all_single(ones(2), ones(2), [1, 2])),
            (RuntimeError, "1 for 2", lambda: dist.all_to_all_single(ones(2), ones(2), [2])),
            (ValueError, "own", lambda: dist.all_to_all([ones(1)] * 2, [ones(2)] * 2)),
            (ValueError, "negative", lambda: dist.barrier(timeout=-1)),
        ]
        for error, match, call in cases:
            with pytest.raises(error, match=match):
                call()
        assert dist.group.WORLD.sequence_number() == 0

    run(body, 2)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_two_halves(run):
    def body():
        rank = dist.get_rank()
        every = [torch.tensor([1 + 2j, 3 - 1j]) * (each + 1) for each in range(2)]
        mine = every[rank].to(torch.complex32)
        total = mine.clone()
        dist.all_reduce(total)
        assert total.to(torch.complex64).tolist() == sum(every).tolist()
        outputs = [torch.zeros_like(mine) for _ in every]
        dist.all_gather(outputs, mine)
        assert torch.stack(outputs).to(torch.complex64).equal(torch.stack(every))
        both = torch.zeros(4, dtype=torch.complex32)
        dist.all_gather_into_tensor(both, mine)
        assert both.to(torch.complex64).equal(torch.cat(every))
        dist.broadcast(mine, 1)
        assert mine.to(torch.complex64).equal(every[1])
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(mine, 0)
            assert mine.to(torch.complex64).tolist() == sum(every).tolist()
        for op in (ReduceOp.PRODUCT, ReduceOp.MAX):
            with pytest.raises(ValueError, match=r"does not support .* on torch\.complex32"):
                dist.all_reduce(mine, op)

    run(body, 2)


def test_ops_may_be_given_by_name_or_by_torch(run):
    def body():
        import torch.distributed as theirs

        for op in ("max", theirs.ReduceOp.MAX):
            tensor = torch.tensor([dist.get_rank()])
            dist.all_reduce(tensor, op)
            assert tensor.item() == 1

    run(body, 2)


def test_numpy_arrays_are_views(run):
    def body():
        rank = dist.get_rank()
        array = np.full(3, rank + 1.0)
        dist.all_reduce(array)
        assert array.tolist() == [3, 3, 3]
        fixed = np.array([1.0, 2.0]) + 10 * rank
        fixed.flags.writeable = False
        outputs = [np.zeros(2), np.zeros(2)]
        dist.all_gather(outputs, fixed)
        assert np.array(outputs).tolist() == [[1, 2], [11, 12]]
        with pytest.raises(ValueError, match="read-only"):
            dist.all_reduce(fixed)

    run(body, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_all_reduce(run):
    def body():
        rank = dist.get_rank()

        def make(dtype=torch.float32):
            indices = torch.tensor([[rank, 0, 3], [0, 1, 2]])
            values = torch.tensor([1.0, 2.0, rank], dtype=dtype)
            return torch.sparse_coo_tensor(indices, values, (4, 3), check_invariants=True)

        expected = torch.zeros(4, 3)
        for r in range(3):
            expected[r, 0] += 1
            expected[0, 1] += 2
            expected[3, 2] += r
        tensor = make()
        dist.all_reduce(tensor)
        assert tensor.is_coalesced()
        assert torch.equal(tensor.to_dense(), expected)
        tensor = make()
        dist.all_reduce(tensor, ReduceOp.AVG, async_op=True).wait()
        assert torch.equal(tensor.to_dense(), expected / 3)
        empty = torch.sparse_coo_tensor(size=(4, 3), check_invariants=True)
        dist.all_reduce(empty)
        assert empty._nnz() == 0
        with pytest.raises(ValueError, match="sparse"):
            dist.all_reduce(make(), ReduceOp.MAX)
        with pytest.raises(ValueError, match="csr"):
            dist.all_reduce(torch.eye(2).to_sparse_csr())

    run(body, 3)


def test_coalesced_forms(run):
    def body():
        rank = dist.get_rank()
        tensors = [torch.arange(2.0) + rank, torch.arange(6.0).view(3, 2) * (rank + 1)]
        assert dist.all_reduce_coalesced(tensors) is None
        assert tensors[0].tolist() == [1, 3]
        assert tensors[1].flatten().tolist() == [0, 3, 6, 9, 12, 15]
        value = dist.all_reduce_coalesced(tensors, async_op=True).wait()
        assert value[0].tolist() == [2, 6]
        assert value[1].flatten().tolist() == [0, 6, 12, 18, 24, 30]
        outputs = [[torch.zeros(2), torch.zeros(1)] for _ in range(2)]
        dist.all_gather_coalesced(outputs, [torch.arange(2.0) + rank, torch.tensor([7.0 - rank])])
        assert [[t.tolist() for t in each] for each in outputs] == [
            [[0, 1], [7]],
            [[1, 2], [6]],
        ]
        with pytest.raises(ValueError, match="all_reduce does not support"):
            dist.all_reduce_coalesced([torch.ones(1).cfloat()], ReduceOp.MAX)
        with pytest.raises(TypeError, match="list"):
            dist.all_reduce_coalesced("tensors")
        with pytest.raises(TypeError, match="output_tensor_lists"):
            dist.all_gather_coalesced([outputs[0]], tensors)

    run(body, 2)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_tensor_twice_in_a_coalesced_call(run, async_op):
    """All calls of one read before any writes, as on Gloo."""

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()

        def values(count):
            return torch.arange(count) + 10.0 * rank + 1

        def done(future):
            if future is not None:
                future.wait()

        total = sum(torch.arange(5) + 10.0 * other + 1 for other in range(size)).tolist()
        tensor = values(5)
        done(dist.all_reduce_coalesced([tensor, tensor, tensor], async_op=async_op))
        assert tensor.tolist() == total
        tensor = values(5)
        done(dist.all_reduce_coalesced([tensor[2:], tensor[:4], tensor[::2]], async_op=async_op))
        assert tensor.tolist() == total
        tensor = values(5)
        with dist._coalescing_manager(async_ops=async_op) as manager:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor[1:], op=ReduceOp.MAX)
        manager.wait()
        largest = torch.arange(5) + 10.0 * (size - 1) + 1
        assert tensor.tolist() == [total[0], *largest[1:].tolist()]

        own = values(2)
        outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(size)]
        outputs[0][0] = own  # rank 0's goes where this rank's is
        done(dist.all_gather_coalesced(outputs, [own, own], async_op=async_op))
        assert [[each.tolist() for each in pair] for pair in outputs] == [
            [[1.0 + 10 * other, 2.0 + 10 * other]] * 2 for other in range(size)
        ]

        given, second = values(2 * size), torch.zeros(2)
        with dist._coalescing_manager(async_ops=async_op) as manager:
            dist.reduce_scatter_tensor(given[:2], given)
            dist.reduce_scatter_tensor(second, given)
        manager.wait()
        mine = sum(torch.arange(2) + 2 * rank + 10.0 * other + 1 for other in range(size))
        assert given[:2].tolist() == second.tolist() == mine.tolist()

    run(body, 3)


def test_methods_of_a_group(run):
    def body():
        group, tensor = dist.group.WORLD, torch.tensor([dist.get_rank() + 1])
        assert group.allreduce(tensor).wait()
        assert group.allreduce([tensor]).get_future().wait()[0].item() == 6
        tensor.fill_(dist.get_rank())
        group.broadcast(tensor, 1).wait()
        group.barrier().wait()
        assert tensor.item() == 1

    run(body, 2)


def test_coalescing_manager(run):
    def body():
        size = dist.get_world_size()
        rank = dist.get_rank()
        tensors = [torch.ones(2), torch.ones(3)]
        gathered, own = torch.zeros(size, 2), torch.zeros(2)
        parts = torch.arange(2.0 * size) + 10 * rank
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
            dist.all_gather_into_tensor(gathered, torch.tensor([rank + 1.0, rank + 5.0]))
            dist.reduce_scatter_tensor(own, parts)
            assert tensors[0][0] == 1  # nothing has run yet
            dist.barrier()  # what cannot be coalesced runs at once
        assert tensors[0].tolist() + tensors[1].tolist() == [size] * 5
        assert gathered.tolist() == [[1, 5], [2, 6]]
        assert own.tolist() == [2.0 * (2 * rank + i) + 10 for i in range(2)]
        with dist._coalescing_manager(async_ops=True) as manager:
            work = dist.all_reduce(tensors[0], async_op=True)
            with pytest.raises(ValueError, match="block"):
                work.wait()
            with pytest.raises(ValueError, match="already"), dist._coalescing_manager():
                pass
        manager.wait()
        assert work.is_success()
        assert tensors[0][0] == size * size
        with dist._coalescing_manager(async_ops=True) as manager:
            pass
        manager.wait()

    run(body, 2)


def test_monitored_barrier_names_who_is_missing(run):
    def body():
        rank = dist.get_rank()
        dist.monitored_barrier(timeout=30)
        if rank == 0:
            with pytest.raises(dist.DistTimeout, match="Rank 2 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=0.2)
        elif rank == 1:
            with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier"):
                dist.group.WORLD.monitored_barrier(30)
        dist.barrier()
        if rank == 0:
            with pytest.raises(RuntimeError, match="Ranks 1, 2, 3 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=0.01, wait_all_ranks=True)

    run(body, 4)


def test_profiler_sees_operations(run):
    def operations():
        dist.all_reduce(torch.ones(2, 3))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        with torch.profiler.record_function("after"):
            dist.all_reduce_coalesced([torch.ones(11), torch.ones(12)])
        dist.all_gather_into_tensor(torch.ones(10), torch.ones(5))
        if dist.get_rank() == 0:
            dist.send(torch.ones(7), 1)
            dist.recv(torch.ones(8), 1)
        else:
            dist.recv(torch.ones(7), 0)
            dist.send(torch.ones(8), 0)
        dist.barrier()

    def body():
        if dist.get_rank() == 1:
            return operations()
        with torch.profiler.profile(record_shapes=True) as profile:  # sees its own thread
            operations()
        after = next(e for e in profile.events() if e.name == "after").time_range
        prefix = f"{dist.get_backend()}:"
        events = [e for e in profile.events() if e.name.startswith(prefix)]
        assert [e for e in events if e.input_shapes == [[4]] and e.time_range.end <= after.start]
        return [(e.name.removeprefix(prefix), e.input_shapes) for e in events]

    events, _ = run(body, 2)
    for name, *shapes in [
        ("all_reduce", [2, 3]),
        ("all_reduce", [4]),
        ("all_reduce", [11], [12]),
        ("all_gather_single", [5]),
        ("send", [7]),
        ("recv", [8]),
        ("barrier",),
    ]:
        assert (name, shapes) in events
