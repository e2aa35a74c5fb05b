"""Debug levels, what DETAIL adds, and breakpoints."""

import bdb
import io
import logging
import os
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
from calls import MOVING, Call, everybody_goes_on
from pretended_hosts import on_hosts

import phalanx as dist
from phalanx import _native, logs
from phalanx.debug import detail as detail_of
from phalanx.debug import levels, notes, watch
from phalanx.debug.detail import Detailed
from phalanx.debug.notes import Entry, Statistics
from phalanx.testing.ranks import run_ranks

THREADS_AND_PROCESSES = pytest.mark.parametrize("ranks", ["threads", "processes"])


@pytest.fixture
def unread(monkeypatch):
    """Have the level not yet read, and nothing about it in the environment."""
    for name in levels.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(levels, "_level", None)
    yield monkeypatch
    logs.show(None)


@pytest.fixture
def detail(unread):
    """Have DETAIL in this process and in those it starts."""
    unread.setenv("PHALANX_DEBUG", "DETAIL")


# Levels


def test_the_level_is_off_by_default(unread):
    assert dist.get_debug_level() is dist.DebugLevel.OFF
    assert [str(level) for level in dist.DebugLevel] == [
        "DebugLevel.OFF",
        "DebugLevel.INFO",
        "DebugLevel.DETAIL",
    ]


@pytest.mark.parametrize("text", ["detail", "DETAIL"])
def test_the_level_comes_from_the_environment(unread, text):
    unread.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    unread.setenv("PHALANX_DEBUG", "INFO")
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL  # read once
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.INFO  # the first variable wins


@pytest.mark.parametrize("variable", levels.VARIABLES)
@pytest.mark.parametrize("text", ["", "1", "VERBOSE"])
def test_a_level_that_cannot_be_read_is_an_error_when_it_is_read(unread, variable, text):
    unread.setenv(variable, text)
    for read in (
        dist.get_debug_level,
        dist.set_debug_level_from_env,
        lambda: dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1),
    ):
        with pytest.raises(ValueError, match=f"{variable}.*OFF, INFO, or DETAIL"):
            read()
    assert not dist.is_initialized()
    unread.delenv(variable)
    assert dist.get_debug_level() is dist.DebugLevel.OFF


def test_only_a_level_can_be_set(unread):
    with pytest.raises(TypeError, match="DETAIL"):
        dist.set_debug_level("DETAIL")


def test_groups_follow_the_level(unread):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        first = dist.group.WORLD
        assert first.transport is first.backend
        dist.set_debug_level(dist.DebugLevel.INFO)
        assert first.transport is first.backend  # costs nothing
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        second = dist.new_group([0])
        for group in (first, second):
            assert isinstance(group.transport, Detailed)
            assert dist.get_world_size(group) == group.transport.size == 1
        dist.set_debug_level(dist.DebugLevel.OFF)
        for group in (first, second):
            assert group.transport is group.backend
    finally:
        dist.destroy_process_group()


# Detail


def test_notes_are_kept_by_rank():
    roster = _native.Roster.create(3, threads=True)
    roster.note(1, "first")
    roster.note(1, "zwölf")
    roster.note(2, "")
    assert roster.notes() == ["", "zwölf", ""]


def test_of_a_long_note_the_end_is_kept_in_whole_characters():
    roster = _native.Roster.create(1, threads=True)
    roster.note(0, "ö" * 5000 + "end")
    (kept,) = roster.notes()
    assert kept == "ö" * ((8192 - 3) // 2) + "end"


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_count_nan_and_inf(dtype):
    tensor = torch.tensor([1, float("nan"), float("inf"), float("-inf")]).to(dtype)
    found = Statistics.of([tensor, tensor])
    assert (found.num_nan, found.num_inf) == (2, 4)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int32, torch.complex64, torch.uint64])
def test_checksums_tell_contents_apart(dtype):
    ones, zeros = torch.ones(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    assert Statistics.of([ones]) == Statistics.of([ones.clone()])
    assert Statistics.of([ones]).checksum != Statistics.of([zeros]).checksum
    assert Statistics.of([ones, zeros]).checksum != Statistics.of([zeros, ones]).checksum
    assert Statistics.of([ones.t().contiguous().t()]).checksum == Statistics.of([ones]).checksum


def test_statistics_of_nothing_and_of_empty_tensors():
    assert str(Statistics.of([])) == "no input"
    assert "float32[0]" in str(Statistics.of([torch.empty(0)]))
    assert Statistics.of([torch.tensor(1 + 2j).conj()]).num_nan == 0


def test_of_a_deep_stack_the_inner_frames_are_shown():
    def dive(depth):
        return lower(depth - 1) if depth else traceback.extract_stack()

    def lower(depth):  # the same frame over and over would be shown once
        return dive(depth)

    text = notes.shown(dive(300))
    assert len(text) < 6000
    assert "outer frames left out" in text.splitlines()[0]
    assert "traceback.extract_stack()" in text.splitlines()[-1]


def test_notes_keep_what_there_is_room_for():
    def entries(stack):
        return [Entry(f"k{i}", f"call {i}", "no input", stack) for i in range(12)]

    short = entries("a stack")
    assert notes.read(notes.written(short)) == short
    found = notes.read(notes.written(entries("ö" * 1800)))
    assert [len(entry.stack) for entry in found] == [0] * 10 + [1800] * 2
    long = [Entry(f"k{i}", "t" * 3000, "", "") for i in range(12)]
    assert [entry.key for entry in notes.read(notes.written(long))] == ["k10", "k11"]
    assert notes.read("") == notes.read("cut\x1foff") == []


def disagree():
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        tensor[0] = float("nan")
        in_step(tensor)
    else:
        dist.all_reduce(tensor)


def in_step(tensor):
    dist.broadcast(tensor, 1)


def failure_of(function, *args, **kwargs):
    """Call a function that fails; return its error only once all ranks are here."""
    try:
        function(*args, **kwargs)
    except dist.DistBackendError as error:
        dist.monitored_barrier(timeout=30)
        return str(error)
    raise AssertionError("it did not fail")


def mismatch():
    return failure_of(disagree)


@THREADS_AND_PROCESSES
def test_a_mismatch_shows_inputs_and_stacks_of_all_ranks(detail, ranks):
    for rank, text in enumerate(run_ranks(mismatch, 2, ranks=ranks, timeout=60)):
        lines = [line for line in text.splitlines() if "checksum" in line]
        facts = {line.split(":")[0].strip(): line for line in lines}
        checksums = {facts[f"rank {r}"].partition("checksum ")[2][:8] for r in range(2)}
        assert len(checksums) == 2
        assert "1 NaN, 0 Inf" in facts["rank 1"]
        assert "NaN" not in facts["rank 0"]
        # Of both, whoever raised it.
        for function in ("in disagree", "in in_step", "in failure_of", "in mismatch"):
            assert function in text, (rank, function)
        assert "dist.broadcast(tensor, 1)" in text
        assert "launch" not in text


def absent(asynchronous):
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    tensor = torch.ones(2)
    dist.broadcast(tensor, 0)
    dist.group.WORLD.set_timeout(0.3)
    if rank == 2:
        store.wait(["seen by 0", "seen by 1"])
        return None
    text = ""
    while "outside of any call" not in text:  # rank 2 has to be seen there first
        with pytest.raises(dist.DistTimeout) as caught:
            reduce_all(tensor, asynchronous)
        text = str(caught.value)
    store.set(f"seen by {rank}", "")
    return text


def reduce_all(tensor, asynchronous):
    if asynchronous:
        dist.all_reduce(tensor, async_op=True).wait()
    else:
        dist.all_reduce(tensor)


@THREADS_AND_PROCESSES
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_timeout_shows_where_who_is_absent_stands(detail, ranks, asynchronous):
    texts = run_ranks(absent, 3, asynchronous, ranks=ranks, timeout=60)
    for rank, text in enumerate(texts[:2]):
        tail = text.partition("DETAIL")[2]
        assert "float32[2], checksum" in tail
        assert "rank 2: outside of any call, after broadcast #1 on group 'world'" in tail
        assert 'store.wait(["seen by 0", "seen by 1"])' in tail
        assert "in reduce_all" in tail, rank
    assert texts[2] is None


def die():
    if dist.get_rank() == 1:
        dist.barrier()
        os._exit(3)
    dist.barrier()
    dist.all_gather_single(torch.empty(4), torch.ones(2))


def test_what_a_dead_rank_has_noted_can_be_read(detail):
    error, _ = run_ranks(die, 2, ranks="processes", timeout=60, return_exceptions=True)
    assert isinstance(error, dist.PeerFailed)
    tail = str(error).partition("DETAIL")[2]
    assert "barrier #1 on group 'world'" in tail
    assert "in die" in tail
    assert "float32[2], checksum" in tail


def test_ranks_of_groups_are_named_as_the_world_does(detail):
    def program():
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return None
        wrong = dist.get_rank() == 2
        try:
            dist.all_reduce(torch.ones(2 + wrong), group=group)
        except dist.CollectiveMismatch as error:
            dist.monitored_barrier(group, timeout=30)
            return str(error)

    for text in run_ranks(program, 3, timeout=60)[1:]:
        assert "rank 1: float32[2], checksum" in text
        assert "rank 2: float32[3], checksum" in text


def test_operations_are_logged_and_nan_is_warned_of(detail, caplog):
    def program():
        rank = dist.get_rank()
        tensor = torch.tensor([1.0, float("nan") if rank else 2.0])
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)  # what rank 1 has is not an input
        if rank == 0:
            dist.send(torch.tensor([float("inf")]), 1, tag=7)
        else:
            dist.recv(tensor[:1], 0, tag=7)
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        dist.barrier()

    with caplog.at_level(logging.DEBUG, "phalanx"):
        run_ranks(program, 2, timeout=60)
    site = "test_debug.py:"
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert sorted((r.rank, r.name) for r in warned) == [
        (0, "phalanx.collectives"),  # all_reduce has left NaN on both
        (0, "phalanx.p2p"),
        (1, "phalanx.collectives"),
    ]
    by_rank = {(r.rank, r.name): r.getMessage() for r in warned}
    assert "all_reduce #1" in by_rank[1, "phalanx.collectives"]
    assert "1 NaN and 0 Inf" in by_rank[1, "phalanx.collectives"]
    assert "broadcast #2" in by_rank[0, "phalanx.collectives"]
    assert "send to rank 1 (tag 7)" in by_rank[0, "phalanx.p2p"]
    assert "0 NaN and 1 Inf" in by_rank[0, "phalanx.p2p"]
    assert all(f"at {site}" in text and "in program" in text for text in by_rank.values())
    calls = [
        r.getMessage().removeprefix("[rank 1] ").partition(":")[0]
        for r in caplog.records
        if r.rank == 1 and r.levelno == logging.DEBUG and site in r.getMessage()
    ]
    where = "on group 'world'"
    assert calls == [
        f"all_reduce #1 {where}",
        f"broadcast #2 {where}",
        f"recv from rank 0 (tag 7) {where}",
        f"all_reduce #3 {where} (2 coalesced)",
        f"barrier #5 {where}",
    ]


def test_works_are_works_at_level_detail(detail):
    def program():
        rank = dist.get_rank()
        tensor = torch.full((2,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        assert work.get_future().wait()[0] is tensor
        assert work.is_success()
        assert work.result() == [tensor]
        if rank == 0:
            dist.isend(tensor, 1).wait()
            return 0
        work = dist.irecv(tensor)
        work.wait()
        return work.source_rank()

    assert run_ranks(program, 2, timeout=60) == [0, 0]


def test_a_rank_that_is_not_at_level_detail_is_said_to_be_unknown(unread):
    def program():
        with pytest.raises(dist.CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(1 + dist.get_rank()))
        dist.monitored_barrier(timeout=30)
        return str(caught.value)

    def only_rank_0(world, group):
        if world.rank == 0:
            detail_of.look_into(world, group)

    unread.setattr(watch, "grouped", only_rank_0)
    aware, unaware = run_ranks(program, 2, timeout=60)
    assert "rank 0: float32[1], checksum" in aware
    assert "rank 1: not known" in aware
    assert "DETAIL" not in unaware


def lock_up():
    assert "phalanx-detail" in [thread.name for thread in threading.enumerate()]
    with pytest.raises(dist.Deadlock, match="DETAIL"):
        dist.recv(torch.ones(1), 1 - dist.get_rank())
    dist.monitored_barrier(timeout=30)


@THREADS_AND_PROCESSES
def test_what_looks_at_ranks_hides_no_deadlock_and_ends_with_them(detail, ranks):
    run_ranks(lock_up, 2, ranks=ranks, timeout=60)
    for thread in threading.enumerate():
        if thread.name == "phalanx-detail":
            thread.join(5)
            assert not thread.is_alive()


# Breakpoints


class Typed(io.StringIO):
    """What somebody types, at a terminal that is no file."""


def test_one_rank_stops_and_the_others_wait(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Typed("p secret\nc\n"))

    def program():
        secret = f"I am {dist.get_rank()}"
        dist.breakpoint(rank=1)
        return secret

    assert run_ranks(program, 3, timeout=60) == ["I am 0", "I am 1", "I am 2"]
    out = capsys.readouterr().out
    assert "'I am 1'" in out
    assert "in program" not in out
    assert "test_debug.py" in out
    assert "program()" in out


def test_the_first_calls_at_a_line_can_be_skipped(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Typed("p step\nc\n" * 2))

    def program():
        for step in range(4):  # noqa: B007
            dist.breakpoint(skip=2)

    run_ranks(program, 2, timeout=60)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line[-1].isdigit()] == ["(rank 0) 2", "(rank 0) 3"]


def test_one_can_step_on(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Typed("n\nn\np total\nc\n"))

    def program():
        dist.breakpoint()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(program, 2, timeout=60) == [2, 2]
    out = capsys.readouterr().out
    assert "-> total = torch.ones(1)" in out
    assert "-> dist.all_reduce(total)" in out
    assert "tensor([1.])" in out


def test_quitting_ends_the_rank_and_tells_the_others(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typed("q\n"))
    errors = run_ranks(dist.breakpoint, 2, timeout=60, return_exceptions=True)
    assert isinstance(errors[0], bdb.BdbQuit)
    assert isinstance(errors[1], dist.PeerFailed)
    assert "BdbQuit" in str(errors[1])


def test_who_waits_is_patient(monkeypatch):
    class Slow(io.StringIO):
        def readline(self, *args):
            time.sleep(1)
            return "c\n"

    monkeypatch.setattr(sys, "stdin", Slow())

    def program():
        dist.group.WORLD.set_timeout(0.2)
        dist.breakpoint()
        return dist.group.WORLD.backend.timeout

    assert run_ranks(program, 2, timeout=60) == [3600, 3600]


def test_the_rank_must_exist():
    def program():
        with pytest.raises(ValueError, match=r"rank=2.*0 to 1"):
            dist.breakpoint(rank=2)

    run_ranks(program, 2, timeout=60)


def stop():
    secret = f"I am {dist.get_rank()}"
    dist.breakpoint(rank=1)
    return secret


def test_processes_read_from_the_terminal_of_their_launcher(tmp_path):
    program = (
        "from phalanx.testing.ranks import run_ranks\n"
        "from test_debug import stop\n"
        "if __name__ == '__main__':\n"
        "    print(run_ranks(stop, 2, ranks='processes', timeout=30))\n"
    )
    (tmp_path / "program.py").write_text(program)
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        input="p secret\nc\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "'I am 1'" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("['I am 0', 'I am 1']")


# Asynchronous calls


def calls_that_differ():
    rank = dist.get_rank()
    for name in MOVING:
        call = Call(name, dtype=torch.float64 if rank == 1 else torch.float32, async_op=True)
        with pytest.raises(dist.CollectiveMismatch, match="seen at debug level DETAIL"):
            call.run()
        assert call.untouched()
    tensors = [torch.full((2 + rank,), 1.0 + rank), torch.full((3,), 1.0 + rank)]
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce_coalesced(tensors, async_op=True)
    with pytest.raises(dist.CollectiveMismatch), dist._coalescing_manager(async_ops=True):
        dist.all_reduce(tensors[0])
    with pytest.raises(dist.CollectiveMismatch):
        dist.group.WORLD.allreduce([tensors[0]], dist.AllreduceOptions())
    assert tensors[0].tolist() == [1.0 + rank] * (2 + rank)
    # Calls that agree give works as ever, whose tensors are in use until they are waited for.
    tensor = torch.tensor([1.0 + rank])
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(dist.BufferInUse):
        tensor.add_(1)
    work.wait()
    assert tensor.item() == 3
    everybody_goes_on()


def test_calls_that_differ_raise_before_their_works_are_waited_for(detail):
    run_ranks(calls_that_differ, 2)


def calls_that_differ_over_hosts():
    rank = dist.get_rank()
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(torch.ones(2 + (rank == 2)), async_op=True)


def test_calls_that_differ_over_hosts_raise_themselves(detail):
    on_hosts(calls_that_differ_over_hosts, "aab")
