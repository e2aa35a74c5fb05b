"""Orders of ranks by seed: mistakes that depend on them are found, and found again."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed
from trials import verdicts
from trials.cases import right_case

import phalanx as dist
from phalanx.testing import explore, schedule, torch_world


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


# Mistakes


def reads_before_waiting() -> None:
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    dist.get_rank()
    total = x.item()
    work.wait()
    assert total == dist.get_world_size()


def changes_a_buffer_that_is_being_sent() -> None:
    before, after = neighbours()
    x, y = torch.ones(1), torch.zeros(1)
    sending, receiving = dist.isend(x, after), dist.irecv(y, before)
    assert sending is not None
    assert receiving is not None
    x.zero_()
    sending.wait()
    receiving.wait()
    assert y.item() == 1


def sends_around_a_ring_before_receiving() -> None:
    before, after = neighbours()
    x = torch.ones(1)
    dist.send(x, after)
    dist.recv(x, before)


def takes_the_first_message_for_rank_1_s() -> None:
    x = torch.full((1,), float(dist.get_rank()))
    if dist.get_rank() > 0:
        dist.send(x, 0)
    else:
        for expected in range(1, dist.get_world_size()):
            dist.recv(x)
            assert x.item() == expected


def reduces_in_two_threads_of_one_group() -> None:
    sizes = [1, 2]
    threads = [threading.Thread(target=quietly, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert not problems, problems


problems: list[str] = []


def quietly(size: int) -> None:
    try:
        dist.all_reduce(torch.ones(size))
    except dist.CollectiveMismatch as error:
        problems.append(str(error))


def uses_two_groups_crosswise_in_two_threads() -> None:
    first, second = dist.new_group(), dist.new_group()
    lock = threading.Lock()

    def both(one: Any, other: Any) -> None:
        with lock:
            dist.barrier(one)
            dist.barrier(other)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(both, first, second)
        both(second, first)
        other.result()


def shares_a_dictionary(shared: dict[str, int]) -> None:
    shared["rank"] = dist.get_rank()
    dist.barrier()
    assert shared["rank"] == dist.get_world_size() - 1


def forgets_that_a_work_may_be_late() -> None:
    x = torch.zeros(1)
    pair = dist.new_group()
    if dist.get_rank() == 0:
        x += 1
    work = dist.broadcast(x, 0, async_op=True)
    dist.barrier(pair)  # of another group: says nothing about the work
    assert work is not None
    assert x.item() == 1


MISTAKES: list[tuple[Any, int, type[Exception]]] = [
    (reads_before_waiting, 2, AssertionError),
    (changes_a_buffer_that_is_being_sent, 3, AssertionError),
    (sends_around_a_ring_before_receiving, 3, dist.Deadlock),
    (takes_the_first_message_for_rank_1_s, 3, AssertionError),
    (forgets_that_a_work_may_be_late, 2, AssertionError),
]


def seed_of(error: BaseException) -> int:
    found = re.search(r"seeds=\[(\d+)\]", "\n".join(getattr(error, "__notes__", [])))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("fn", "size", "kind"), MISTAKES)
def test_mistakes_are_found_and_found_again(fn: Any, size: int, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        explore(fn, size)
    seed = seed_of(caught.value)
    for _ in range(2):
        with pytest.raises(kind) as again:
            explore(fn, size, seeds=[seed])
        assert again.value.__notes__[-1] == caught.value.__notes__[-1]


@pytest.mark.parametrize(("fn", "size", "kind"), MISTAKES)
def test_mistakes_depend_on_the_order(fn: Any, size: int, kind: type[Exception]) -> None:
    """Some seeds do not find them: they are not wrong in every order."""
    outcomes = set()
    for seed in range(40):
        try:
            schedule(fn, size, seed=seed)
            outcomes.add("well")
        except kind:
            outcomes.add("wrong")
    assert outcomes == {"well", "wrong"}


def test_two_threads_on_one_group_are_found() -> None:
    problems.clear()
    with pytest.raises(AssertionError, match="all_reduce"):
        explore(reduces_in_two_threads_of_one_group, 2)


def test_what_thread_ranks_share_is_found() -> None:
    with pytest.raises(AssertionError) as caught:
        explore(shares_a_dictionary, 3, {})
    with pytest.raises(AssertionError):
        explore(shares_a_dictionary, 3, {}, seeds=[seed_of(caught.value)])


def test_two_groups_crosswise_are_found() -> None:
    with pytest.raises(dist.Deadlock, match="rank 1: wait for a lock") as caught:
        explore(uses_two_groups_crosswise_in_two_threads, 2)
    told = str(caught.value)
    with pytest.raises(dist.Deadlock, match=re.escape(told)):
        explore(uses_two_groups_crosswise_in_two_threads, 2, seeds=[seed_of(caught.value)])


# Programs that are right in every order


def talks(size: int) -> list[float]:
    before, after = neighbours()
    x = torch.full((size,), float(dist.get_rank()))
    works = [dist.all_reduce(x, async_op=True), dist.barrier(async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    y = torch.zeros(size)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    ):
        work.wait()
    evens = dist.new_group([0, 2])
    if dist.get_rank() % 2 == 0:
        dist.broadcast(x.add_(dist.get_rank()), 2, group=evens)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, x[0].item())
    dist.monitored_barrier()
    gathered = torch.zeros(3 * size)
    work = dist.all_gather_into_tensor(gathered, x, async_op=True)
    assert work is not None
    gathered = work.get_future().then(lambda future: future.value()[0] + 1).wait()
    return [*objects, gathered.sum().item(), y[0].item()]


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_right_program_does_the_same_in_every_order(size: int) -> None:
    runs = explore(talks, 3, size, seeds=range(20))
    assert all(run.results == runs[0].results for run in runs)
    assert len({tuple(run.steps) for run in runs}) == len(runs)


def test_the_same_seed_gives_the_same_order() -> None:
    for seed in range(5):
        first, second = schedule(talks, 3, 4, seed=seed), schedule(talks, 3, 4, seed=seed)
        assert first.steps == second.steps
        assert first.results == second.results


def trains() -> list[float]:
    torch.manual_seed(0)
    model = dist.DistributedDataParallel(torch.nn.Linear(3, 2))
    for _ in range(3):
        model(torch.randn(2, 3)).square().sum().backward()
    return [p.grad.sum().item() for p in model.parameters() if p.grad is not None]


def test_training_is_the_same_in_every_order() -> None:
    runs = explore(trains, 2, seeds=range(6))
    assert all(run.results == runs[0].results for run in runs)
    assert schedule(trains, 2, seed=3).steps == runs[3].steps


def polls() -> int:
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    looks = 0
    while not work.is_completed():
        looks += 1
    assert x.item() == 2
    return looks


def test_polling_comes_to_an_end() -> None:
    looks = {sum(run.results) for run in explore(polls, 2, seeds=range(20))}
    assert len(looks) > 2


def sleeps() -> float:
    begin = time.monotonic()
    time.sleep(1000)
    return time.monotonic() - begin


def test_sleeping_takes_no_time() -> None:
    assert max(schedule(sleeps, 2, seed=0).results) < 1000


def works_in_threads() -> list[int]:
    groups = [dist.new_group() for _ in range(3)]

    def reduce(group: Any) -> int:
        x = torch.ones(1)
        for _ in range(2):
            dist.all_reduce(x, group=group)
        return int(x)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(reduce, groups))


def test_pools_take_turns() -> None:
    for run in explore(works_in_threads, 2, seeds=range(3)):
        assert run.results == [[4, 4, 4]] * 2


def passes_on() -> int:
    """Have a thread of the rank communicate, and tell the first by an event."""
    done = threading.Event()
    x = torch.ones(1)

    def reduce() -> None:
        dist.all_reduce(x)
        done.set()

    thread = threading.Thread(target=reduce)
    thread.start()
    done.wait()
    thread.join()
    return int(x)


def test_threads_wait_for_each_other_in_turn() -> None:
    first, second = schedule(passes_on, 3, seed=1), schedule(passes_on, 3, seed=1)
    assert first.results == [3, 3, 3]
    assert first.steps == second.steps


def holds_a_lock(lock: Any) -> int:
    """Have two threads of the rank communicate, one after the other."""
    x = torch.ones(1)

    def reduce() -> None:
        with lock:
            dist.all_reduce(x)

    thread = threading.Thread(target=reduce)
    thread.start()
    reduce()
    thread.join()
    return int(x)


def test_threads_wait_for_locks_in_turn() -> None:
    runs = [schedule(lambda: holds_a_lock(threading.RLock()), 2, seed=5) for _ in range(2)]
    assert [run.results for run in runs] == [[4, 4]] * 2
    assert runs[0].steps == runs[1].steps


def test_a_thread_that_waits_elsewhere_is_passed_over() -> None:
    locks = [threading.Lock(), threading.Lock()]  # made before: their waits are not seen
    runs = explore(lambda: holds_a_lock(locks[dist.get_rank()]), 2, seeds=range(5))
    assert [run.results for run in runs] == [[4, 4]] * 5
    assert any("elsewhere" in step.what for run in runs for step in run.steps)


def in_torch_s_world(body: Any, size: int, *args: Any) -> Any:
    return torch_world(size).run(body, *args)


def gathers_with_torch() -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, torch.distributed.get_rank())
    return found


def reads_before_waiting_with_torch() -> None:
    x = torch.ones(1)
    work = torch.distributed.all_reduce(x, async_op=True)
    total = x.item()
    work.wait()
    assert total == torch.distributed.get_world_size()


def test_programs_of_torch_can_be_explored() -> None:
    for run in explore(gathers_with_torch, 3, seeds=range(5), launch=in_torch_s_world):
        assert run.results == [[0, 1, 2]] * 3
    with pytest.raises(AssertionError) as caught:
        explore(reads_before_waiting_with_torch, 2, launch=in_torch_s_world)
    assert "reads_before_waiting_with_torch" in caught.value.__notes__[-1]


@pytest.mark.parametrize("number", range(12))
def test_programs_that_are_right_are_right_in_any_order(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_order(*args: Any, ranks: str, **kwargs: Any) -> Any:
        return schedule(*args, seed=number, buffered=True, **kwargs).results

    monkeypatch.setattr(verdicts, "run_ranks", in_order)
    trial = right_case(7, number, "threads").run()
    assert not trial.complaints, trial


def reduces_on_two_groups(in_order: bool) -> list[float]:
    """Post on two groups, in another order on each rank, and only then wait."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.ones(1), torch.ones(1)]
    places = [0, 1] if in_order or dist.get_rank() == 0 else [1, 0]
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in places]
    for work in works:
        assert work is not None
        work.wait()
    return [x.item() for x in tensors]


def test_groups_do_not_wait_for_each_other() -> None:
    for in_order in (True, False):
        runs = explore(reduces_on_two_groups, 2, in_order, seeds=range(20))
        assert all(run.results == [[2, 2]] * 2 for run in runs)


def test_programs_run_as_ever_afterwards() -> None:
    schedule(talks, 3, 4, seed=0)
    assert threading.Thread.join.__name__ == "join"
    assert time.sleep.__name__ == "sleep"
