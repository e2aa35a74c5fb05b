"""What can be seen of ranks from outside, while they hang, move, are stopped, or are gone."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outside_worlds import PROGRAMS, look_until, running, waits_long

import phalanx as dist
from phalanx import _native
from phalanx.debug import outside, ps, stacks, top, verdict, why
from phalanx.debug.outside import Job


@pytest.fixture(autouse=True)
def _no_worlds_of_other_tests() -> None:
    gc.collect()  # a world that only garbage refers to can still be seen
    assert outside.look([os.getpid()]).jobs == []


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running("hang", tmp_path_factory.mktemp("hang")) as pid:
        yield pid


def test_ranks_that_hang_are_seen(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    assert not job.threads
    assert len(job.pids) == 4
    assert job.age > 0
    assert PROGRAMS.name in job.command
    assert [rank.presence for rank in job.ranks] == ["here"] * 4
    assert [verdict.condition(job, rank) for rank in job.ranks] == [
        "waiting",
        "waiting",
        "sleeping",
        "waiting",
    ]
    waits = [verdict.wait_of(job, rank) for rank in job.ranks]
    assert [wait.needs if wait else None for wait in waits] == [[1, 2], [2], None, [1, 2]]
    assert waits[0] is not None
    assert waits[0].what == "all_reduce(float32[8], SUM)"
    assert waits[0].site.startswith(f"{PROGRAMS.name}:")
    assert waits[0].site.endswith(" in hang")
    assert waits[1] is not None
    assert waits[1].what == "recv(float32[3], tag=0) from rank 2"
    assert verdict.culprits(job) == [verdict.Culprit(2, [0, 1, 3])]
    assert verdict.summary(job) == "waiting for rank 2"
    (world,) = job.groups
    assert world.members == [0, 1, 2, 3]
    assert [seat.collectives for seat in world.seats] == [2, 1, 1, 2]
    assert world.seats[2].last is not None
    assert world.seats[2].last.state == "done"
    assert world.seats[1].messages == 1


def test_a_job_is_found_by_its_id_and_by_its_processes(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    for wanted in (job.id, job.name, job.id[:12].upper(), str(job.ranks[3].pid), str(hanging)):
        assert outside.find(wanted).id == job.id
    assert job.id in [other.id for other in outside.look().jobs]
    with pytest.raises(outside.JobNotFound, match=r"'zz'.*" + job.name):
        outside.find("zz")
    with pytest.raises(outside.JobNotFound, match="4194999"):
        outside.find("4194999")


def test_top_names_the_straggler(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    rows = top.rows(job, outside.look_again(job) or job)
    assert [row.sequence for row in rows] == [2, 1, 1, 2]
    assert [row.waits_for for row in rows] == [[1, 2], [2], [], [1, 2]]
    assert [row.operations_per_second for row in rows] == [0, 0, 0, 0]
    line = top.straggler(job)
    for fact in ("rank 2", "ranks 0, 1, 3", "all_reduce(float32[4], SUM) #1", " in hang"):
        assert fact in line


def test_why_tells_who_did_not_come(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    reason = why.explain(job, job)
    assert (reason.cause, reason.ranks, reason.moves) == ("waiting", [2], False)
    for fact in (
        "anks 0, 3 wait",
        "all_reduce(float32[8], SUM) #2 on group 'world'",
        "recv(float32[3], tag=0) from rank 2 #1",
        f"ank 2 (pid {job.ranks[2].pid}) is sleeping",
        "all_reduce(float32[4], SUM) #1",
    ):
        assert fact in reason.text


def test_stopped_ranks_are_seen_and_may_all_be_stopped(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    try:
        for pid in job.pids:
            os.kill(pid, signal.SIGSTOP)
        job = look_until(hanging, lambda job: all(rank.stopped for rank in job.ranks))
        assert verdict.summary(job) == "ranks 0-3 stopped"
        reason = why.explain(job, job)
        assert (reason.cause, reason.ranks) == ("stopped", [0, 1, 2, 3])
        assert f"kill -CONT {job.pids[0]}" in reason.advice
        for pid in set(job.pids) - {job.ranks[2].pid}:
            os.kill(pid, signal.SIGCONT)
        job = look_until(hanging, waits_long)
        reason = why.explain(job, job)
        assert (reason.cause, reason.ranks) == ("stopped", [2])
        assert "ranks 0, 3" in reason.text.lower()
    finally:
        for pid in job.pids:
            os.kill(pid, signal.SIGCONT)
    look_until(hanging, lambda job: not any(rank.stopped for rank in job.ranks))


def test_python_stacks(hanging: int) -> None:
    job = look_until(hanging, waits_long)
    reason = why.explain(job, job)
    why.add_stacks(reason, job)
    if not reason.stacks:
        pytest.skip(reason.no_stacks[0])
    assert list(reason.stacks) == [2]
    assert any(PROGRAMS.name in line and "hang" in line for line in reason.stacks[2])


def test_missing_stacks_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hanging: int
) -> None:
    job = look_until(hanging, waits_long)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(stacks.NoStacks, match=r'pip install "phalanx\[why\]"'):
        stacks.stack_of(job.ranks[2], job.threads)
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(stacks.NoStacks, match=rf"{job.ranks[2].pid}.*ptrace is forbidden"):
        stacks.stack_of(job.ranks[2], job.threads)
    fake.write_text("#!/bin/sh\necho 'Error: no such luck' >&2\nexit 1\n")
    with pytest.raises(stacks.NoStacks, match="no such luck"):
        stacks.stack_of(job.ranks[2], job.threads)


def test_a_wait_that_will_end_is_no_deadlock(tmp_path: Path) -> None:
    with running("crossed", tmp_path / "crossed") as pid:
        job = look_until(pid, lambda job: verdict.longest_wait(job) > verdict.LONG)
        assert job.deadlock == ""
        assert verdict.culprits(job) == []
        assert verdict.summary(job) == "waiting"
        assert sorted(len(group.members) for group in job.groups) == [2, 2]
        reason = why.explain(job, job)
        assert (reason.cause, reason.ranks) == ("waiting", [0, 1])


def test_a_rank_that_is_gone_is_seen_though_the_roster_was_its_own(tmp_path: Path) -> None:
    with running("first_is_killed", tmp_path / "killed") as pid:
        job = look_until(pid, lambda job: job.ranks[0].gone)
        assert verdict.summary(job) == "rank 0 gone"
        assert verdict.condition(job, job.ranks[1]) == "sleeping"
        reason = why.explain(job, job)
        assert (reason.cause, reason.ranks) == ("gone", [0])
        assert "all_reduce(float32[4], SUM) #1" in reason.text


def operations_of(job: Job) -> int:
    """Return how many collectives all ranks have begun."""
    return min((seat.collectives for group in job.groups for seat in group.seats), default=0)


def test_a_job_that_moves(tmp_path: Path) -> None:
    with running("move", tmp_path / "move") as pid:
        before = look_until(pid, lambda job: operations_of(job) > 0)
        now = look_until(pid, lambda job: operations_of(job) > operations_of(before) + 1)
        reason = why.explain(before, now)
        assert (reason.cause, reason.moves) == ("moving", True)
        for row in top.rows(before, now):
            assert row.operations_per_second > 0
            assert row.bytes_per_second == pytest.approx(1000 * row.operations_per_second)


def test_ranks_that_are_threads(tmp_path: Path) -> None:
    with running("threads", tmp_path / "threads") as pid:
        job = look_until(pid, lambda job: verdict.longest_wait(job) > verdict.LONG)
        assert job.threads
        assert job.pids == [pid]
        assert verdict.summary(job) == "waiting for rank 1"
        assert len({rank.thread for rank in job.ranks}) == 3
        assert ps.describe(job)["kind"] == "threads"
        reason = why.explain(job, job)
        why.add_stacks(reason, job)
        if reason.stacks:
            (stack,) = reason.stacks.values()
            assert "rank1" in stack[0]


def test_a_thread_that_has_returned_has_ended() -> None:
    released = threading.Event()

    def live() -> None:
        dist.barrier()
        if dist.get_rank() != 1:
            released.wait()

    world = threading.Thread(target=dist.run_threads, args=(live, 3))
    world.start()
    try:
        job = look_until(os.getpid(), lambda job: any(rank.ended for rank in job.ranks))
        assert [rank.ended for rank in job.ranks] == [False, True, False]
        assert verdict.condition(job, job.ranks[1]) == "ended"
        assert top.rows(job, job)[1].state == "ended"
        assert "1 ended" in top.census(job)
        reason = why.explain(job, job)
        assert f"Rank 1 (pid {os.getpid()}) has ended; its last call" in reason.text
    finally:
        released.set()
        world.join()


def frames_in(*files: str) -> list[dict[str, str]]:
    return [{"filename": file} for file in files]


@pytest.mark.parametrize(
    "around",
    [
        ["/s/phalanx/launch/script.py", "/s/phalanx/launch/keeper.py", "<string>"],
        ["<frozen runpy>", "/s/phalanx/launch/script.py", "<string>"],
        ["/s/phalanx/launch/processes.py", "/l/multiprocessing/process.py", "<string>"],
        ["/s/phalanx/launch/threads.py", "/l/threading.py"],
    ],
)
def test_stacks_are_without_what_started_the_program(around: list[str]) -> None:
    program = [
        "/l/multiprocessing/pool.py",
        "/p/launch/train.py",
        "<string>",
        "/p/main.py",
    ]
    assert stacks._own(frames_in(*program, *around)) == frames_in(*program)
    assert stacks._own(frames_in(*around)) == frames_in(*around)


def test_stacks_of_programs_that_nobody_launched_are_whole() -> None:
    frames = frames_in("/s/phalanx/launch/threads.py", "/p/main.py", "/l/runpy.py", "<string>")
    assert stacks._own(frames) == frames


@contextlib.contextmanager
def own_job() -> Iterator[Job]:
    """Run two thread ranks in this process, one of which waits for the other."""
    arrived, released = threading.Event(), threading.Event()

    def live() -> None:
        dist.all_reduce(torch.ones(2))
        arrived.set()
        if dist.get_rank() == 1:
            released.wait(60)
        dist.barrier()

    runner = threading.Thread(target=dist.run_threads, args=(live, 2))
    runner.start()
    try:
        arrived.wait(60)
        yield look_until(os.getpid(), lambda job: bool(job.ranks[0].waits))
    finally:
        released.set()
        runner.join()


def test_jobs_come_and_go() -> None:
    with own_job() as job:
        assert job.ranks[0].waits[0].needs == [1]
        assert outside.look_again(job) is not None
    assert outside.look_again(job) is None


def test_a_deadlock_is_seen() -> None:
    roster = _native.Roster.create(2, True)
    joining = [threading.Thread(target=roster.join, args=(rank, 60.0)) for rank in (0, 1)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    first = _native.Waiting(roster, 0, "left", "the left hand", [1], 300.0)
    second = _native.Waiting(roster, 1, "right", "the right hand", [0], 300.0)

    def check_both() -> None:
        for _ in range(5):  # each check vouches for the time before it
            first.check()
            second.check()

    with pytest.raises(dist.Deadlock):
        check_both()
    (job,) = outside.look([os.getpid()]).jobs
    assert verdict.summary(job) == "stuck: deadlock"
    reason = why.explain(job, job)
    assert (reason.cause, reason.ranks) == ("deadlock", [0, 1])
    for fact in ("the left hand", "the right hand", "rank 0 -> rank 1 -> rank 0"):
        assert fact in reason.text


def heap_path() -> str:
    (path,) = (
        path for path, _ in outside._heap_files(os.getpid()) if _native.look_into(path)["rosters"]
    )
    return path


def copy_of_heap(path: str) -> bytearray:
    """Copy the beginning of a heap, where the rosters and boards are."""
    with open(path, "rb") as file:
        return bytearray(file.read(1 << 20))


def test_garbage_is_refused_or_read_without_harm(tmp_path: Path) -> None:
    with own_job():
        whole = copy_of_heap(heap_path())
    file = tmp_path / "heap"
    file.write_bytes(whole)
    assert _native.look_into(str(file))["rosters"]
    rng = random.Random(4)
    read = 0
    for attempt in range(100):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 100, 20_000))):
            # Sparing the magic, so that there is something to get past it.
            data[rng.randrange(16, len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
        if attempt % 3 == 0:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
        with contextlib.suppress(ValueError, dist.DistBackendError):
            heap = _native.look_into(str(file))
            boards = heap["boards"]
            for roster in heap["rosters"]:
                job = outside._job(roster, boards, {})
                verdict.summary(job)
                why.explain(job, job)
                top.rows(job, job)
            read += bool(heap["rosters"])
    assert read > 10


def test_what_is_no_heap_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "noise"
    for content in (b"", b"PHALANX1", random.Random(1).randbytes(1 << 16)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not the heap of a rank"):
            _native.look_into(str(file))
    with own_job():
        other = copy_of_heap(heap_path())
    other[8] ^= 1
    file.write_bytes(other)
    with pytest.raises(dist.DistBackendError, match="another version"):
        _native.look_into(str(file))
    with pytest.raises(dist.DistBackendError, match="No such file"):
        _native.look_into(str(tmp_path / "nothing"))


def test_failed_and_starting_ranks() -> None:
    with own_job() as job:
        pass
    failed = replace(job.ranks[1], presence="failed", why="raised an exception: ValueError: seven")
    reason = why.explain(job, replace(job, ranks=[job.ranks[0], failed]))
    assert (reason.cause, reason.ranks) == ("failed", [1])
    assert "ValueError: seven" in reason.text
    absent = replace(job.ranks[1], presence="absent", alive=False)
    job = replace(job, ranks=[job.ranks[0], absent])
    assert verdict.summary(job) == "starting"
    assert (why.explain(job, job).cause, why.explain(job, job).ranks) == ("starting", [1])


def test_text_of_others_cannot_steer_the_terminal() -> None:
    with own_job() as job:
        evil = replace(job, groups=[replace(job.groups[0], name="\x1b[2Jworld")])
    rows = top.rows(evil, evil)
    assert any("\x1b" in row.group for row in rows)
    assert "\x1b" not in "".join(top.lines(evil, rows, 200))
