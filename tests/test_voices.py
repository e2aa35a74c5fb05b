"""What thread ranks print is kept apart."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import phalanx as dist
from phalanx.launch import identity, voices
from phalanx.launch.threads import run_threads


def in_parts(repeats: int = 50) -> None:
    """Print lines in pieces, so that ranks would fall into each other's."""
    for i in range(repeats):
        for piece in (f"r{dist.get_rank()}", "-", str(i), "\n"):
            sys.stdout.write(piece)


def of_rank(rank: int, repeats: int = 50) -> list[str]:
    return [f"r{rank}-{i}" for i in range(repeats)]


def test_what_each_rank_writes_is_collected(capsys: pytest.CaptureFixture[str]) -> None:
    def fn() -> None:
        in_parts()
        print(f"trouble on {dist.get_rank()}", file=sys.stderr)

    with voices.collected() as heard:
        run_threads(fn, 3)
        print("from the caller")
    assert heard.ranks() == [0, 1, 2]
    for rank in range(3):
        assert heard.take(rank, "stdout").splitlines() == of_rank(rank)
        assert heard.take(rank, "stderr") == f"trouble on {rank}\n"
        assert heard.take(rank, "stdout") == ""
    assert capsys.readouterr().out == "from the caller\n"


def test_lines_are_labelled_and_never_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    with voices.labelled():
        run_threads(in_parts, 3)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {text}" for text in of_rank(rank)]
    assert len(lines) == 150


def test_whole_lines_have_no_label(capsys: pytest.CaptureFixture[str]) -> None:
    with voices.whole_lines():
        run_threads(in_parts, 2)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(of_rank(0) + of_rank(1))


def test_an_unfinished_line_is_printed_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with voices.labelled():
        run_threads(lambda: print("1%\r50%\r99%", end="", flush=True), 1)
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == "[rank 0] 99%\n"


def test_threads_and_tasks_of_a_rank_speak_for_it() -> None:
    with voices.collected() as heard, ThreadPoolExecutor(1) as pool:

        def fn() -> None:
            child = threading.Thread(target=print, args=("child",))
            child.start()
            child.join()
            pool.submit(print, "task").result()

        run_threads(fn, 2)
    assert [heard.take(rank, "stdout") for rank in range(2)] == ["child\ntask\n"] * 2


def test_a_world_within_a_rank_speaks_for_that_rank() -> None:
    with voices.collected() as heard:
        run_threads(lambda: run_threads(print, 2, "hello"), 2)
    assert [heard.take(rank, "stdout") for rank in range(2)] == ["hello\nhello\n"] * 2


def test_bytes_are_heard_as_well() -> None:
    with voices.collected() as heard:
        run_threads(lambda: sys.stdout.buffer.write("größer\n".encode()), 1)
    assert heard.take(0, "stdout") == "größer\n"


def test_a_rank_may_write_past_who_listens(capsys: pytest.CaptureFixture[str]) -> None:
    def fn() -> None:
        if dist.get_rank() == 1:
            me = identity.ancestry(identity.here.rank)[-1]
            voices.let_through(me)
            print("past")
            voices.hear_again(me)
        print("heard")

    with voices.collected() as heard:
        run_threads(fn, 2)
    assert capsys.readouterr().out == "past\n"
    assert [heard.take(rank, "stdout") for rank in range(2)] == ["heard\n"] * 2


def test_the_streams_are_as_before_also_after_errors() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), voices.labelled():
        run_threads(lambda: 1 / 0, 2)
    with voices.collected(), voices.labelled():
        assert (sys.stdout, sys.stderr) != before
    assert (sys.stdout, sys.stderr) == before


def test_streams_that_somebody_exchanged_can_be_taken_again() -> None:
    before = sys.stdout
    with voices.collected() as heard:
        sys.stdout = before
        voices.listen_again()
        run_threads(print, 1, "again")
    assert heard.take(0, "stdout") == "again\n"
    assert sys.stdout is before
