"""What calls of torch.distributed do on Phalanx is what they do on Gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from phalanx.testing import run_ranks
from tests.torch_ranks import Outcomes


def values(count, rank=None):
    """What a rank brings: other numbers on each rank and in each place."""
    return torch.arange(count) + 10.0 * (dist.get_rank() if rank is None else rank) + 1


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(
        _shared_memory,
        _methods_of_torchs_group,
        _what_modes_see,
        _counts_of_torchs,
        _modes_that_interfere,
    )


# Calls that share memory


def _shared_memory():
    results = {}
    size = dist.get_world_size()

    results["twice"] = tensor = values(5)
    dist.all_reduce_coalesced([tensor, tensor])
    results["views"] = tensor = values(5)
    dist.all_reduce_coalesced([tensor[1:4], tensor[:3]])
    results["strided"] = tensor = values(6)
    dist.all_reduce_coalesced([tensor[::2], tensor[1:]])
    results["async"] = tensor = values(20_000)
    dist.all_reduce_coalesced([tensor[5000:], tensor], async_op=True).wait()
    results["largest"] = tensor = values(3)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.MAX
    dist.group.WORLD.allreduce_coalesced([tensor, tensor], options).wait()
    results["one rank"] = tensor = values(4)
    other = tensor if dist.get_rank() == 0 else tensor.clone()
    dist.all_reduce_coalesced([tensor, other])

    for asynchronous in (False, True):
        results["manager", asynchronous] = tensor = values(5)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor[2:])
        if asynchronous:
            manager.wait()

        gathered, later = torch.full((2 * size,), -1.0), torch.zeros(2 * size)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_gather_into_tensor(gathered, values(2))
            dist.all_gather_into_tensor(later, gathered[:2])
        if asynchronous:
            manager.wait()
        results["gathered", asynchronous] = [gathered, later]

        given, again = values(2 * size), torch.zeros(2)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.reduce_scatter_tensor(given[:2], given)
            dist.reduce_scatter_tensor(again, given)
        if asynchronous:
            manager.wait()
        results["scattered", asynchronous] = [given, again]

    own = values(2)
    outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(size)]
    outputs[0][0] = own  # rank 0's goes where this rank's is
    dist.all_gather_coalesced(outputs, [own, own])
    results["lists"] = outputs
    return results


def test_coalesced_calls_read_all_before_they_write(outcomes):
    for results in outcomes.of(_shared_memory):
        assert results["twice"].tolist() == [12.0, 14.0, 16.0, 18.0, 20.0]
        assert results["views"].tolist()[:4] == [12.0, 14.0, 16.0, 18.0]
        assert results["gathered", True][1].tolist() == [-1.0] * 4


# Methods of groups

SOON = timedelta(seconds=40)


def _methods_of_torchs_group():
    return _methods(dist.group.WORLD, c10d)


def _methods_of_our_group():
    return _methods(phalanx.group.WORLD, phalanx)


def _methods(group, classes):
    """Make every call that a group has, in every form, and return what comes of it."""
    rank, size = group.rank(), group.size()
    root = size - 1
    results = {}

    def told(kind, **values):
        options = getattr(classes, kind)()
        for name, value in values.items():
            setattr(options, name, value)
        return options

    def keep(name, work, *tensors):
        work.wait()
        results[name] = [tensor.clone() for tensor in tensors]

    def own(count=3):
        return values(count, rank)

    largest, product = classes.ReduceOp.MAX, classes.ReduceOp.PRODUCT

    t = own()
    keep("allreduce", group.allreduce([t], told("AllreduceOptions", reduceOp=largest)), t)
    t = own()
    keep("allreduce: default", group.allreduce([t], told("AllreduceOptions")), t)
    t = own()
    keep("allreduce: op", group.allreduce([t], product), t)
    t = own()
    keep("allreduce: names", group.allreduce(tensors=[t], op=largest, timeout=SOON), t)
    t = own()
    keep("allreduce: tensor", group.allreduce(tensor=t, op=product), t)
    t, u = own(), own() + 100
    keep("allreduce: several", group.allreduce([t, u]), t, u)
    t = own()
    options = told("AllreduceOptions", asyncOp=False, timeout=SOON)
    keep("allreduce: waiting", group.allreduce([t], opts=options), t)

    t, u = own(), own(4)
    options = told("AllreduceCoalescedOptions", reduceOp=largest)
    keep("allreduce_coalesced", group.allreduce_coalesced([t, u, t], options), t, u)
    t, u = own(), own(4)
    keep("allreduce_coalesced: default", group.allreduce_coalesced([t, u]), t, u)

    t = own()
    keep("broadcast", group.broadcast([t], told("BroadcastOptions", rootRank=root)), t)
    t = own()
    keep("broadcast: root", group.broadcast(t, root=root, timeout=SOON), t)
    t = own()
    keep("broadcast: default", group.broadcast([t]), t)
    t, u = own(), own() + 100
    options = told("BroadcastOptions", rootRank=root, rootTensor=1)
    keep("broadcast: several", group.broadcast([t, u], options), t, u)

    def at_root(*tensors):
        return tensors if rank == root else ()

    t = own()
    options = told("ReduceOptions", rootRank=root, reduceOp=largest)
    keep("reduce", group.reduce([t], options), *at_root(t))
    t = own()
    keep("reduce: root", group.reduce(t, root, product), *at_root(t))
    t = own()
    keep("reduce: names", group.reduce(tensor=t, root=root, op=product), *at_root(t))

    def room(count=3):
        return list(torch.zeros(size, count))

    outputs = room()
    work = group.allgather([outputs], [own()], told("AllgatherOptions", timeout=SOON))
    keep("allgather", work, *outputs)
    outputs = room()
    keep("allgather: default", group.allgather([outputs], [own()]), *outputs)
    outputs = room()
    keep("allgather: tensor", group.allgather(outputs, own(), SOON), *outputs)
    outputs = room()
    work = group.allgather(output_tensors=outputs, input_tensor=own())
    keep("allgather: names", work, *outputs)
    output = torch.zeros(3 * size)
    keep("_allgather_base", group._allgather_base(output, own()), output)
    output = torch.zeros(3 * size)
    work = group._allgather_base(output, own(), told("AllgatherOptions"))
    keep("_allgather_base: options", work, output)
    lists = [[torch.zeros(3), torch.zeros(2)] for _ in range(size)]
    work = group.allgather_coalesced(lists, [own(), own(2) + 100], told("AllgatherOptions"))
    keep("allgather_coalesced", work, *(each for pair in lists for each in pair))
    t, u = torch.zeros(3 * size), torch.zeros(2 * size)
    work = group.allgather_into_tensor_coalesced([t, u], [own(), own(2) + 100])
    keep("allgather_into_tensor_coalesced", work, t, u)

    outputs = room() if rank == root else []
    given = [outputs] if outputs else []
    options = told("GatherOptions", rootRank=root)
    keep("gather", group.gather(given, [own()], options), *outputs)
    keep("gather: root", group.gather(outputs, own() + 100, root), *outputs)

    parts = [own() + 100 * i for i in range(size)] if rank == root else []
    t = torch.zeros(3)
    given = [parts] if parts else []
    work = group.scatter([t], given, told("ScatterOptions", rootRank=root))
    keep("scatter", work, t)
    t = torch.zeros(3)
    keep("scatter: root", group.scatter(t, parts, root=root, timeout=SOON), t)

    parts = [own() + 100 * i for i in range(size)]
    t = torch.zeros(3)
    options = told("ReduceScatterOptions", reduceOp=largest)
    keep("reduce_scatter", group.reduce_scatter([t], [parts], options), t)
    t = torch.zeros(3)
    keep("reduce_scatter: op", group.reduce_scatter(output=t, input=parts, op=product), t)
    t = torch.zeros(3)
    keep("_reduce_scatter_base", group._reduce_scatter_base(t, torch.cat(parts), options), t)
    t, u = torch.zeros(3), torch.zeros(2)
    given = [torch.cat(parts), own(2 * size)]
    work = group.reduce_scatter_tensor_coalesced([t, u], given, options)
    keep("reduce_scatter_tensor_coalesced", work, t, u)

    outputs = room()
    options = told("AllToAllOptions", timeout=SOON)
    keep("alltoall", group.alltoall(outputs, parts, options), *outputs)
    output = torch.zeros(3 * size)
    keep("alltoall_base", group.alltoall_base(output, torch.cat(parts), [], []), output)
    theirs = [1] * size
    theirs[0] = 2 if rank == 0 else 1
    ours = [2 if i == rank == 0 else 1 for i in range(size)]
    output = torch.zeros(sum(theirs))
    work = group.alltoall_base(output, own(sum(ours)), theirs, ours, options)
    keep("alltoall_base: splits", work, output)

    keep("barrier", group.barrier(told("BarrierOptions")))
    keep("barrier: default", group.barrier())
    keep("barrier: timeout", group.barrier(timeout=SOON))

    works = [group.send([own()], (rank + 1) % size, 3)]
    t = torch.zeros(3)
    keep("recv", group.recv([t], (rank - 1) % size, 3), t)
    works.append(group.send([own(2)], (rank + 1) % size, 4))
    t = torch.zeros(2)
    keep("recv_anysource", group.recv_anysource([t], 4), t)
    for work in works:
        work.wait()
    return results


def test_methods_of_a_group_take_torchs_options(outcomes):
    theirs = outcomes.of(_methods_of_torchs_group)
    ours = run_ranks(_methods_of_our_group, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


KINDS = "Allgather Allreduce AllreduceCoalesced AllToAll Barrier Broadcast Gather Reduce"


@pytest.mark.parametrize("name", [*KINDS.split(), "ReduceScatter", "Scatter"])
def test_options_have_what_torchs_have(name):
    ours, theirs = (getattr(module, f"{name}Options")() for module in (phalanx, c10d))
    names = [each for each in dir(theirs) if not each.startswith("_")]
    assert [each for each in dir(ours) if not each.startswith("_")] == names
    for each in names:
        ours_is, theirs_is = getattr(ours, each), getattr(theirs, each)
        if each == "reduceOp":
            assert ours_is == phalanx.ReduceOp(theirs_is) == phalanx.ReduceOp.SUM
        else:
            assert ours_is == theirs_is
            assert type(ours_is) is type(theirs_is)
    with pytest.raises(AttributeError):
        ours.timeOut = SOON


def _options_count():
    group, rank = phalanx.group.WORLD, phalanx.get_rank()
    options = phalanx.AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([t := values(3, rank)], options)
    assert work.is_success()
    assert work.result()[0] is t
    assert t.tolist() == [12.0, 14.0, 16.0]
    # Torch's own options, and its reductions.
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([t := values(3, rank)], options).wait()
    assert t.tolist() == [11.0, 12.0, 13.0]
    with pytest.raises(TypeError, match=r"takes ReduceOptions .* got BroadcastOptions"):
        group.reduce([t], phalanx.BroadcastOptions())
    with pytest.raises(TypeError, match="nothing beside it"):
        group.reduce([t], phalanx.ReduceOptions(), timeout=1)
    options = phalanx.BroadcastOptions()
    options.rootTensor = 2
    with pytest.raises(ValueError, match="rootTensor is 2, but there are 1"):
        group.broadcast([t], options)
    with pytest.raises(ValueError, match="list of one tensor"):
        group.allreduce([t, t], phalanx.ReduceOp.AVG)
    # Methods run at once, also where functions are collected.
    with phalanx._coalescing_manager():
        group.allreduce([t := values(3, rank)]).wait()
        assert t.tolist() == [12.0, 14.0, 16.0]


def _timeouts_count():
    group, store = phalanx.group.WORLD, phalanx.group.WORLD.get_group_store()
    if group.rank() == 1:
        store.wait(["given up"])  # by rank 0, which nobody has joined in any call
    for name, args in _calls_alone(group).items():
        with pytest.raises(
            phalanx.DistTimeout, match="0.02 s" if group.rank() == 0 else "given up"
        ):
            getattr(group, name)(*args).wait()
    store.set("given up", "")
    phalanx.barrier()


def _calls_alone(group):
    """Arguments of the methods that take options, with a short timeout."""

    def soon(kind):
        options = getattr(phalanx, f"{kind}Options")()
        options.timeout = timedelta(milliseconds=20)
        return options

    pair, four, two = list(torch.zeros(2, 2)), torch.zeros(4), torch.zeros(2)
    is_root = group.rank() == 0
    return {
        "allreduce": ([two], soon("Allreduce")),
        "allreduce_coalesced": ([two, two.clone()], soon("AllreduceCoalesced")),
        "broadcast": ([two], soon("Broadcast")),
        "reduce": ([two], soon("Reduce")),
        "allgather": ([pair], [two], soon("Allgather")),
        "_allgather_base": (four, two, soon("Allgather")),
        "allgather_coalesced": ([[each] for each in pair], [two], soon("Allgather")),
        "allgather_into_tensor_coalesced": ([four], [two], soon("Allgather")),
        "gather": ([pair] if is_root else [], [two], soon("Gather")),
        "scatter": ([two], [pair] if is_root else [], soon("Scatter")),
        "reduce_scatter": ([two], [pair], soon("ReduceScatter")),
        "_reduce_scatter_base": (two, four, soon("ReduceScatter")),
        "reduce_scatter_tensor_coalesced": ([two], [four], soon("ReduceScatter")),
        "alltoall": (pair, [each.clone() for each in pair], soon("AllToAll")),
        "alltoall_base": (four, four.clone(), [], [], soon("AllToAll")),
        "barrier": (soon("Barrier"),),
    }


def test_what_options_say_counts():
    run_ranks(_options_count, 2)


def test_each_method_has_its_timeout():
    run_ranks(_timeouts_count, 2)


# Dispatch modes


class Looking(TorchDispatchMode):
    """Notes the operators that are not torch's own, and what they are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            self.seen.append((str(func), _shown(args), kwargs or {}))
        return func(*args, **kwargs or {})


def _shown(value):
    """Say what an argument is; of tensors the shape, since they may be written at any time."""
    if isinstance(value, torch.Tensor):
        return value.layout, tuple(value.shape)
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if not isinstance(value, torch.ScriptObject):
        return value
    kind = str(value._type())
    if not kind.endswith("ProcessGroup"):
        return kind
    return c10d.ProcessGroup.unbox(value) is dist.group.WORLD


def _plain(value):
    """Return tensors as numbers."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _calls_for_modes():
    """Return, by name, calls of torch.distributed, each with the tensors that it gives back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD

    def own(count=3):
        return values(count)

    def many(count=3):
        return [own(count) + 100 * i for i in range(size)]

    def at_root(tensors):
        return tensors if rank == 1 else None

    def messages():
        given, taken = own(), own()
        operations = [
            dist.P2POp(dist.isend, given, 1 - rank),
            dist.P2POp(dist.irecv, taken, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return taken

    def any_message():
        work = dist.isend(own(), 1 - rank)
        dist.recv(taken := own())
        work.wait()
        return taken

    def coalesced(function, *pairs):
        with dist._coalescing_manager():
            for pair in pairs:
                function(*pair)
        return pairs

    def waited(function, *args, **kwargs):
        function(*args, **kwargs, async_op=True).wait()
        return args

    def done(function, *args, **kwargs):
        function(*args, **kwargs)
        return args

    return {
        "all_reduce": lambda: done(dist.all_reduce, own()),
        "asynchronous": lambda: waited(dist.all_reduce, own(), op=dist.ReduceOp.MAX),
        "all_reduce_coalesced": lambda: done(dist.all_reduce_coalesced, many()),
        "broadcast": lambda: done(dist.broadcast, own(), 1),
        "reduce": lambda: done(dist.reduce, own(), 0)[0] * (rank == 0),
        "all_gather": lambda: done(dist.all_gather, many(), own()),
        "all_gather_single": lambda: waited(dist.all_gather_into_tensor, own(3 * size), own()),
        "all_gather_coalesced": lambda: done(
            dist.all_gather_coalesced, [many(2) for _ in range(size)], many(2)
        ),
        "gather": lambda: done(dist.gather, own(), at_root(many()), 1),
        "scatter": lambda: done(dist.scatter, own(), at_root(many()), 1),
        "reduce_scatter": lambda: done(dist.reduce_scatter, own(), many()),
        "reduce_scatter_single": lambda: done(dist.reduce_scatter_tensor, own(), own(3 * size)),
        "all_to_all": lambda: waited(dist.all_to_all, many(), many()),
        "all_to_all_single": lambda: done(dist.all_to_all_single, own(2 * size), own(2 * size)),
        "barrier": lambda: done(dist.barrier),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=SOON),
        "messages": messages,
        "any message": any_message,
        "objects": lambda: done(dist.all_gather_object, [None] * size, ("object", rank)),
        "manager": lambda: coalesced(dist.all_reduce, [own()], [own(2)]),
        "manager, gathering": lambda: coalesced(
            dist.all_gather_into_tensor, [own(3 * size), own()], [own(2 * size), own(2)]
        ),
        "manager, scattering": lambda: coalesced(
            dist.reduce_scatter_tensor, [own(), own(3 * size)], [own(2), own(2 * size)]
        ),
        "method": lambda: world.allreduce([own()]).wait(),
        "methods": lambda: world.alltoall_base(own(2 * size), own(2 * size), [], []).wait(),
        "sparse": lambda: done(dist.all_reduce, own().to_sparse())[0].to_dense(),
        "functional": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(own(), "sum", world.group_name)
        ),
    }


def _what_modes_see():
    results = {}
    for name, call in _calls_for_modes().items():
        with Looking() as outer, Looking() as inner:
            results[name] = [_plain(call())]
        assert inner.seen == outer.seen  # each of them sees each call once
        results[name] += [_plain(call()), inner.seen]  # and without modes the same is done
    return results


def test_modes_see_each_call_once(outcomes):
    for results in outcomes.equal(_what_modes_see):
        assert len(results) > 20
        for name, (seen, unseen, operators) in results.items():
            assert seen == unseen
            assert operators, name
            assert name in ("objects", "messages", "any message", "functional") or (
                len(operators) == 1
            )


def _counts_of_torchs():
    with CommDebugMode() as mode:
        for call in _calls_for_modes().values():
            call()
        model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
        model(values(3)).sum().backward()
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


def test_the_mode_that_counts_collectives_counts_them(outcomes):
    for counts in outcomes.equal(_counts_of_torchs):
        assert counts["c10d.allreduce_"] > 3
        assert counts["c10d.scatter_"] == 1


class Replacing(TorchDispatchMode):
    """Calls nothing, calls something else, or calls what raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.barrier.default:
            dist.all_reduce(self.total, group=self.other)  # on its own account
        if func is torch.ops.c10d.broadcast_.default:
            args = ([tensor.clone() for tensor in args[0]], *args[1:])
        return func(*args, **kwargs or {})


def _modes_that_interfere():
    rank = dist.get_rank()
    mode = Replacing()
    mode.total, mode.other = values(2), dist.new_group(backend="gloo")
    own = dist.new_group()
    with mode:
        dist.barrier()
        dist.broadcast(kept := values(2), 0)
        if dist.get_backend() == "phalanx":
            with pytest.raises(phalanx.CollectiveMismatch):
                dist.all_reduce(torch.ones(2 + rank))
        dist.all_reduce(total := values(2), group=own)
    assert mode.total.tolist() == total.tolist() == [12.0, 14.0]
    assert kept.tolist() == values(2).tolist()  # a copy of it was written
    dist.all_reduce(again := values(2), group=mode.other)
    assert again.tolist() == [12.0, 14.0]


def test_modes_may_interfere(outcomes):
    outcomes.equal(_modes_that_interfere)
