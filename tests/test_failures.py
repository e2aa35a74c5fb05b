"""A rank that dies, leaves or raises ends the others' waits with an error that names it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from outside_worlds import once_waiting
from torch import Tensor

import phalanx as dist
from phalanx.testing import run_ranks

SIZE = 3
SIZES = [1, 100, 5_000, 300_000]


def _any_operation(rng: random.Random, rank: int) -> None:
    """Do one operation that all ranks choose alike."""
    count = rng.choice(SIZES)
    name = rng.choice(
        ["all_reduce", "broadcast", "all_gather", "all_to_all", "ring", "async", "barrier"]
    )
    tensor = torch.ones(count)
    if name == "all_reduce":
        dist.all_reduce(tensor)
    elif name == "broadcast":
        dist.broadcast(tensor, rng.randrange(SIZE))
    elif name == "all_gather":
        dist.all_gather([torch.empty(count) for _ in range(SIZE)], tensor)
    elif name == "all_to_all":
        dist.all_to_all([torch.empty(count) for _ in range(SIZE)], [tensor] * SIZE)
    elif name == "ring":
        sent = dist.isend(tensor, (rank + 1) % SIZE)
        dist.recv(torch.empty(count), (rank - 1) % SIZE)
        sent.wait()
    elif name == "async":
        for work in [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(3)]:
            work.wait()
    else:
        dist.barrier()


def _until_somebody_dies(seed: int, victim: int) -> tuple[str, str]:
    rank = dist.get_rank()
    if rank == victim:
        moment = random.Random(seed).uniform(0, 0.2)
        killer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
    rng = random.Random(seed)
    try:
        while True:
            _any_operation(rng, rank)
    except dist.DistError as error:
        return type(error).__name__, str(error)


def _memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "phalanx" in name}


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_is_named_by_all_survivors(seed: int) -> None:
    victim = seed % SIZE
    before = _memory_files()
    results = run_ranks(
        _until_somebody_dies, SIZE, seed, victim, ranks="processes", return_exceptions=True
    )
    for rank, result in enumerate(results):
        if rank == victim:
            assert "SIGKILL" in str(result)
        else:
            kind, text = result
            assert kind == "PeerFailed", text
            assert f"rank {victim}" in text
    assert _memory_files() <= before


def _kill_all() -> None:
    dist.empty_shared(1000)
    dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_every_rank_is_killed() -> None:
    before = _memory_files()
    results = run_ranks(_kill_all, 2, ranks="processes", return_exceptions=True)
    assert all("SIGKILL" in str(result) for result in results)
    assert _memory_files() <= before


def _leave_early() -> str:
    if dist.get_rank() == 1:
        return "left"
    with pytest.raises(dist.PeerFailed, match="rank 1"):
        dist.barrier()
    return "told"


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_that_leaves_is_named(ranks: str) -> None:
    assert run_ranks(_leave_early, 3, ranks=ranks) == ["told", "left", "told"]


def _exit_without_goodbye() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    with pytest.raises(dist.PeerFailed, match="rank 0"):
        dist.recv(torch.empty(1), 0)


def test_a_receiver_learns_that_its_sender_is_gone() -> None:
    results = run_ranks(_exit_without_goodbye, 2, ranks="processes", return_exceptions=True)
    assert results[1] is None


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _sends_before_it_goes(ranks: str) -> float | None:
    if dist.get_rank() == 0:
        dist.send(torch.tensor([os.getpid()]), 1)
        for number in range(20):
            dist.send(torch.full((1,), float(number)), 1, tag=number)
        dist.send(torch.full((1000,), 2.0), 1)
        return None
    pid, small, larger = torch.empty(1, dtype=torch.int64), torch.empty(1), torch.empty(1000)
    dist.recv(pid, 0)
    total = 0.0
    for number in reversed(range(20)):
        dist.recv(small, 0, tag=number)
        total += small.item()
    deadline = time.monotonic() + 20
    while ranks == "processes" and not _has_ended(int(pid)) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    dist.recv(larger, 0)
    return total + larger.sum().item()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_what_was_sent_before_leaving_arrives(ranks: str) -> None:
    assert run_ranks(_sends_before_it_goes, 2, ranks, ranks=ranks)[1] == 190 + 2000


def _times_out() -> None:
    if dist.get_rank() == 0:
        dist.group.WORLD.set_timeout(0.3)
        with pytest.raises(dist.DistTimeout, match="rank 1") as caught:
            dist.all_reduce(torch.ones(4))
        assert isinstance(caught.value, TimeoutError)
        assert "all_reduce" in str(caught.value)
        assert "test_failures.py" in str(caught.value)
        dist.group.WORLD.set_timeout(60)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
        with pytest.raises(dist.DistTimeout, match="rank 0 all_reduce"):
            dist.all_reduce(torch.ones(4))
    # The operation was given up by all, so the group goes on.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_timeout_names_who_is_missing(ranks: str) -> None:
    run_ranks(_times_out, 2, ranks=ranks)


def _mismatch() -> None:
    rank = dist.get_rank()
    tensor = torch.full((3 if rank == 0 else 4,), float(rank))
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.all_reduce(tensor)
    text = str(caught.value)
    assert "float32[3]" in text
    assert "float32[4]" in text
    assert "ranks 1, 2" in text
    assert "test_failures.py" in text
    assert (tensor == rank).all()
    with pytest.raises(dist.CollectiveMismatch, match="broadcast"):
        dist.broadcast(torch.ones(1), 0) if rank == 2 else dist.barrier()
    # Nothing was exchanged, so the group goes on.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_mismatch_is_told_to_all_and_harms_nothing(ranks: str) -> None:
    run_ranks(_mismatch, 3, ranks=ranks)


def _wrong_message() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
        with pytest.raises(dist.CollectiveMismatch):
            dist.send(torch.ones(1_000_000), 1)
    else:
        small = torch.zeros(4)
        with pytest.raises(dist.CollectiveMismatch, match=r"float32\[3\]"):
            dist.recv(small, 0)
        assert (small == 0).all()
        with pytest.raises(dist.CollectiveMismatch):
            dist.recv(torch.zeros(1_000_000, dtype=torch.float64), 0)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_message_of_another_size_is_refused(ranks: str) -> None:
    run_ranks(_wrong_message, 2, ranks=ranks)


def _interrupted() -> str:
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, _raise_interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            dist.barrier()
        except KeyboardInterrupt:
            return "interrupted"
    with pytest.raises(dist.PeerFailed):
        dist.recv(torch.empty(1), 0)
    return "told"


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_wait_can_be_interrupted() -> None:
    assert run_ranks(_interrupted, 2, ranks="processes") == ["interrupted", "told"]


def _fails_before_a_group_is_made() -> None:
    if dist.get_rank() == 0:
        raise KeyError("lost")
    dist.new_group([0, 1])


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_group_whose_first_rank_failed_is_given_up(ranks: str) -> None:
    results = run_ranks(_fails_before_a_group_is_made, 2, ranks=ranks, return_exceptions=True)
    assert isinstance(results[0], KeyError)
    assert isinstance(results[1], dist.PeerFailed)
    assert "rank 0" in str(results[1])
    assert "lost" in str(results[1])


def _forks() -> list[float]:
    dist.barrier()
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()  # as a child does that falls off its end
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        dist.send(torch.ones(1), 0)  # the child has ended by now
    else:
        dist.recv(torch.ones(1), 1)
    # Who waits for this rank looks whether it has ended.
    tensor = torch.tensor([3.0, 5.0]) + dist.get_rank()
    if dist.get_rank() == 1:
        once_waiting({0: 1})
    dist.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_speak_for_its_rank() -> None:
    assert run_ranks(_forks, 2, ranks="processes") == [[7, 11]] * 2


def _out_of_descriptors() -> list[float]:
    dist.barrier()
    received, held = torch.zeros(2), []
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/proc/self/stat", os.O_RDONLY)
            dist.recv(received, 1)
        finally:
            for descriptor in held:
                os.close(descriptor)
    else:
        once_waiting({0: 1})
        threading.Event().wait(0.3)  # long enough for the other to look around several times
        dist.send(torch.tensor([3.0, 4.0]), 0)
    return received.tolist()


def test_a_rank_without_descriptors_does_not_take_others_for_dead() -> None:
    assert run_ranks(_out_of_descriptors, 2, ranks="processes") == [[3, 4], [0, 0]]


def _transfer(count: int) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(torch.arange(float(count)), 1)
        return torch.arange(float(count))
    tensor = torch.full((count,), -1.0)
    try:
        dist.recv(tensor, 0)
    except dist.CollectiveMismatch:
        assert (tensor == -1).all()  # nothing of it was written
        raise
    return tensor


def _refuses_often() -> tuple[int, int]:
    """Return how many descriptors and bytes of memory the refusals have cost."""

    def used() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/statm") as pages:
            return len(os.listdir("/proc/self/fd")), int(pages.read().split()[1]) * 4096

    def refuse(times: int) -> None:
        for _ in range(times):
            with pytest.raises(dist.CollectiveMismatch):
                _transfer(300_000 + dist.get_rank())

    refuse(10)
    before = used()
    refuse(40)
    after = used()
    assert torch.equal(_transfer(300_000), torch.arange(300_000.0))
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_refused_messages_do_not_use_up_anything(ranks: str) -> None:
    for descriptors, memory in run_ranks(_refuses_often, 2, ranks=ranks):
        assert descriptors <= 2  # those with which the other thread looks at the same time
        assert memory < 20 * 1_200_000  # of 40 messages


def _raises_at_length() -> None:
    if dist.get_rank() == 1:
        raise ValueError("\N{LATIN SMALL LETTER E WITH ACUTE}" * 5000 + " the end")
    with pytest.raises(dist.PeerFailed, match="the end"):
        dist.barrier()


def test_a_long_message_in_any_script_is_passed_on() -> None:
    with pytest.raises(ValueError, match="the end"):
        run_ranks(_raises_at_length, 2)


def _changes_its_list() -> None:
    outputs = [torch.zeros(1000) for _ in range(2)]
    first = outputs[0]
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_gather(outputs, torch.ones(1000), async_op=True)
    outputs.clear()
    if dist.get_rank() == 0:
        dist.send(torch.empty(1), 1)
    work.wait()
    assert (first == 1).all()
    assert len(work.result()) == 2


def test_an_operation_keeps_the_tensors_that_it_was_given() -> None:
    run_ranks(_changes_its_list, 2)


def _dies_among_the_busy() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        with contextlib.suppress(dist.DistError):
            while True:  # until rank 0 has left
                dist.send(torch.empty(1), 0, tag=5)
    else:
        with pytest.raises(dist.PeerFailed, match="rank 1"):
            dist.recv(torch.empty(1), 1)


def test_messages_from_others_do_not_hide_a_death() -> None:
    results = run_ranks(_dies_among_the_busy, 3, ranks="processes", return_exceptions=True)
    assert results[0] is None
    assert results[2] is None


def _comes_too_late() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistTimeout):
            dist.new_group([0, 1], timeout=0.2)
        tensor = dist.empty_shared(300_000, dtype=torch.uint8)
        dist.send(torch.empty(1), 1)
        dist.recv(torch.empty(1), 1)
        assert not tensor.any()
    else:
        dist.recv(torch.empty(1), 0)
        with pytest.raises(dist.DistBackendError):
            dist.new_group([0, 1], timeout=0.2)
        dist.send(torch.empty(1), 0)


def test_a_group_that_was_given_up_is_not_brought_back() -> None:
    run_ranks(_comes_too_late, 2, ranks="processes")


def _shorter_timeout() -> None:
    if dist.get_rank() == 0:
        dist.group.WORLD.set_timeout(0.2)
        with pytest.raises(dist.DistTimeout, match=r"0\.2 s"):
            dist.barrier()
        dist.send(torch.empty(1), 1)
    else:
        dist.recv(torch.empty(1), 0)


def test_a_groups_timeout_can_be_changed() -> None:
    run_ranks(_shorter_timeout, 2)


def _destroys_in_a_handler() -> str:
    dist.barrier(async_op=True).wait()
    if dist.get_rank() == 1:
        with pytest.raises(dist.PeerFailed):
            dist.recv(torch.empty(1), 0)
        return "told"

    def handler(*_: object) -> None:
        dist.destroy_process_group()
        raise KeyboardInterrupt

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        dist.barrier()

    signal.signal(signal.SIGALRM, handler)
    with pytest.raises(KeyboardInterrupt):
        wait()
    return "destroyed"


def test_a_group_can_be_destroyed_in_a_signal_handler() -> None:
    assert run_ranks(_destroys_in_a_handler, 2, ranks="processes") == ["destroyed", "told"]


_RAISES = """
import sys, torch, phalanx as dist
dist.init_process_group(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad batch")
try:
    dist.all_reduce(torch.ones(2))
except dist.PeerFailed as error:
    print(error)
"""


def test_an_uncaught_exception_is_told_to_the_others(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RAISES, f"file://{tmp_path}/store", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert "rank 1" in told[0]
    assert "ValueError: bad batch" in told[0]


def test_a_thread_that_still_waits_when_python_ends_does_no_harm() -> None:
    code = """
import threading, time
import phalanx as dist

class Slow:  # keeps the end of the interpreter waiting for longer than the thread
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

def wait():
    try:
        dist.HashStore().wait(["never"], 0.2)
    except dist.StoreTimeout:
        pass

kept = Slow()
thread = threading.Thread(target=wait, daemon=True)
thread.start()
time.sleep(0.05)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
