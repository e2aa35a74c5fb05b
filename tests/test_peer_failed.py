"""However a rank ends while others need it, they are told which, how, and what it last did."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import everybody_goes_on
from words import listen, tell

import phalanx as dist
from phalanx.testing import run_ranks

VICTIM = 1


def end(kind: str) -> Any:
    """End this rank in one of the ways in which ranks end."""
    if kind == "raises":
        raise ValueError("bad batch")
    if kind == "exits":
        sys.exit(3)
    if kind == "segfaults":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
    elif kind == "aborts":
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    elif kind == "exits at once":
        os._exit(7)
    elif kind == "execs":
        os.execvp("sleep", ["sleep", "1000"])
    elif kind != "leaves":
        os.kill(os.getpid(), getattr(signal, kind))
    return "left"


# How an end is told; what was not said by the rank itself, the system knows.
SAID = {
    "raises": "ValueError: bad batch",
    "exits": "sys.exit(3)",
    "segfaults": "SIGSEGV",
    "aborts": "SIGABRT",
    "exits at once": "exited with code 7",
    "execs": "called exec without leaving its groups: its process now runs 'sleep'",
    "SIGKILL": "SIGKILL",
    "SIGTERM": "SIGTERM",
    "leaves": "has left",
}
LAST_DEED = re.compile(r"all_reduce\(float32\[5\], MAX\).* test_peer_failed\.py:\d+ in _ends")
KINDS = pytest.mark.parametrize("kind", SAID)


def _ends(kind: str) -> Any:
    """Do a little, then lose a rank; return its pid and what the others are told."""
    rank = dist.get_rank()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    last = torch.ones(5)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    if rank == VICTIM:
        return end(kind)
    with pytest.raises(dist.PeerFailed) as caught:
        dist.broadcast(torch.ones(2), 0)
    return pids[VICTIM], str(caught.value)


@KINDS
def test_the_others_are_told_how_a_process_ended(kind: str) -> None:
    results = run_ranks(_ends, 3, kind, ranks="processes", return_exceptions=True)
    for rank in (0, 2):
        pid, text = results[rank]
        assert "broadcast #" in text  # what they waited in, and where
        assert "test_peer_failed.py:" in text
        assert "_ends" in text
        assert f"rank {VICTIM}" in text
        assert str(pid) in text
        assert platform.node() in text
        assert SAID[kind] in text
        # Its last operation, and where that was.
        assert LAST_DEED.search(text)
    if kind == "execs":  # though it runs on, it will not return anything
        assert "exec" in str(results[VICTIM])
        assert "'sleep'" in str(results[VICTIM])


@pytest.mark.parametrize("kind", ["raises", "exits", "leaves"])
def test_the_others_are_told_how_a_thread_ended(kind: str) -> None:
    results = run_ranks(_ends, 3, kind, return_exceptions=True)
    for rank in (0, 2):
        _, text = results[rank]
        assert f"rank {VICTIM}" in text
        assert SAID[kind] in text
        assert LAST_DEED.search(text)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_traceback_is_passed_on(ranks: Any) -> None:
    results = run_ranks(_ends, 3, "raises", ranks=ranks, return_exceptions=True)
    assert isinstance(results[VICTIM], ValueError)
    for rank in (0, 2):
        text = results[rank][1]
        assert "Traceback" in text
        assert re.search(r'test_peer_failed\.py", line \d+, in end\n\s+raise ValueError', text)
        assert text.index("in _ends") < text.index("in end")


# The same in every kind of wait


def _waits_for_the_dead(wait: str) -> str:
    rank, tensor = dist.get_rank(), torch.ones(300_000)
    dist.barrier()
    if rank == VICTIM:
        end("SIGKILL")
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "future": lambda: dist.all_reduce_coalesced([tensor], async_op=True).wait(),
        "recv": lambda: dist.recv(tensor, VICTIM),
        "irecv": lambda: dist.irecv(tensor, VICTIM).wait(),
        "send": lambda: dist.send(tensor, VICTIM),
        "isend": lambda: dist.isend(tensor, VICTIM).wait(),
        "new_group": lambda: dist.barrier(dist.new_group([0, VICTIM, 2])),
        "all_gather_object": lambda: dist.all_gather_object([None] * 3, "object"),
        "barrier": lambda: dist.barrier(timeout=50),
        "coalesced": lambda: dist.all_reduce_coalesced([tensor, tensor]),
    }
    with pytest.raises(dist.PeerFailed, match=rf"(?s)rank {VICTIM}.*SIGKILL"):
        calls[wait]()
    return "told"


@pytest.mark.parametrize(
    "wait",
    [
        *["all_reduce", "async", "future", "recv", "irecv", "send", "isend", "new_group"],
        *["all_gather_object", "barrier", "coalesced"],
    ],
)
def test_every_wait_ends(wait: str) -> None:
    results = run_ranks(_waits_for_the_dead, 3, wait, ranks="processes", return_exceptions=True)
    assert results[::2] == ["told", "told"]


def _from_anybody() -> str:
    dist.barrier()
    if dist.get_rank() > 0:
        end("SIGKILL")
    with pytest.raises(dist.PeerFailed) as caught:
        dist.recv(torch.empty(1))
    return str(caught.value)


def test_a_receive_from_anybody_ends_when_nobody_is_left() -> None:
    told = run_ranks(_from_anybody, 3, ranks="processes", return_exceptions=True)[0]
    assert "recv" in told
    for rank in (1, 2):
        assert str(rank) in told
    assert "SIGKILL" in told


def _another_may_still_send() -> float:
    rank, tensor = dist.get_rank(), torch.zeros(1)
    dist.barrier()
    if rank == VICTIM:
        end("SIGKILL")
    if rank == 0:
        with pytest.raises(dist.PeerFailed, match="SIGKILL"):
            dist.recv(tensor, VICTIM)
        tell("noticed")
        dist.recv(tensor)
    else:
        listen("noticed")
        dist.send(torch.ones(1), 0)
    return tensor.item()


def test_a_receive_from_anybody_waits_for_those_who_live() -> None:
    results = run_ranks(_another_may_still_send, 3, ranks="processes", return_exceptions=True)
    assert results[0] == 1


# Who is not concerned goes on


def _survivors(kind: str) -> str:
    rank = dist.get_rank()
    alive, mixed = dist.new_group([0, 2, 3]), dist.new_group([1, 3])
    everybody_goes_on()
    if rank == VICTIM:
        return str(end(kind))
    everybody_goes_on(alive)
    if rank == 3:
        with pytest.raises(dist.PeerFailed, match=f"rank {VICTIM}"):
            dist.barrier(mixed)
    everybody_goes_on(alive)
    with pytest.raises(dist.PeerFailed, match=f"rank {VICTIM}") as caught:
        everybody_goes_on()
    assert SAID[kind] in str(caught.value)
    for _ in range(3):
        everybody_goes_on(alive)
    if rank == 0:
        dist.send(torch.ones(3), 2, group=alive)
    elif rank == 2:
        dist.recv(torch.empty(3), 0, group=alive)
    everybody_goes_on(dist.new_group([0, 2, 3], use_local_synchronization=True))
    return "alive"


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("SIGKILL", "processes"),
        ("raises", "processes"),
        ("raises", "threads"),
        ("leaves", "threads"),
    ],
)
def test_groups_without_the_dead_rank_go_on(kind: str, ranks: Any) -> None:
    results = run_ranks(_survivors, 4, kind, ranks=ranks, return_exceptions=True)
    assert [results[rank] for rank in (0, 2, 3)] == ["alive"] * 3


def _later_calls() -> list[str]:
    rank = dist.get_rank()
    dist.barrier()
    if rank == VICTIM:
        end("SIGKILL")
    told = []
    for call in (dist.barrier, dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(dist.PeerFailed) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_every_later_call_says_why() -> None:
    results = run_ranks(_later_calls, 3, ranks="processes", return_exceptions=True)
    for text in [*results[0], *results[2]]:
        assert f"rank {VICTIM}" in text
        assert "SIGKILL" in text


def _dies_in_the_middle(kind: str) -> str:
    """The victim is killed while it waits itself, so that its last operation is not finished."""
    dist.barrier()
    if dist.get_rank() == VICTIM:
        signal.signal(signal.SIGALRM, lambda *_: end(kind))
        signal.setitimer(signal.ITIMER_REAL, 1)
        dist.recv(torch.empty(11), 0)
    with pytest.raises(dist.PeerFailed) as caught:
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["SIGKILL", "raises"])
def test_what_it_was_waiting_for_is_told(kind: str) -> None:
    told = run_ranks(_dies_in_the_middle, 2, kind, ranks="processes", return_exceptions=True)[0]
    assert SAID[kind] in told
    assert "recv(float32[11]" in told
    assert "_dies_in_the_middle" in told


# Ranks that no launcher of ours looks after: a script under torchrun or mpirun


_SCRIPT = """
import os, signal, sys, torch, phalanx as dist
dist.init_process_group(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    {end}
try:
    dist.barrier()
except dist.PeerFailed as error:
    print(error)
"""
# The exit code is told if the program ends within a second, which a busy machine may not manage.
ENDS = {
    "raise ValueError('bad batch')": "ValueError: bad batch",
    "sys.exit(3)": "has ended( with exit code 3)? ",
    "sys.exit('no data')": "has ended( with exit code 1)? ",
    "sys.exit()": "has ended( with exit code 0)? ",
    "dist.destroy_process_group(); sys.exit()": "has left",
    "os._exit(7)": "exited with code 7",
    "os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
    "os.kill(os.getpid(), signal.SIGTERM)": "SIGTERM",
    "os.kill(os.getpid(), signal.SIGINT)": "KeyboardInterrupt",
}


@pytest.mark.parametrize("statement", ENDS)
def test_scripts_tell_too(statement: str, tmp_path: Path) -> None:
    script = _SCRIPT.format(end=statement)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, f"file://{tmp_path}/store", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    told, _ = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert "barrier #2" in told
    assert "rank 1" in told
    assert str(ranks[1].pid) in told
    assert re.search(ENDS[statement], told)
    assert "all_reduce(float32[3], SUM)" in told
