"""What phalanx top shows of a job, and what its keys do, without a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console
from terminals import Terminal

from phalanx.debug import choice, looks, outside, top
from phalanx.debug.live import Live
from phalanx.debug.outside import Group, Job, Operation, Rank, Seat, Wait

SIZE = 40
STRAGGLER = 7


def made_job(size: int = SIZE) -> Job:
    """Return a job in which all ranks wait for one."""
    now = time.monotonic_ns()
    common = {
        "op": "all_reduce",
        "site": "train.py:9 in step",
    }
    wait = Wait(
        **common,
        what="all_reduce(float32[8], SUM)",
        group="world",
        started_ns=now - 5 * 10**9,
        needs=[STRAGGLER],
        any=False,
        blocked=False,
        lane=False,
        own=False,
        making=False,
    )
    operation = Operation(
        **common,
        kind="collective",
        sequence=3,
        api="all_reduce",
        dtype="float32",
        shape=[8],
        reduce="SUM",
        root=None,
        peer=None,
        tag=None,
        bytes=32,
        state="waiting",
        posted_ns=now - 5 * 10**9,
        finished_ns=0,
        text="all_reduce(float32[8], SUM)",
        account="all_reduce(float32[8], SUM) #3 at train.py:9 in step, waiting",
    )
    seat = Seat(True, False, 3, 3, 0, operation, None, [32, 32, 32], [])
    ranks = [
        Rank(
            rank=number,
            pid=1000 + number,
            thread=0,
            host="here",
            presence="here",
            signal=0,
            ended_ns=0,
            why="",
            waits=[] if number == STRAGGLER else [wait],
            alive=True,
            state="R" if number == STRAGGLER else "S",
            cpu_seconds=1.5,
        )
        for number in range(size)
    ]
    group = Group("world", list(range(size)), [seat] * size, "")
    return Job("0123456789abcdef", False, now - 60 * 10**9, now, "", ranks, [group])


@pytest.fixture
def live() -> Live:
    return Live(made_job())


def picture(live: Live, width: int = 120, height: int = 30) -> list[str]:
    console = Console(width=width, height=height, highlight=False)
    lines = console.render_lines(live.frame(width, height), console.options.update(height=height))
    return ["".join(part.text for part in line).rstrip() for line in lines]


def press(live: Live, *keys: str) -> None:
    for key in keys:
        live.press(key)


def shown_ranks(lines: list[str]) -> list[int]:
    """Return the ranks in the table: lines with a number first, below its heading."""
    marked = (line.replace("▶", " ").split() for line in lines[3:])
    return [int(words[0]) for words in marked if words and words[0].isdigit() and "to" not in words]


def test_the_straggler_is_marked(live: Live) -> None:
    lines = picture(live, height=60)
    assert "waiting for rank 7" in lines[0]
    assert shown_ranks(lines) == list(range(SIZE))
    (marked,) = (line for line in lines if "▶" in line)
    assert marked.split()[:4] == ["▶", "7", "1007", "computing"]
    assert any(line.startswith("straggler: rank 7") for line in lines)
    assert "quit" in lines[-1]


@pytest.mark.parametrize("height", [8, 12, 24, 40, 100])
@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_it_fits_any_terminal(live: Live, width: int, height: int) -> None:
    live.rank = SIZE - 1
    lines = picture(live, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert SIZE - 1 in shown_ranks(lines)  # the selected one is in sight
    assert "quit" in lines[-1]
    heading = next(line for line in lines if "STATE" in line)
    assert ("CALL SITE" in heading) == (width >= 100)
    assert ("BYTES/S" in heading) == (width == 200)


def test_selecting(live: Live) -> None:
    press(live, "down", "j", "j", "up")
    assert live.rank == 2
    press(live, "end", "down")
    assert live.rank == SIZE - 1
    press(live, "page up", "k")
    assert live.rank == SIZE - 12
    press(live, "home", "up")
    assert live.rank == 0
    assert "group 'world': collectives: 3, messages: 0" in "\n".join(picture(live))


def test_showing_some(live: Live) -> None:
    press(live, "f")
    assert STRAGGLER not in shown_ranks(picture(live, height=60))
    press(live, "f")
    assert shown_ranks(picture(live)) == [STRAGGLER]
    press(live, "down")
    assert live.rank == STRAGGLER
    press(live, "f")
    assert live.show == "all"


def test_sorting(live: Live) -> None:
    press(live, "s")
    assert live.sort == "wait"
    assert [row.rank for row in live.rows()][-1] == STRAGGLER
    press(live, "s", "s", "s")
    assert [row.rank for row in live.rows()] == list(range(SIZE))


def test_pausing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(outside, "look_again", lambda job: looked.append(job) or job)
    press(live, "p")
    live.look()
    assert looked == []
    assert "paused" in picture(live)[0]
    press(live, "space")
    live.look()
    assert len(looked) == 1


def test_the_end(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "look_again", lambda job: None)
    live.look()
    assert (live.ended, live.over) == (True, True)


def test_pages_can_be_left_and_scrolled(live: Live) -> None:
    press(live, "?")
    assert "keys" in picture(live)[0]
    short = picture(live, height=8)
    assert "more lines" in short[-1]
    press(live, *["down"] * 20)
    assert "more lines" not in picture(live, height=8)[-1]
    press(live, "q")
    assert (live.page, live.over) == ("table", False)
    press(live, "q")
    assert live.over


def test_rows_of_a_kind() -> None:
    job = made_job()
    rows = top.arranged(top.rows(job, job), "wait", "others")
    assert [row.rank for row in rows] == [STRAGGLER]


@pytest.mark.parametrize(
    ("state", "style"),
    [
        ("waiting for rank 2", "yellow"),
        ("rank 2 gone", "bold red"),
        ("ranks 0, 2 stopped", "magenta"),
        ("stuck: deadlock", "bold red"),
        ("running", "green"),
        ("something new", ""),
    ],
)
def test_states_have_colours(state: str, style: str) -> None:
    assert looks.style(state) == style


class Typed:
    """A screen on which these keys are typed, one after the other."""

    def __init__(self, keys: list[str]) -> None:
        self._keys = iter(keys)

    def __call__(self, console: Console) -> Typed:
        return self

    def __enter__(self) -> Typed:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def draw(self, frame: object) -> None:
        pass

    def key(self, timeout: float) -> str:
        return next(self._keys)


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (["enter"], 0),
        (["down", "enter"], 1),
        (["up", "down", "j", "j", "enter"], 2),
        (["down", "k", "enter"], 0),
        (["down", "q"], None),
        (["quit"], None),
    ],
)
def test_choosing(keys: list[str], chosen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [replace(made_job(), id=f"{n}" * 16) for n in range(3)]
    monkeypatch.setattr(choice, "Screen", Typed(keys))
    picked = choice.choose(Console(), jobs, interval=3600)
    assert picked == (None if chosen is None else jobs[chosen])


def test_a_choice_among_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "Screen", Typed(["resize"]))
    monkeypatch.setattr(choice, "look", outside.View)
    assert choice.choose(Console(), [made_job()], interval=0) is None


def test_an_error_gives_the_terminal_back() -> None:
    code = (
        "from rich.console import Console\n"
        "from phalanx.debug.screen import Screen\n"
        "with Screen(Console()) as screen:\n"
        "    screen.draw('shown')\n"
        "    screen.key(60)\n"
        "    raise ZeroDivisionError\n"
    )
    with Terminal(command=[sys.executable, "-c", code]) as terminal:
        terminal.until("shown")
        terminal.press("\x1b[Z\x1b[A")  # an unknown key, and one that ends the wait
        terminal.until("ZeroDivisionError")
        assert terminal.end() == 1
