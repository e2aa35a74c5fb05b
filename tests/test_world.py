import gc
import importlib.util
import pickle
import threading
import weakref

import pytest
import torch

import phalanx as dist
from phalanx import world
from phalanx.testing.memory import MemoryBackend


@pytest.fixture
def alone():
    """A world of one, in a slot of its own."""
    with world.bind(world.Slot()) as slot:
        yield slot
        if dist.is_initialized():
            dist.destroy_process_group()


def init(**options):
    dist.init_process_group("memory", store=dist.HashStore(), rank=0, world_size=1, **options)


def test_uninitialised_use_says_so(alone):
    assert dist.is_available()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    for call in (dist.get_rank, dist.barrier, dist.get_backend, dist.destroy_process_group):
        with pytest.raises(ValueError, match="init_process_group"):
            call()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.all_reduce(torch.ones(1))


def test_world_of_one_needs_nobody(alone):
    init()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert dist.group.WORLD is dist.GroupMember.WORLD is alone.world.default
    assert dist.get_backend() == "memory"
    assert dist.get_backend_config() == "cpu:memory"
    assert dist.get_process_group_ranks(None) == [0]
    assert dist.get_pg_count() == 1
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    assert tensor.tolist() == [1, 1]
    with pytest.raises(ValueError, match="twice"):
        init()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    init()  # and again


def test_bad_arguments_of_init(alone):
    store = dist.HashStore()
    for wrong, match in [
        ({"store": store}, "world_size"),
        ({"store": store, "rank": 0, "world_size": 0}, "world_size"),
        ({"store": store, "init_method": "env://", "rank": 0, "world_size": 1}, "not both"),
        ({"timeout": -1}, "negative"),
        ({"device_id": torch.device("cuda", 0)}, "no backend for cuda"),
    ]:
        with pytest.raises(ValueError, match=match):
            dist.init_process_group("memory", **wrong)
    with pytest.raises(TypeError, match="seconds"):
        dist.init_process_group("memory", timeout="1")
    for backend, match in [("nope", "known: .*memory"), ("cpu:", "form"), ("cpu:a,cpu:b", "twice")]:
        with pytest.raises(ValueError, match=match):
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    for backend in ("nccl", "ucc"):
        with pytest.raises(dist.DistBackendError, match=f"{backend}.*usable: .*phalanx"):
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


def test_backend_per_device(alone):
    dist.init_process_group(
        "cpu:memory,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    assert dist.get_backend() == "cpu:memory,cuda:nccl"
    assert dist.get_backend_config() == "cpu:memory,cuda:nccl"
    with pytest.raises(dist.DistBackendError, match="meta"):
        dist.all_reduce(torch.ones(1, device="meta"))


def test_node_local_rank(alone, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(5) == 5
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == 3
    init()
    assert dist.get_node_local_rank() == 0  # a rank that is a thread knows better


def test_what_is_available(monkeypatch):
    for name in ("nccl", "ucc", "xccl"):
        assert not getattr(dist, f"is_{name}_available")()
        assert not dist.is_backend_available(name)
    assert dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo")
    assert dist.is_mpi_available() == (importlib.util.find_spec("mpi4py") is not None)
    assert dist.is_backend_available("phalanx")
    assert dist.is_backend_available("cpu:memory")
    assert not dist.is_backend_available("cpu:memory,cuda:nccl")
    assert dist.get_default_backend_for_device("cpu") == "phalanx"
    assert dist.get_default_backend_for_device(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(ValueError, match="meta"):
        dist.get_default_backend_for_device("meta")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()


def test_backend_names():
    assert dist.Backend("PHALANX") == dist.Backend.PHALANX == "phalanx"
    for wrong in (None, 3, ["gloo"]):
        with pytest.raises(ValueError, match="string"):
            dist.Backend(wrong)


def test_registering_a_backend(alone, monkeypatch):
    from phalanx.backends.registry import Backend

    for table in ("_plugins", "backend_list", "backend_capability", "default_device_backend_map"):
        monkeypatch.setattr(Backend, table, getattr(Backend, table).copy())
    made = []

    def create(store, rank, size, timeout):
        from phalanx.testing.memory import Exchange

        made.append((rank, size, timeout))
        return MemoryBackend(Exchange(size), rank, size, timeout)

    dist.Backend.register_backend("Custom", create, devices=["cpu"])
    assert dist.Backend.CUSTOM == "custom"
    dist.init_process_group("custom", store=dist.HashStore(), rank=0, world_size=1, timeout=7)
    assert made == [(0, 1, 7.0)]
    assert dist.get_backend() == "custom"
    del dist.Backend.CUSTOM


def test_groups(run):
    def body():
        rank = dist.get_rank()
        evens = dist.new_group([2, 0], group_desc="evens", timeout=5)
        again = dist.new_group([0, 2])
        everybody = dist.new_group()
        assert everybody.size() == 3
        assert dist.get_pg_count() == 4
        if rank == 1:
            assert evens is dist.GroupMember.NON_GROUP_MEMBER
            assert dist._rank_not_in_group(evens)
            assert dist.get_rank(evens) == dist.get_world_size(evens) == -1
            with pytest.raises(ValueError, match="Invalid process group specified"):
                dist.get_backend(evens)
            with pytest.warns(UserWarning, match="all_reduce"):
                assert dist.all_reduce(torch.ones(1), group=evens) is None
            with pytest.warns(UserWarning, match="recv"):
                assert dist.recv(torch.ones(1), 0, group=evens) == -1
            dist.destroy_process_group(evens)  # harmless
            return None
        assert evens.group_desc == "evens"
        assert len({evens.group_name, again.group_name, everybody.group_name}) == 3
        assert evens.backend.timeout == 5
        assert dist.get_process_group_ranks(evens) == [0, 2]
        assert dist.get_group_rank(evens, 2) == 1
        assert dist.get_global_rank(evens, 1) == 2
        assert evens.rank() == rank // 2
        assert repr(evens).count("evens")
        with pytest.raises(ValueError, match="1"):
            dist.get_group_rank(evens, 1)
        with pytest.raises(ValueError, match="2"):
            dist.get_global_rank(evens, 2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=evens)
        dist.destroy_process_group(evens)
        with pytest.raises(ValueError, match="destroyed"):
            dist.all_reduce(tensor, group=evens)
        with pytest.raises(ValueError, match="destroyed"):
            dist.destroy_process_group(evens)
        return tensor.item(), again.group_name

    first, _, third = run(body, 3)
    assert first == third
    assert first[0] == 2


def test_bad_groups(run):
    def body():
        for ranks, match in [([0, 7], "Rank 7 is out of range"), ([0, 0], "repeat"), ([-1], "-1")]:
            with pytest.raises(ValueError, match=match):
                dist.new_group(ranks)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.all_reduce(torch.ones(1), group="evens")

    run(body, 2)


def test_groups_made_by_their_members_alone(run):
    def body():
        rank = dist.get_rank()
        names = []
        for _ in range(2):
            pair = dist.new_group(
                [rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True
            )
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == rank // 2 * 4 + 1
            names.append(pair.group_name)
        other = dist.new_group([(rank + 1) % 4], use_local_synchronization=True)
        assert other is None
        everybody = dist.new_group()  # names made together still agree
        dist.barrier(everybody)
        return names

    names = run(body, 4)
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({*names[0], *names[2]}) == 4


def test_order_of_ranks_can_be_kept(run):
    def body():
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        assert dist.get_process_group_ranks(group) == [2, 0, 1]
        return dist.get_rank(group)

    assert run(body, 3) == [1, 2, 0]


def test_subgroups(run):
    def body():
        mine, groups = dist.new_subgroups(2)
        assert len(groups) == 2
        assert mine in groups
        ranks = dist.get_process_group_ranks(mine)
        mine, groups = dist.new_subgroups_by_enumeration([[0, 3], [1]])
        assert (mine is None) == (dist.get_rank() == 2)
        for group in groups:
            dist.destroy_process_group(group)
        for wrong, match in [
            (100, "must not exceed"),
            (3, "must be divisible by"),
            (0, "positive"),
        ]:
            with pytest.raises(ValueError, match=match):
                dist.new_subgroups(wrong)
        with pytest.raises(ValueError, match="Rank 1 has appeared in both subgroup"):
            dist.new_subgroups_by_enumeration([[0], [1, 2], [1, 3]])
        with pytest.raises(ValueError, match="empty"):
            dist.new_subgroups_by_enumeration([])
        return ranks

    assert run(body, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_split_group(run):
    def body():
        odd = dist.new_group([1, 2, 3])
        if dist.get_rank() == 0:
            return None
        part = dist.split_group(odd, [[0, 2]])  # group ranks: global 1 and 3
        again = dist.split_group(odd, [[1], [0, 2]])
        assert again.group_name != (part.group_name if part else None)
        with pytest.raises(ValueError, match="disjoint"):
            dist.split_group(odd, [[0, 1], [1, 2]])
        with pytest.raises(ValueError, match="split_ranks"):
            dist.split_group(odd)
        return part and dist.get_process_group_ranks(part)

    assert run(body, 4) == [None, [1, 3], None, [1, 3]]


def test_shrink_group(run):
    def body():
        rank = dist.get_rank()
        group = dist.new_group([1, 2, 3])
        for wrong, error in [((1,), TypeError), ([], ValueError), ([0, 1, 2], ValueError)]:
            if rank:
                with pytest.raises(error, match="ranks_to_exclude"):
                    dist.shrink_group(wrong, group)
        if rank == 2:
            with pytest.raises(RuntimeError, match="excluded"):
                dist.shrink_group([1], group)
        if rank in (1, 3):
            small = dist.shrink_group([1], group)
            assert dist.get_process_group_ranks(small) == [1, 3]
            with pytest.raises(ValueError, match="destroyed"):
                dist.barrier(group)
            dist.barrier(small)
        if rank == 0:
            return None
        world = dist.shrink_group([0])
        assert world is dist.group.WORLD
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size() == 3
        return dist.get_rank()

    assert run(body, 4) == [None, 0, 1, 2]


def test_store_of_a_group(run):
    def body():
        group = dist.new_group()
        store = group.get_group_store()
        store.set(f"key{dist.get_rank()}", "value")
        assert store.get(f"key{1 - dist.get_rank()}") == b"value"
        assert not dist.group.WORLD.get_group_store().check([f"key{dist.get_rank()}"])
        dist.barrier()

    run(body, 2)


def test_threads_see_the_world_they_are_bound_to(alone):
    init()
    seen = []

    def look():
        before = dist.is_initialized()
        world.enter(alone)
        seen.append((before, dist.is_initialized(), world.current() is alone.world))
        world.leave()
        seen.append(dist.is_initialized())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [(False, True, True), False]


def test_one_store_serves_one_world_after_another(alone):
    store = dist.HashStore()
    seen = []
    for turn in range(3):
        dist.init_process_group("memory", store=store, rank=0, world_size=1)
        inner = dist.group.WORLD.get_group_store()
        assert not inner.check(["left"])  # what an earlier world has written is not found
        inner.set("left", str(turn))
        assert inner.get("left") == str(turn).encode()
        tensor = torch.tensor([1.0, float(turn)])
        dist.all_reduce(tensor)
        seen.append(tensor.tolist())
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert seen == [[1, 0], [1, 1], [1, 2]]


def test_one_store_serves_several_ranks_in_one_world_after_another():
    store = dist.HashStore()

    def join(rank, totals):
        with world.bind(world.Slot()):
            for turn in range(3):
                dist.init_process_group("phalanx", store=store, rank=rank, world_size=2, timeout=30)
                tensor = torch.tensor([10.0 * turn + rank])
                dist.all_reduce(tensor)
                totals.append(tensor.item())
                dist.destroy_process_group()

    totals = [], []
    threads = [threading.Thread(target=join, args=(rank, totals[rank])) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == ([1, 21, 41], [1, 21, 41])


def test_disagreement_about_the_world_is_an_error_on_all():
    store, errors = dist.HashStore(), []

    def join(rank, size):
        with world.bind(world.Slot()):
            try:
                dist.init_process_group(
                    "memory", store=store, rank=rank, world_size=size, timeout=30
                )
            except dist.DistError as error:
                errors.append(error)

    threads = [threading.Thread(target=join, args=args) for args in [(0, 2), (1, 3)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2


def test_a_failure_reaches_all_groups(run):
    def body():
        group = dist.new_group()
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
            world.current_slot().fail("enough")
        else:
            dist.send(torch.ones(1), 0)
            with pytest.raises(dist.PeerFailed, match="enough"):
                dist.recv(torch.ones(1), 0, group=group)

    run(body, 2)


def test_nothing_is_left_after_many_worlds(alone):
    def cycle():
        init()
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()  # starts a lane
        world_ref, backend = weakref.ref(alone.world), weakref.ref(group.backend)
        dist.destroy_process_group()
        return world_ref, backend

    cycle()
    gc.collect()
    threads = threading.active_count()
    objects = len(gc.get_objects())
    refs = [ref for _ in range(100) for ref in cycle()]
    gc.collect()
    assert all(ref() is None for ref in refs)
    del refs
    deadline = threading.Event()
    for _ in range(100):  # lanes end by themselves, soon
        if threading.active_count() <= threads:
            break
        deadline.wait(0.01)
    assert threading.active_count() <= threads
    gc.collect()
    assert len(gc.get_objects()) - objects < 100


def test_sentinel_survives_pickling():
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert pickle.loads(pickle.dumps(outside)) is outside
