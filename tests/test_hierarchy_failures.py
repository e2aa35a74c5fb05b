"""What is said on all hosts when a group over hosts fails. Ranks are threads on pretended hosts."""

import logging
import threading
import time
from functools import partial

import pytest
import torch
from pretended_hosts import on_hosts

import phalanx as dist
from phalanx import logs


def told(fn, layout="aabb", **options):
    """Return what each rank raised."""
    return on_hosts(fn, layout, return_exceptions=True, **options)


def all_say(errors, kind, *facts):
    texts = [str(error) for error in errors]
    for error, text in zip(errors, texts, strict=True):
        assert type(error) is kind, f"{error!r}"
        for fact in facts:
            assert fact in text, f"{fact!r} is not in: {text}"
    return texts


def differ_across():
    dist.barrier()
    tensor = torch.full((4,), 7.0)
    try:
        if dist.get_rank() < 2:
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, 1)
    finally:
        assert tensor.tolist() == [7.0] * 4


def test_collectives_that_differ_across_hosts():
    errors = told(differ_across)
    texts = all_say(
        errors,
        dist.CollectiveMismatch,
        "#2 on group 'world' does not match across hosts",
        "ranks 0, 1 on host host-a  all_reduce(float32[4], SUM) #2    test_hierarchy_failures.py",
        " on host host-b      broadcast(float32[4], root 1) #2",
        "in differ_across",
    )
    assert len(set(texts)) == 1
    assert "\n  rank 2 on" in texts[0] or "\n  rank 3 on" in texts[0]


def differ_in_what_is_foreseen(theirs):
    """Bytes may come before the word of what they are: they must not get into the tensor."""
    tensor = torch.full((300_000,), 7) if dist.get_rank() < 2 else theirs.clone()
    given = tensor.clone()
    try:
        dist.all_reduce(tensor)
    finally:
        assert torch.equal(tensor, given)


@pytest.mark.parametrize(
    "theirs", [torch.ones(300_000, dtype=torch.float64), torch.ones(290_000, dtype=torch.int64)]
)
def test_large_tensors_that_differ_across_hosts(theirs):
    all_say(
        told(partial(differ_in_what_is_foreseen, theirs)),
        dist.CollectiveMismatch,
        "ranks 0, 1 on host host-a  all_reduce(int64[300000], SUM) #1",
        f"ranks 2, 3 on host host-b  all_reduce({'f' if theirs.is_floating_point() else 'i'}",
    )


def differ_on_one():
    dist.barrier()
    dist.all_reduce(torch.ones(5 if dist.get_rank() == 3 else 4))


def test_collectives_that_differ_on_one_host():
    texts = all_say(
        told(differ_on_one),
        dist.CollectiveMismatch,
        "all_reduce #2 on group 'world' does not match across ranks",
        "rank 2  all_reduce(float32[4], SUM)",
        "rank 3  all_reduce(float32[5], SUM)",
        "gets tensors of 4 elements on rank 2 and of 5 on rank 3",
    )
    assert len(set(texts)) == 1


SHAPES = [(6,), (6,), (1, 6), (2, 3)]  # by rank


def bring_other_shapes(level):
    """Bring equally many elements in shapes that differ on a host and between hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [torch.arange(6.0) + 10 * each + 1 for each in range(size)]
    dist.set_debug_level(level)
    tensor = every[rank].reshape(SHAPES[rank]).clone()
    dist.all_reduce(tensor)
    assert tensor.flatten().equal(sum(every))
    tensor = every[rank].reshape(SHAPES[rank]).clone()
    dist.reduce(tensor, 2)
    assert tensor.flatten().equal(sum(every) if rank == 2 else every[rank])
    tensor = every[rank].reshape(SHAPES[rank]).clone()
    dist.broadcast(tensor, 3)
    assert tensor.flatten().equal(every[3])
    outputs = [torch.zeros(3, 2) for _ in every] if rank == 2 else None
    dist.gather(every[rank].reshape(SHAPES[rank]), outputs, 2)
    assert outputs is None or torch.stack(outputs).flatten().equal(torch.cat(every))
    dist.scatter(tensor, [each.reshape(3, 2) for each in every] if rank == 1 else None, 1)
    assert tensor.flatten().equal(every[rank])
    long = torch.arange(600_000.0).reshape((-1, 2) if rank == 3 else (-1,)) + rank
    dist.all_reduce(long)
    assert long.flatten().equal(torch.arange(600_000.0) * size + 6)


@pytest.fixture
def level_kept():
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)
    logs.show(None)


@pytest.mark.parametrize("layout", ["aabb", "abab", "abcd"])
@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.INFO])
def test_other_shapes_of_as_many_elements_pass(level, layout, level_kept, caplog):
    with caplog.at_level(logging.INFO, "phalanx.collectives"):
        on_hosts(bring_other_shapes, layout, level)
    said = [r.getMessage() for r in caplog.records if r.name == "phalanx.collectives"]
    assert len({text.split("test_hierarchy_failures.py:")[1].split()[0] for text in said}) == len(
        said
    )
    names = [text.split()[2] for text in said]
    wanted = ["all_reduce", "all_reduce", "broadcast", "gather", "reduce", "scatter"]
    assert sorted(names) == (wanted if level is dist.DebugLevel.INFO else [])


@pytest.mark.parametrize("layout", ["aabb", "abcc"])
def test_other_shapes_are_refused_at_detail(layout, level_kept):
    errors = told(partial(bring_other_shapes, dist.DebugLevel.DETAIL), layout)
    all_say(errors, dist.CollectiveMismatch, "all_reduce #1", "different shapes", "DETAIL")


def test_each_rank_may_have_its_own_factor():
    def body():
        rank = dist.get_rank()
        tensor = torch.arange(3.0) + 1
        dist.all_reduce(tensor, dist.ReduceOp.premul_sum(2.0 + rank))
        assert tensor.tolist() == [14.0, 28.0, 42.0]
        dist.reduce(tensor, 1, dist.ReduceOp.premul_sum(1.0 + rank))
        assert tensor.tolist() == ([140.0, 280.0, 420.0] if rank == 1 else [14.0, 28.0, 42.0])

    on_hosts(body, "aabb")


def differ_one_by_one(step):
    """Rank 3 does something else than the others, who send each other what is for each."""
    if dist.get_rank() == 3 and step == "all_reduce":
        dist.all_reduce(torch.ones(4))
    length = 5 if dist.get_rank() == 3 else 4
    dist.all_to_all([torch.ones(length)] * 4, [torch.ones(length)] * 4)


@pytest.mark.parametrize("step", ["all_reduce", "all_to_all"])
def test_who_does_something_else_in_an_all_to_all_is_named(step):
    errors = on_hosts(differ_one_by_one, "aabb", step, return_exceptions=True)
    all_say(errors, dist.CollectiveMismatch, "rank 3", "test_hierarchy_failures.py")


def differ_in_the_background():
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    works.append(dist.all_reduce(torch.ones(4 if dist.get_rank() else 5), async_op=True))
    for work in works[:3]:
        work.wait()
    works[3].wait()


def test_asynchronous_calls_that_differ_are_named_by_their_lines():
    texts = all_say(told(differ_in_the_background, "abc"), dist.CollectiveMismatch, "#4 on group")
    assert all("test_hierarchy_failures.py" in text for text in texts)


def come_too_late(done):
    dist.barrier()
    if dist.get_rank() == 3:
        done.wait(30)
        return ""
    try:
        with pytest.raises(dist.DistTimeout) as caught:
            dist.all_reduce(torch.ones(5))
        # Messages go on, collectives do not.
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 2)
        elif dist.get_rank() == 2:
            # Who tells of the others takes its time.
            dist.group.WORLD.transport.recv(torch.ones(1), 0, timeout=30)
        with pytest.raises(dist.DistTimeout):
            dist.barrier()
    finally:
        if dist.get_rank() == 2:
            done.set()
    return str(caught.value)


def test_who_is_late_is_told_with_what_it_does():
    # Rank 0 stays a second longer after an error, which the message that comes then must outlast.
    texts = on_hosts(come_too_late, "aabb", threading.Event(), group_timeout=3)
    for rank, text in enumerate(texts[:3]):
        lines = text.splitlines()
        assert lines[0].startswith(f"all_reduce #2 on group 'world', rank {rank}, at ")
        assert lines[0].endswith("in come_too_late: reached its timeout of 3 s")
        assert lines[1] == "  arrived: ranks 0-2; not arrived: rank 3"
        assert "rank 3 on host host-b is busy in its own code" in lines[2]
        assert "its last call here: barrier() #1 at test_hierarchy_failures.py" in lines[2]


def receive_in_vain(done):
    if dist.get_rank() == 1:
        done.wait(30)
        return ""
    with pytest.raises(dist.DistTimeout) as caught:
        dist.recv(torch.ones(5), 1)
    done.set()
    return str(caught.value)


def test_who_does_not_send_is_told_with_what_it_does():
    text = on_hosts(receive_in_vain, "ab", threading.Event(), group_timeout=1)[0]
    assert text.startswith("recv(float32[5], tag=0) from rank 1 on group 'world', rank 0, at test_")
    assert text.endswith(
        "reached its timeout of 1 s\n  rank 1 on host host-b has made no call on this group yet"
    )


def fail():
    dist.barrier()
    if dist.get_rank() == 3:
        raise ValueError("enough of it")
    dist.all_reduce(torch.ones(50_000))


@pytest.mark.parametrize("layout", ["aabb", "abcd"])
def test_a_rank_that_raises_is_named_on_all_hosts(layout):
    *errors, own = told(fail, layout)
    assert isinstance(own, ValueError)
    for rank, error in enumerate(errors):
        all_say([error], dist.PeerFailed, "rank 3 raised an exception", "enough of it")
        assert str(error).startswith(f"all_reduce #2 on group 'world', rank {rank}, at test_hier")


def leave(late):
    if dist.get_rank() == 3:
        dist.destroy_process_group()
        return
    time.sleep(late)  # a host that lives gives signs of it more often
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("late", [0, 4])
def test_a_rank_that_leaves_is_named_on_all_hosts(late):
    errors = told(partial(leave, late), "abcd")[:3]
    all_say(errors, dist.PeerFailed, "rank 3 on host host-d has left this group")


def receive_from_each_other():
    rank = dist.get_rank()
    if rank in (0, 3):
        dist.recv(torch.ones(5), 3 - rank)


def test_a_deadlock_of_messages():
    errors = told(receive_from_each_other)
    cycle = "cycle: rank 0 -> rank 3 -> rank 0"
    all_say([errors[0], errors[3]], dist.Deadlock, cycle, "everybody receives first", "at test_hie")


def test_who_leaves_over_a_deadlock_is_no_news_to_the_others():
    def body():
        rank = dist.get_rank()
        if rank in (0, 3):
            with pytest.raises(dist.Deadlock):
                dist.recv(torch.ones(5), 3 - rank)
            dist.destroy_process_group()

    on_hosts(body, "aabb")


def receive_while_others_meet():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(5), 3)
    dist.all_reduce(torch.ones(4))


def test_a_deadlock_of_a_message_and_a_collective():
    all_say(
        told(receive_while_others_meet),
        dist.Deadlock,
        "rank 0  waits for rank 3  in recv(float32[5], tag=0) from rank 3 on group 'world'",
        "rank 1  waits for rank 0  in all_reduce(float32[4], SUM) on group 'world'",
        "rank 2  waits for rank 0  in all_reduce(float32[4], SUM) on group 'world'",
    )


def meet_in_two_orders():
    groups = [dist.new_group([0, 3]), dist.new_group([0, 3])]
    if dist.get_rank() in (0, 3):
        if dist.get_rank() == 3:
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)


def test_a_deadlock_of_two_groups():
    errors = told(meet_in_two_orders)
    all_say([errors[0], errors[3]], dist.Deadlock, "in different order", "on group '1'", "'2'")


def be_slow_in_a_group_that_others_break(broken):
    rank = dist.get_rank()
    if rank == 2:
        broken.wait(30)
        time.sleep(1)  # all of it has been told by now
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, 0)
    assert tensor[0] == 0
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.ones(4))
    finally:
        broken.set()


def test_what_breaks_later_does_not_disturb_what_is_complete():
    errors = told(
        lambda broken: be_slow_in_a_group_that_others_break(broken), "abc", broken=threading.Event()
    )
    all_say(errors, dist.CollectiveMismatch, "all_reduce #2")


def send_another_dtype():
    if dist.get_rank() == 0:
        dist.send(torch.arange(4.0).double() + 1, 1)
        dist.send(torch.arange(4.0), 1)
        return ""
    refused, received = torch.full((8,), -1.0), torch.full((4,), -1.0)
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.recv(refused, 0)
    assert refused.tolist() == [-1] * 8
    dist.recv(received, 0)
    assert received.tolist() == [0, 1, 2, 3]
    return str(caught.value)


def test_a_message_of_another_dtype_is_refused_and_the_next_one_is_not():
    text = on_hosts(send_another_dtype, "ab")[1]
    assert "recv(float32[8], tag=0) from rank 0 on group 'world', rank 1, at test_hier" in text
    assert "sent float64" in text
