"""At DETAIL, tensors of asynchronous operations must not be touched before wait()."""

from __future__ import annotations

import gc
import inspect
import io
import pickle
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed
import torch.distributed._functional_collectives as fc
from torch import nn
from torch_ranks import run_torch

import phalanx as dist
from phalanx import logs
from phalanx.debug import in_flight, levels
from phalanx.debug.in_flight import Memory
from phalanx.errors import BufferInUse
from phalanx.testing.memory import MemoryBackend
from phalanx.testing.ranks import run_ranks

THREADS_AND_PROCESSES = pytest.mark.parametrize("ranks", ["threads", "processes"])


@pytest.fixture
def detail(monkeypatch):
    """Have DETAIL in this process and in those it starts."""
    for name in levels.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(levels, "_level", None)
    monkeypatch.setenv("PHALANX_DEBUG", "DETAIL")
    yield
    assert not in_flight._flights
    assert "tolist" not in vars(torch.Tensor)
    logs.show(None)


def refused(touch, *args):
    """Call what must not be called now; return what it says."""
    with pytest.raises(BufferInUse) as caught:
        touch(*args)
    return str(caught.value)


# Where elements lie


def columns():
    table = torch.zeros(4, 6)
    return table, table[:, 0], table[:, 1]


def test_columns_of_a_table_do_not_overlap():
    table, first, second = map(Memory.of, columns())
    assert not first.overlaps(second)
    assert first.overlaps(table)
    assert table.overlaps(second)


def test_memory_is_compared_element_by_element():
    x = torch.arange(12.0)
    evens, odds, fours = x[::2], x[1::2], x.view(3, 4)[:, 2]
    assert not Memory.of(evens).overlaps(Memory.of(odds))
    assert Memory.of(evens).overlaps(Memory.of(fours))
    assert Memory.of(x[:6]).overlaps(Memory.of(x[5:]))
    assert not Memory.of(x[:6]).overlaps(Memory.of(x[6:]))
    assert Memory.of(x.view(torch.uint8)[1:2]).overlaps(Memory.of(x[:1]))
    assert Memory.of(x[3].expand(5)).overlaps(Memory.of(odds))
    assert Memory.of(torch.from_numpy(x.numpy())[2:3]).overlaps(Memory.of(evens))


@pytest.mark.parametrize(
    "tensor", [torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse()]
)
def test_some_tensors_have_no_memory_to_speak_of(tensor):
    assert Memory.of(tensor) is None


# What is refused


def of_all_reduce(x):
    return dist.all_reduce(x, async_op=True)


def of_irecv(x):
    other = 1 - dist.get_rank()
    dist.isend(torch.ones_like(x), other)
    return dist.irecv(x, other)


def of_all_gather(x):
    return dist.all_gather_single(x, torch.ones(x.numel() // 2), async_op=True)


TOUCHES = {
    "add": lambda x: x + 1,
    "view": lambda x: x[3:5].sum(),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x[:3].tolist(),
    "numpy": lambda x: x.numpy()[0],
    "asarray": lambda x: np.asarray(x[3:]),
    "pickle": lambda x: pickle.dumps(x),
    "save": lambda x: torch.save({"x": nn.Parameter(x)}, io.BytesIO()),
    "bool": lambda x: bool(x[0] > 0),
    "print": str,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.view(2, -1).t().contiguous(),
    "to": lambda x: x.to(torch.float64),
    "equal": lambda x: torch.equal(x, x),
    "stack": lambda x: torch.stack([torch.zeros_like(x), x]),
    "foreach": lambda x: torch._foreach_norm([x]),
    "matmul": lambda x: x @ torch.ones(x.numel()),
    "linear": lambda x: nn.functional.linear(x, torch.ones(1, x.numel())),
    "from": lambda x: torch.empty(x.numel()).copy_(x),
    "index": lambda x: x[torch.tensor([1, 2])],
}
CHANGES = {
    "zero_": lambda x: x.zero_(),
    "slice": lambda x: x[2:4].fill_(1),
    "data": lambda x: x.data.mul_(2),
    "out": lambda x: torch.add(torch.ones(x.numel()), 1, out=x),
    "setitem": lambda x: x.__setitem__(0, 3.0),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "copy_": lambda x: x.copy_(torch.zeros(x.numel())),
}
HARMLESS = {
    "like": lambda x: (torch.empty_like(x), torch.zeros_like(x), x.new_zeros(3), x.new_empty(2)),
    "shape": lambda x: (x.shape, x.stride(), x.dtype, x.numel(), x.is_contiguous(), len(x)),
    "views": lambda x: (x[2:], x.view(2, -1).t(), x.detach(), x.data, x.unbind(), x.chunk(2)),
    "parameter": lambda x: nn.Parameter(x),
    "others": lambda x: (torch.ones(3) * 2).sum().item(),
    "grad": lambda x: x.requires_grad_().requires_grad_(False),
}


def in_use(start):
    x = torch.zeros(64)
    work = start(x)
    told = [refused(touch, x) for touch in (TOUCHES | CHANGES).values()]
    for harmless in HARMLESS.values():
        harmless(x)
    work.wait()
    for touch in (TOUCHES | CHANGES).values():
        touch(x)
    return told


@pytest.mark.parametrize("start", [of_all_reduce, of_irecv, of_all_gather])
@THREADS_AND_PROCESSES
def test_what_an_operation_writes_must_not_be_touched(detail, start, ranks):
    for rank, told in enumerate(run_ranks(in_use, 2, start, ranks=ranks)):
        for text, touch in zip(told, TOUCHES | CHANGES, strict=True):
            first = text.splitlines()[0]
            assert first.startswith(f"rank {rank} "), touch
            assert first.endswith("still writes"), touch
            assert ("writes a tensor" in first) == (touch in CHANGES or touch == "foreach"), first


def read_meanwhile():
    x, rank = torch.ones(64), dist.get_rank()
    work = dist.isend(x, 1 - rank)
    for touch in (TOUCHES | HARMLESS).values():
        touch(x)
    told = [refused(change, x) for change in CHANGES.values()]
    dist.recv(torch.empty(64), 1 - rank)
    work.wait()
    for change in CHANGES.values():
        change(x)
    return told


def test_what_an_operation_reads_must_not_be_written(detail):
    for told in run_ranks(read_meanwhile, 2):
        assert all("send to rank" in text and "still reads" in text for text in told)


A, B, C = torch.ones(2), torch.ones(2), torch.ones(2)
SUM = dist.ReduceOp.SUM


@pytest.mark.parametrize(
    ("name", "args", "written", "read"),
    [
        ("all_reduce", (A, SUM), [A], []),
        ("all_reduce", (A, SUM, B), [A, B], []),
        ("broadcast", (A, 0), [], [A]),
        ("broadcast", (A, 1), [A], []),
        ("reduce", (A, 0, SUM), [A], []),
        ("reduce", (A, 1, SUM), [], [A]),
        ("all_gather", ([A, B], C), [A, B], [C]),
        ("all_gather_single", (A, B), [A], [B]),
        ("gather", ([A, B], C, 0), [A, B], [C]),
        ("gather", (None, C, 1), [], [C]),
        ("scatter", (A, [B, C], 0), [A], [B, C]),
        ("scatter", (A, None, 1), [A], []),
        ("reduce_scatter", (A, [B, C], SUM), [A], [B, C]),
        ("reduce_scatter_single", (A, B, SUM), [A], [B]),
        ("all_to_all", ([A], [B, C]), [A], [B, C]),
        ("all_to_all_single", (A, B, [1, 1], None), [A], [B]),
        ("send", (A, 1, 0), [], [A]),
        ("recv", (A, None, 0), [A], []),
        ("barrier", (), [], []),
        ("coalesce", ([("all_reduce", (A, SUM)), ("all_gather_single", (B, C))],), [A, B], [C]),
    ],
)
def test_which_tensors_rank_0_reads_and_writes(name, args, written, read):
    found = in_flight.used(name, args, {}, rank=0)
    for is_written, expected in ((True, written), (False, read)):
        assert [id(t) for t, w in found if w == is_written] == [id(t) for t in expected]


def names_lines():
    x = torch.zeros(4)
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    text = refused(touches_elsewhere, x)
    work.wait()
    return text


def touches_elsewhere(x):
    return x + 1


@THREADS_AND_PROCESSES
def test_the_error_names_rank_operation_and_both_lines(detail, ranks):
    source, start = inspect.getsourcelines(names_lines)
    issued = start + next(i for i, line in enumerate(source) if "all_reduce" in line)
    touched = inspect.getsourcelines(touches_elsewhere)[1] + 1
    for rank, text in enumerate(run_ranks(names_lines, 2, ranks=ranks)):
        assert f"rank {rank} reads a tensor that all_reduce #2 on group 'world'" in text
        assert f"issued at test_in_flight.py:{issued} in names_lines" in text
        assert f"read at test_in_flight.py:{touched} in touches_elsewhere, by aten.add" in text
        assert "wait()" in text


def test_an_input_changed_past_torch_is_found_by_wait(detail):
    def body():
        x, outputs = torch.ones(8), [torch.zeros(8) for _ in range(2)]
        work = dist.all_gather(outputs, x, async_op=True)
        x.numpy()[3] = 7
        text = refused(work.wait)
        assert work.wait()  # told once
        x.add_(1)
        return text

    for rank, text in enumerate(run_ranks(body, 2)):
        assert f"rank {rank}: an input of all_gather #1" in text
        assert "issued at test_in_flight.py" in text
        assert "before wait()" in text


def test_a_work_that_nobody_keeps_leaves_its_tensor_in_use(detail):
    def body():
        x, y = torch.zeros(4), torch.zeros(4)
        dist.all_reduce(x, async_op=True)
        for _ in range(200):  # a collection does nothing while another thread's is under way
            gc.collect()
            text = refused(x.sum)
            if "nobody has kept the work" in text:
                break
            time.sleep(0.01)
        y.sum()
        dist.barrier()  # which ends after what was issued before it
        return text, x.sum().item()

    for text, total in run_ranks(body, 2):
        assert "nobody has kept the work" in text
        assert total == 0


def test_in_backward_too(detail):
    def body():
        x = torch.ones(4, requires_grad=True)
        factor = torch.ones(4)
        y = (x * factor).sum()
        work = dist.all_reduce(factor, async_op=True)
        text = refused(y.backward)
        work.wait()
        return text

    for text in run_ranks(body, 2):
        assert "read at test_in_flight.py" in text


def test_in_a_thread_that_communicates(detail):
    def body():
        x, told = torch.zeros(4), []
        work = dist.all_reduce(x, async_op=True)

        def other():
            dist.send(torch.ones(1), 1 - dist.get_rank(), tag=1)
            told.append(refused(x.sum))

        thread = threading.Thread(target=other)
        thread.start()
        dist.recv(torch.empty(1), 1 - dist.get_rank(), tag=1)
        thread.join()
        work.wait()
        return told

    assert all(len(told) == 1 for told in run_ranks(body, 2))


def test_in_threads_that_a_thread_rank_starts(detail):
    def body():
        x, told = torch.zeros(4), []
        work = dist.all_reduce(x, async_op=True)
        thread = threading.Thread(target=lambda: told.append(refused(x.sum)))
        thread.start()
        thread.join()
        work.wait()
        return len(told)

    assert run_ranks(body, 2) == [1, 1]


def on_two_groups():
    x, other = torch.ones(4), dist.new_group([0, 1])
    work = dist.all_reduce(x, async_op=True)
    told = [refused(dist.all_reduce, x, dist.ReduceOp.SUM, other) for _ in range(2)][1:]
    told.append(refused(dist.isend, x[1:], 1 - dist.get_rank()))
    dist.all_reduce(x)  # on the same group they have an order
    work.wait()
    dist.all_reduce(x, group=other)
    return told, x.tolist()


def test_two_operations_that_have_no_order_must_not_share_a_tensor(detail):
    for (first, second), x in run_ranks(on_two_groups, 2):
        assert "all_reduce #1 on group 'world' still writes" in first
        assert "by all_reduce #1 on group" in first
        assert "by send to rank" in second
        assert x == [8.0] * 4


# What is not


def patterns():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    x = torch.ones(4)
    # the last of several works on one group
    works = [dist.all_reduce(t, async_op=True) for t in (x, torch.ones(3), x[:2])]
    works[-1].wait()
    assert x.tolist() == [4, 4, 2, 2]
    # asking until it is done
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    x.sum()
    assert work.wait()
    # futures and their callbacks
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].sum())
    future.wait()
    x.sum()
    # an input that is a piece of the output
    whole = torch.zeros(8)
    dist.all_gather_single(whole, whole[4 * rank : 4 * rank + 4], async_op=True).wait()
    # columns of one table
    table = torch.zeros(6, 4)
    sends = [dist.isend(torch.ones(6), other, tag=i) for i in range(2)]
    receives = [dist.irecv(table[:, i], other, tag=i) for i in range(2)]
    table[:, 2].fill_(3)
    for each in sends + receives:
        each.wait()
    # one tensor to several
    for each in [dist.isend(x, other, tag=5) for _ in range(3)]:
        dist.recv(torch.empty(4), other, tag=5)
        each.wait()
    # batches
    ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    x.zero_()
    # coalesced
    a, b = torch.ones(3), torch.ones(2)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    refused(a.sum)
    manager.wait()
    a.sum()
    dist.all_reduce_coalesced([a, b], async_op=True).wait()
    b.sum()
    # memory that is used again by another tensor
    for _ in range(20):
        dist.isend(torch.full((5000,), 1.0), other, tag=9)
        gc.collect()
        received = torch.zeros(5000)
        dist.recv(received, other, tag=9)
    # objects
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    # another order than the group's is kept by waiting
    first, second = torch.ones(2), torch.ones(2)
    outputs = torch.zeros(4)
    reading = dist.all_gather_single(outputs, first, async_op=True)
    writing = dist.all_reduce(first, async_op=True)
    writing.wait()
    reading.wait()
    assert dist.all_reduce(second, async_op=True).wait()
    return "done"


@THREADS_AND_PROCESSES
def test_there_are_no_false_alarms(detail, ranks):
    assert run_ranks(patterns, 2, ranks=ranks) == ["done"] * 2


def test_there_are_none_if_operations_are_derived(detail):
    assert run_ranks(patterns, 2, backend=MemoryBackend.name) == ["done"] * 2


def test_methods_of_tensors_are_put_back(detail):
    def body():
        return [vars(torch.Tensor).get(name) for name in names]

    names = list(in_flight._readers)
    before = body()
    during, _ = run_ranks(body, 2)
    assert not set(before) & set(during)
    assert body() == before


def test_nothing_is_watched_below_detail(monkeypatch):
    for name in levels.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(levels, "_level", None)

    def body():
        x = torch.zeros(3)
        work = dist.all_reduce(x, async_op=True)
        x.sum()
        work.wait()
        return in_flight._KEY.is_included()

    assert run_ranks(body, 2) == [False, False]


def test_a_thread_is_no_longer_looked_at_when_the_level_falls(detail):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.zeros(3)
        work = dist.all_reduce(x, async_op=True)
        refused(x.sum)
        assert in_flight._KEY.is_included()
        dist.set_debug_level(dist.DebugLevel.OFF)
        x.sum()
        assert not in_flight._KEY.is_included()
        work.wait()
    finally:
        dist.destroy_process_group()


def through_torch():
    """Touch tensors of torch's works; then let torch's own code have works in flight."""
    torch_dist = torch.distributed
    x = torch.ones(8)
    work = torch_dist.all_reduce(x, async_op=True)
    told = [refused(x.sum)]
    work.wait()
    x.sum()
    outputs = torch.zeros(16)
    work = torch_dist.all_gather_into_tensor(outputs, x, async_op=True)
    x.sum()
    told += [refused(x.zero_), refused(outputs.sum)]
    future = work.get_future()
    future.wait()
    outputs.sum()
    gathered = fc.all_gather_tensor(x, 0, torch_dist.group.WORLD)
    assert gathered.sum() == 32
    assert fc.all_reduce(x, "sum", torch_dist.group.WORLD)[1:].sum() == 28
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), bucket_cap_mb=0.0001)
    for _ in range(2):
        model(x).sum().backward()
    return told


def test_works_of_torch_distributed_are_looked_after(detail):
    for rank, told in enumerate(run_torch(through_torch, 2)):
        assert told[0].startswith(f"rank {rank} reads a tensor that all_reduce #")
        assert f"rank {rank} writes a tensor that all_gather" in told[1]
        assert "still reads" in told[1]
        assert "still writes" in told[2]
        for text in told:  # the lines are the program's, not torch's
            assert text.count("test_in_flight.py:") == 2, text


def test_compiled_code_is_left_alone(detail):
    def body():
        x, other = torch.ones(8), torch.ones(8)
        double = torch.compile(lambda t: t * 2 + 1, backend="eager")
        listed = torch.compile(lambda t: t.tolist(), backend="eager")
        work = dist.all_reduce(x, async_op=True)
        found = listed(double(other))
        work.wait()
        return found, double(x).tolist()

    assert run_ranks(body, 2) == [([3.0] * 8, [5.0] * 8)] * 2


def test_training_is_not_disturbed(detail):
    def body():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
        ddp = dist.DistributedDataParallel(model, bucket_cap_mb=0.005)
        optimizer = torch.optim.AdamW(ddp.parameters())
        for _ in range(3):
            ddp(torch.randn(4, 32)).sum().backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.sum().item() for parameter in model.parameters()]

    first, second = run_ranks(body, 2)
    assert first == second
    assert np.isfinite(first).all()
