"""Groups on engines that others wrote: Gloo, any process group of torch's, one per device."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from words import listen, tell

import phalanx as dist
from phalanx import logs, world
from phalanx.backends.base import COLLECTIVES
from phalanx.backends.engines import addresses, frames
from phalanx.backends.engines.mailbox import Arrival, Failure, Gate, Mailbox, Receipt
from phalanx.backends.registry import BackendOptions, served
from phalanx.stores import HashStore, PrefixStore, TCPStore
from phalanx.stores.addresses import is_loopback, way_to
from phalanx.testing import backend_kit
from phalanx.testing.backend_kit import check_backend, endings
from phalanx.testing.memory import Exchange, MemoryBackend
from phalanx.testing.ranks import run_ranks

on_gloo = partial(run_ranks, backend="gloo")


def options(rank, size, store, **others):
    told = {"timeout": 30.0, "group_id": "some", "global_ranks": list(range(size)), **others}
    return BackendOptions(store=store, group_rank=rank, group_size=size, threads=True, **told)


def make_gloo(rank, size, shared):
    from phalanx.backends.engines import torch_engine

    return torch_engine.create_gloo(options(rank, size, shared.setdefault("store", HashStore())))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_keeps_the_contract(size):
    before = threading.active_count()
    check_backend(make_gloo, [size])
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # threads that have been told to end
    assert threading.active_count() <= before


@pytest.mark.parametrize("name", sorted(COLLECTIVES - {"coalesce", "monitored_barrier"}))
def test_gloo_gives_a_call_the_time_that_it_asks_for(name):
    def be_alone(backend):  # a collective that was given up is a group's last one
        if backend.rank == 0:
            (args,) = (args for each, args in endings.needing_others(backend) if each == name)
            with pytest.raises(dist.DistTimeout, match=r"waiting for rank 1.* 0\.02 s"):
                getattr(backend, name)(*args, timeout=0.02)
            backend.send(torch.ones(1), 1)
        else:
            backend.recv(torch.ones(1), 0)

    backend_kit._Team(make_gloo, 2).check(be_alone, 60)


def every_kind_of_call():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "gloo"
    total = torch.full((3,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    large = torch.full((50_000,), rank + 1, dtype=torch.int32)
    work = dist.all_reduce(large, async_op=True)
    work.wait()
    pair = dist.new_group([0, 2])
    found = [None, None]
    if rank != 1:
        dist.all_gather_object(found, {"rank": rank}, group=pair)
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(20_000)
    sent = dist.isend(torch.full((20_000,), float(rank)), right, tag=5)
    source = dist.recv(got, tag=5)
    sent.wait()
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.get_group("all"))
    model = dist.DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    dist.monitored_barrier()
    return (
        total.tolist(),
        large.unique().tolist(),
        found,
        (source == left, got.unique().tolist()),
        one.item(),
        model.module.weight.grad.unique().tolist(),
    )


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_everything_runs_on_gloo(ranks):
    results = on_gloo(every_kind_of_call, 3, ranks=ranks)
    for rank, (total, large, found, received, one, gradient) in enumerate(results):
        assert (total, large, one, gradient) == ([1.0] * 3, [6], 3.0, [1.0])
        assert found == ([None, None] if rank == 1 else [{"rank": 0}, {"rank": 2}])
        assert received == (True, [float((rank - 1) % 3)])


def be_killed(numel: int, late: bool):
    tell("here")  # all have made the group, not only those that were quick
    if dist.get_rank() == 2:
        listen("here", 3)
        os.kill(os.getpid(), signal.SIGKILL)
    if late:
        time.sleep(0.5)
    dist.all_reduce(torch.ones(numel))


@pytest.mark.parametrize("numel", [10, 50_000])
@pytest.mark.parametrize("late", [False, True])
def test_a_dead_rank_is_named_by_the_others(numel, late):
    results = on_gloo(be_killed, 3, numel, late, ranks="processes", return_exceptions=True)
    for error in results[:2]:
        assert isinstance(error, dist.PeerFailed)
        for fact in ("connection to rank 2 is gone", f"all_reduce(SUM, float32[{numel}]) #1"):
            assert fact in str(error)
        assert "test_engines.py" in str(error)


def test_a_rank_that_only_sends_hears_that_the_others_are_out_of_step():
    def body():
        tensor = torch.ones(100_000)
        calls = [
            partial(dist.broadcast, tensor, 0),
            partial(dist.broadcast, tensor[1:], 0),
            partial(dist.reduce, tensor, 1),
        ]
        with pytest.raises(dist.CollectiveMismatch) as caught:
            calls[dist.get_rank()]()
        return str(caught.value)

    for said in on_gloo(body, 3, group_timeout=30):
        assert "broadcast(" in said


def test_who_leaves_and_who_fails_is_told():
    def leave():
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(dist.PeerFailed) as caught:
            dist.recv(torch.ones(1), 1, tag=3)
        return str(caught.value)

    assert "recv from rank 1 (tag 3) on rank 0" in on_gloo(leave, 2)[0]

    def fail():
        if dist.get_rank() == 1:
            raise ValueError("enough of it")
        dist.barrier()

    first, second = on_gloo(fail, 2, return_exceptions=True)
    assert isinstance(first, dist.PeerFailed)
    assert "enough of it" in str(first)
    assert isinstance(second, ValueError)


def test_collectives_that_differ_are_found_before_anything_is_written():
    def body():
        tensor = torch.full((4,), 7.0)
        with pytest.raises(dist.CollectiveMismatch) as caught:
            dist.all_reduce(tensor[: 4 - dist.get_rank()])
        assert tensor.tolist() == [7.0] * 4
        with pytest.raises(dist.DistBackendError):  # who is out of step stays so
            dist.barrier()
        return str(caught.value)

    for text in on_gloo(body, 2):
        assert "rank 0: all_reduce(SUM, float32[4]) #1, test_engines.py" in text
        assert "rank 1: all_reduce(SUM, float32[3]) #1, test_engines.py" in text


@pytest.mark.parametrize("level", list(dist.DebugLevel))
def test_shapes_of_as_many_elements_may_differ_below_detail(level, caplog):
    def body():
        rank = dist.get_rank()
        dist.set_debug_level(level)
        tensor = torch.arange(6.0).reshape((1, 6) if rank == 0 else (2, 3)) * (rank + 1)
        if level is dist.DebugLevel.DETAIL:
            with pytest.raises(dist.CollectiveMismatch, match=r"different shapes.*DETAIL"):
                dist.all_reduce(tensor)
            return
        for _ in range(2):
            dist.all_reduce(tensor)
        assert tensor.flatten().tolist() == [6.0 * each for each in range(6)]

    before = dist.get_debug_level()
    try:
        with caplog.at_level(logging.INFO, "phalanx.collectives"):
            on_gloo(body, 2)
    finally:
        dist.set_debug_level(before)
        logs.show(None)
    said = [r for r in caplog.records if r.name == "phalanx.collectives"]
    assert len(said) == (level is dist.DebugLevel.INFO)


def test_a_message_of_another_size_is_refused_and_the_next_one_is_not():
    def body():
        if dist.get_rank() == 0:
            for count in (5, 20_000):
                dist.send(torch.ones(count), 1)
                dist.send(torch.ones(3), 1)
            return None
        said = []
        for _ in range(2):
            tensor = torch.zeros(3)
            with pytest.raises(dist.DistBackendError, match="one size") as caught:
                dist.recv(tensor, 0)
            said.append(str(caught.value))
            assert tensor.tolist() == [0, 0, 0]
            dist.recv(tensor, 0)
            assert tensor.tolist() == [1, 1, 1]
        return said

    few, many = on_gloo(body, 2)[1]
    assert "has 20 bytes" in few
    assert "has 80000 bytes" in many


def test_running_out_of_time_in_a_collective_ends_the_collectives_of_a_group():
    late = threading.Event()

    def body():
        group = dist.new_group()
        if dist.get_rank() == 1:
            late.wait(30)
            with suppress(dist.DistBackendError):  # what rank 0 gave to it may have come
                dist.all_reduce(torch.ones(1), group=group)
            with pytest.raises(dist.DistBackendError, match="rank 0 is out of step"):
                dist.all_reduce(torch.ones(1), group=group)
        else:
            group.set_timeout(0.2)
            with pytest.raises(dist.DistTimeout, match=r"waiting for rank 1.* 0.2 s.*any more"):
                dist.all_reduce(torch.ones(1), group=group)
            late.set()
            with pytest.raises(dist.DistBackendError, match="no collectives any more"):
                dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()  # other groups go on

    on_gloo(body, 2)


def test_the_first_reason_why_nothing_comes_is_kept():
    first, second = (Failure(dist.DistBackendError, text) for text in ("first", "second"))
    for end, kept in (("end_collectives", "out_of_step"), ("break_off", "broken")):
        mailbox = Mailbox(0, 2)
        for failure in (first, second):
            getattr(mailbox, end)(failure)
            assert getattr(mailbox, kept) is first
    mailbox = Mailbox(0, 2)
    for failure in (first, second):
        mailbox.lose(1, failure)
    assert mailbox.gone == {1: first}


def test_a_payload_that_nobody_takes_is_given_up():
    def body():
        group = dist.new_group()
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistTimeout, match="not taken"):
                group.backend.send(torch.ones(100_000), 1, timeout=0.1)
            with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
                group.backend.send(torch.ones(100_000), 1)
        dist.barrier()
        with pytest.raises(dist.DistBackendError):
            dist.barrier(group)

    on_gloo(body, 2)


def test_a_waiting_rank_can_be_interrupted():
    """The main thread is rank 0, and gets a signal while it waits."""
    store, over = HashStore(), threading.Event()

    def other():
        with world.bind(world.Slot()):
            dist.init_process_group("gloo", store=store, rank=1, world_size=2)
            over.wait(30)
            dist.destroy_process_group()

    thread = threading.Thread(target=other)
    thread.start()

    def interrupt(*_):
        raise InterruptedError

    def alarmed(call, *args):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        call(*args)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with world.bind(world.Slot()):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2)
            with pytest.raises(InterruptedError):
                alarmed(dist.recv, torch.ones(1), 1)
            with pytest.raises(InterruptedError):
                alarmed(dist.barrier)
            over.set()
            dist.destroy_process_group()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join()


def test_a_group_that_not_all_make_names_who_is_missing():
    with world.bind(world.Slot()):
        backend = options(0, 3, HashStore(), timeout=0.1, global_ranks=[0, 4, 7])
        backend.store.set("address/1", "here")
        from phalanx.backends.engines import torch_engine

        with pytest.raises(dist.DistTimeout, match="rank 7 did not call"):
            torch_engine.create_gloo(backend)


def test_a_group_is_not_waited_for_with_a_rank_that_has_failed():
    failing = threading.Event()

    def body():
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
            world.current_slot().fail("has had enough")
            failing.set()
            return
        dist.send(torch.ones(1), 1)
        failing.wait(30)
        with pytest.raises(dist.PeerFailed, match=r"making of group .*: rank 1 has had enough"):
            dist.new_group(timeout=60)

    on_gloo(body, 2)


# Labels: what the hierarchy, and collectives, put beside a message


def test_a_message_can_be_labelled_and_refused():
    def body():
        backend = world.here().default.backend
        if backend.rank == 0:
            for label in (b"first", b"second"):
                backend.send(torch.ones(10_000), 1, label=label)
            return None
        seen = []

        def refuse(source, frame):
            seen.append((source, frame.label))
            return Failure(dist.CollectiveMismatch, "not this one")

        with pytest.raises(dist.CollectiveMismatch, match="not this one"):
            backend.recv(torch.empty(10_000), 0, accept=refuse)
        tensor = torch.empty(10_000)
        backend.recv(tensor, 0, accept=lambda source, frame: seen.append((source, frame.label)))
        assert tensor.unique().tolist() == [1]
        return seen

    assert on_gloo(body, 2)[1] == [(0, b"first"), (0, b"second")]


def foresee(first, theirs):
    """Exchange what both ranks foresee; rank ``first`` is there first."""
    backend = world.here().default.backend
    labels = []
    for turn, count in enumerate([20_000, theirs if backend.rank else 30_000, 40_000]):
        if backend.rank != first:
            backend.recv(torch.empty(1), first, 1)
        accept = [None, Failure(dist.CollectiveMismatch, "not this one")][turn == 1]
        tensor = torch.zeros(count)
        receipt = backend.recv(
            tensor,
            1 - backend.rank,
            async_op=True,
            accept=lambda source, frame, accept=accept: labels.append(frame.label) or accept,
            foreseen=True,
        )
        if backend.rank == first:
            backend.send(torch.ones(1), 1 - first, 1)
        sent = torch.full((count,), turn + 1.0)
        work = backend.send(
            sent, 1 - backend.rank, async_op=True, label=b"%d" % turn, foreseen=True
        )
        if accept is None:
            receipt.wait()
            assert tensor.unique().tolist() == [turn + 1]
        else:
            with pytest.raises(dist.CollectiveMismatch, match="not this one"):
                receipt.wait()
        work.wait()
    return labels


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("theirs", [30_000, 29_999])
def test_what_both_ranks_foresee_is_told_apart_by_its_size(first, theirs):
    assert on_gloo(foresee, 2, first, theirs) == [[b"0", b"1", b"2"]] * 2


def message(source, tag=0, text=b"x"):
    return Arrival(source, frames.Frame(frames.MESSAGE, tag, len(text), 0, b"", text))


def receipt(source, tag=0):
    made = Receipt(str, torch.empty(1), 1.0, Gate.wait, pytest.fail)
    made.source, made.tag = source, tag
    return made


def test_the_mailbox_keeps_the_order_per_tag():
    box = Mailbox(0, 3)
    first, second, other = message(1, text=b"a"), message(1, text=b"b"), message(1, tag=4)
    for arrival in (first, second, other):
        assert box.deliver(arrival) is None
    assert box.post(receipt(1, tag=4)) is other
    assert box.post(receipt(2)) is None
    assert box.post(receipt(None)) is first
    assert box.post(receipt(1)) is second
    anybody, one = receipt(None), receipt(1)
    box.post(anybody)
    box.post(one)
    assert box.deliver(first) is anybody
    assert box.deliver(second) is one
    assert not box.withdraw(one)


def test_the_mailbox_gives_up_what_cannot_come():
    box = Mailbox(0, 3)
    left, failed = Failure(dist.PeerFailed, "left"), Failure(dist.PeerFailed, "failed", True)
    waiting = [receipt(1), receipt(2), receipt(None), receipt(2, tag=-1)]
    assert [box.post(each) for each in waiting] == [None] * 4
    box.lose(1, left)
    assert [each.done.is_set() for each in waiting] == [True, False, False, False]
    box.lose(2, failed)
    assert all(each.done.is_set() for each in waiting)
    assert "failed" in str(waiting[3].exception())
    late = receipt(1)
    box.post(late)
    with pytest.raises(dist.PeerFailed, match="left"):
        late.wait()


# Addresses


def test_addresses():
    assert is_loopback("127.0.1.1")
    assert not is_loopback("10.1.2.3")
    assert way_to("127.0.0.1", 9) == "127.0.0.1"
    assert way_to("no-such-host.invalid", 9) == ""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert addresses.own_address(PrefixStore("a", PrefixStore("b", store))) == "127.0.0.1"


@pytest.mark.parametrize("who", ["other", "own"])
def test_a_loopback_address_is_of_no_use_to_another_host(who):
    theirs, own = ("127.0.0.1", "10.0.0.1") if who == "other" else ("10.0.0.2", "127.0.0.1")
    own, theirs = f"here\nnear\n{own}\n{own}\n1", f"elsewhere\nfar\n{theirs}\n{theirs}\n1"
    with pytest.raises(dist.DistNetworkError) as caught:
        addresses._places([own, theirs], 0, [3, 5])
    expected = "rank 3 cannot reach rank 5" if who == "other" else "rank 5 cannot reach rank 3"
    assert expected in str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)


def test_an_interface_that_is_not_there_is_told_to_all(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(dist.DistNetworkError, match=r"'nowhere0' .*interfaces: .*lo"):
            addresses.exchanged(options(rank, 2, store, timeout=1)).__enter__()
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses.own_address(store) == "127.0.0.1"


def test_who_cannot_reach_whom_is_told_when_connecting_fails(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(addresses, "is_loopback", lambda address: False)
    store = HashStore()
    store.set("address/1", f"elsewhere\nfar\n127.0.0.1\n127.0.0.1\n{port}")
    store.set("unreachable/1", "\n  what rank 5 has to say")

    def connect():
        with addresses.exchanged(options(0, 2, store, timeout=1, global_ranks=[3, 5])):
            raise RuntimeError("no")

    with pytest.raises(dist.DistNetworkError, match="what rank 5 has to say") as caught:
        connect()
    assert "rank 3 on host" in str(caught.value)
    assert "cannot reach rank 5 on host 'far' at 127.0.0.1: Connection refused" in str(caught.value)


# Devices


@pytest.fixture
def registered(monkeypatch):
    """Backends that are forgotten after the test."""
    from phalanx.backends.registry import Backend

    for table in ("_plugins", "backend_list", "backend_capability", "default_device_backend_map"):
        monkeypatch.setattr(Backend, table, getattr(Backend, table).copy())
    before = set(served)
    yield Backend
    served.clear()
    served.update(before)


class Echo(MemoryBackend):
    """Serves tensors of the device "meta", by noting what it is asked for."""

    name = "echo"
    calls: list[str] = []  # noqa: RUF012

    def all_reduce(self, tensor, op, squares=None, *, timeout=None, async_op=False):
        self.calls.append(f"all_reduce {tensor.device.type}")

    def send(self, tensor, dst, tag=0, *, timeout=None, async_op=False):
        self.calls.append(f"send {tensor.device.type}")


def test_operations_go_to_the_engine_of_their_device(registered):
    def make(store, rank, size, timeout):
        Echo.calls.append("made")
        return Echo(Exchange(size), rank, size, timeout)

    Echo.calls.clear()
    registered.register_backend("echo", make, devices="meta")
    with world.bind(world.Slot()):
        dist.init_process_group(
            "cpu:memory,meta:echo,cuda:nccl", store=HashStore(), rank=0, world_size=1
        )
        assert dist.get_backend_config() == "cpu:memory,meta:echo,cuda:nccl"
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.barrier()
        assert Echo.calls == []  # made when a tensor needs it
        dist.all_reduce(torch.ones(2, device="meta"))
        dist.isend(torch.ones(2, device="meta"), 0)
        assert Echo.calls == ["made", "all_reduce meta", "send meta"]
        with dist._coalescing_manager():
            dist.all_reduce(tensor)
            dist.all_reduce(torch.ones(2, device="meta"))
        assert Echo.calls[3:] == ["all_reduce meta"]
        with pytest.raises(dist.DistBackendError, match="one device, got cpu, meta"):
            dist.all_gather([torch.ones(2, device="meta")], tensor)
        router = world.here().default.backend
        with pytest.raises(dist.DistBackendError, match=r"'mps' .it has: cpu, cuda, meta"):
            router.engine("mps")
        with pytest.raises(dist.DistBackendError, match="built without nccl"):
            router.engine("cuda")
        assert (router.timeout, router.size) == (1800, 1)
        dist.destroy_process_group()


def test_cpu_tensors_are_served_beside_an_engine_of_another_device(registered):
    registered.register_backend(
        "echo",
        lambda store, rank, size, timeout: Echo(Exchange(size), rank, size, timeout),
        devices="meta",
    )

    def body():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(1, device="meta"))
        return tensor.item(), dist.get_backend()

    assert run_ranks(body, 2, backend="echo") == [(2, "echo")] * 2


# Process groups of torch's, by their own collectives: what NCCL is served by


def direct(rank, size, store):
    from phalanx.backends.engines import torch_engine

    told = options(rank, size, store)
    group = torch_engine.gloo_groups(told, 1)[0]
    return torch_engine.DirectEngine("gloo", "cpu", group, told, torch_engine._c10d)


def in_threads(body, size, make=direct):
    """Run ``body(backend)`` on a thread per rank and return what they return."""
    store, results, errors = HashStore(), [None] * size, []

    def run(rank):
        backend = make(rank, size, store)
        try:
            results[rank] = body(backend)
        except BaseException as error:
            errors.append(error)
            backend.abort("a test has failed")
        finally:
            backend.close()
            backend.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_the_collectives_of_a_process_group_of_torchs():
    size = 3

    def body(backend):
        rank = backend.rank
        base = torch.arange(6.0).view(2, 3) + 10 * rank
        everybody = [torch.arange(6.0).view(2, 3) + 10 * other for other in range(size)]
        total = sum(everybody)

        tensor = base.t().contiguous().t()  # not contiguous
        backend.all_reduce(tensor, dist.ReduceOp.SUM)
        assert torch.equal(tensor, total)
        squares = torch.zeros(1, dtype=torch.float64)
        tensor = base.clone()
        backend.all_reduce(tensor, dist.ReduceOp.MAX, squares)
        assert torch.equal(tensor, everybody[-1])
        assert squares.item() == everybody[-1].double().square().sum()

        tensor = base.clone()
        work = backend.broadcast(tensor, 1, async_op=True)
        work.wait()
        assert work.is_success()
        assert torch.equal(tensor, everybody[1])
        assert work.result()[0] is tensor

        tensor = base.clone()
        backend.reduce(tensor, 2, dist.ReduceOp.SUM)
        assert torch.equal(tensor, total if rank == 2 else base)

        outputs = [torch.zeros(2, 3) for _ in range(size)]
        backend.all_gather(outputs, base)
        assert all(map(torch.equal, outputs, everybody))
        uneven = [torch.zeros(other + 1) for other in range(size)]
        backend.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [each.tolist() for each in uneven] == [[0], [1, 1], [2, 2, 2]]
        output = torch.zeros(3 * size, 2).t()
        backend.all_gather_single(output, base)
        assert torch.equal(output.reshape(size, 2, 3), torch.stack(everybody))

        outputs = [torch.zeros(2, 3) for _ in range(size)] if rank == 1 else None
        backend.gather(outputs, base, 1)
        assert outputs is None or all(map(torch.equal, outputs, everybody))
        output = torch.zeros(2, 3)
        backend.scatter(output, everybody if rank == 1 else None, 1)
        assert torch.equal(output, everybody[rank])

        # Of one size and of other shapes, on each rank others.
        shape = [(6,), (1, 6), (3, 2)][rank]
        outputs = [torch.zeros(6) for _ in range(size)]
        backend.all_gather(outputs, base.reshape(shape))
        assert torch.equal(torch.stack(outputs).view(size, 2, 3), torch.stack(everybody))
        outputs = [torch.zeros(6, 1) for _ in range(size)] if rank == 1 else None
        backend.gather(outputs, base.reshape(shape), 1)
        assert outputs is None or all(
            torch.equal(output.view(2, 3), wanted)
            for output, wanted in zip(outputs, everybody, strict=True)
        )
        output = torch.zeros(shape)
        backend.scatter(output, [each.view(6, 1) for each in everybody] if rank == 1 else None, 1)
        assert torch.equal(output.view(2, 3), everybody[rank])

        output = torch.zeros(2, 3)
        backend.reduce_scatter(output, [base, base + 1, base + 2], dist.ReduceOp.SUM)
        assert torch.equal(output, total + size * rank)
        output = torch.zeros(2)
        backend.reduce_scatter_single(output, base, dist.ReduceOp.SUM)
        assert torch.equal(output, total.view(3, 2)[rank])

        outputs = [torch.zeros(rank + 1) for _ in range(size)]
        backend.all_to_all(outputs, [torch.full((other + 1,), 1.0 * rank) for other in range(size)])
        assert [each.unique().item() for each in outputs] == [0, 1, 2]
        output = torch.zeros(3)
        backend.all_to_all_single(output, torch.arange(3.0) + 10 * rank, None, None)
        assert output.tolist() == [rank, 10 + rank, 20 + rank]
        backend.barrier()

        right, left = (rank + 1) % size, (rank - 1) % size
        got = torch.zeros(2, 3).t()
        sent = backend.send(base.t(), right, 3, async_op=True)
        assert backend.recv(got, left, 3) == left
        sent.wait()
        assert torch.equal(got, everybody[left].t())
        sent = backend.send(base, right, 4, async_op=True)
        work = backend.recv(torch.zeros(2, 3), None, 4, async_op=True)
        work.wait()
        assert work.source_rank() == left
        sent.wait()
        return backend.sequence_number()

    assert in_threads(body, size) == [17] * size


def test_errors_of_a_process_group_of_torchs_are_ours():
    def body(backend):
        with pytest.raises(dist.DistTimeout, match="recv from rank"):
            backend.recv(torch.ones(1), 1 - backend.rank, 9, async_op=True).wait(0.05)
        with pytest.raises(dist.DistBackendError, match="all_reduce on rank"):
            backend.all_reduce(torch.ones(1, dtype=torch.int16), dist.ReduceOp.SUM)
        backend.close()
        with pytest.raises(dist.DistBackendError, match="closed"):
            backend.barrier()

    in_threads(body, 2)


def lose_a_peer(late: bool):
    """Be a rank on torch's own Gloo; one of two is killed, before the other's call if late."""
    import torch.distributed as theirs

    def create(store, rank, size, timeout):
        return theirs.ProcessGroupGloo(store, rank, size, timeout)

    theirs.Backend.register_backend("other", create, devices=["cpu"])
    group = dist.new_group(backend="other")
    dist.barrier(group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if late:
        time.sleep(0.5)
    dist.recv(torch.ones(1), 1, group=group)


@pytest.mark.parametrize("late", [False, True])
def test_any_backend_that_is_registered_with_torch_can_be_used(late):
    survivor, _ = run_ranks(lose_a_peer, 2, late, ranks="processes", return_exceptions=True)
    assert isinstance(survivor, dist.PeerFailed)
    assert "recv from rank 1 on rank 0" in str(survivor)
    assert "(other)" in str(survivor)
    assert "in lose_a_peer" in str(survivor)


def test_torch_distributed_is_imported_when_it_is_needed():
    code = (
        "import sys, phalanx\nphalanx.run_threads(print, 1)\n"
        "print('phalanx.backends.engines' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
