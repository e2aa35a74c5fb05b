"""``phalanx trace``: what it writes and says, of good records and of bad ones."""

import errno
import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
import trace_files as made

from phalanx import cli
from phalanx.trace import words


@pytest.fixture
def job(tmp_path):
    """Two ranks: a collective that rank 1 is late for, a message, a range."""
    directory = tmp_path / "out"
    directory.mkdir()
    for rank in (0, 1):
        slots = [
            made.site("train.py:88 in step"),
            made.site("</script><b>.py:1", "all_gather_object"),
            made.group(1, "world", rank, 2),
            made.stretch("forward", 1_000, 5_000),
            made.operation("all_reduce", 1, 10_000 + 40_000 * rank, 60_000, bytes=4096),
        ]
        if rank == 0:
            slots.append(made.operation("send", 1, 70_000, 75_000, root=1, tag=3, site=1))
        else:
            slots.append(made.operation("recv", 1, 72_000, 90_000, root=0, source=0, tag=3))
        made.write(directory, rank, 2, slots)
    return directory


def run(capsys, *arguments, code=0):
    assert cli.main(["trace", *map(str, arguments)]) == code
    return capsys.readouterr()


def test_it_writes_both_files_and_says_what_it_found(job, capsys):
    said = run(capsys, job).out
    assert "4 operations of 2 ranks" in said
    assert "40 us waited for rank 1 at train.py:88 in step (all_reduce)" in said
    assert str(job / "trace.html") in said
    assert "\x1b" not in said  # no colours in a pipe
    page = (job / "trace.html").read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "</script><b>" not in page  # what is recorded cannot break out of its element


def test_it_writes_elsewhere(job, tmp_path, capsys):
    run(capsys, job, "-o", tmp_path / "new" / "place")
    assert sorted(path.name for path in (tmp_path / "new/place").iterdir()) == [
        "trace.html",
        "trace.json",
    ]
    assert not (job / "trace.html").exists()


def test_json_is_the_summary(job, capsys):
    facts = json.loads(run(capsys, job, "--json").out)
    assert not (job / "trace.html").exists()
    assert [rank["lost_seconds"] for rank in facts["ranks"]] == pytest.approx([42e-6, 0], abs=3e-6)
    assert facts["stragglers"][0]["rank"] == 1
    assert facts["groups"] == [
        {
            "name": "world",
            "ranks": [0, 1],
            "size": 2,
            "operations": 4,
            "bytes": 8200,
            "wait_seconds": pytest.approx(42e-6),
            "transfer_seconds": pytest.approx(41e-6),
        }
    ]


def test_the_file_for_perfetto(job, capsys):
    """Holds to the format: complete events that nest, metadata, flows with both ends."""
    run(capsys, job)
    written = json.loads((job / "trace.json").read_text())
    events = written["traceEvents"]
    for event in events:
        assert event["ph"] in "XMsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {0: "rank 0 (box)", 1: "rank 1 (box)"}
    lanes = {}
    for event in (event for event in events if event["ph"] == "X"):
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        for a in lane:
            for b in lane:
                apart = a["ts"] + a["dur"] <= b["ts"] or b["ts"] + b["dur"] <= a["ts"]
                inside = a["ts"] <= b["ts"] and b["ts"] + b["dur"] <= a["ts"] + a["dur"]
                around = b["ts"] <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"]
                assert apart or inside or around
    reduce = next(e for e in events if e["name"] == "all_reduce" and e["pid"] == 0)
    assert (reduce["ts"], reduce["dur"]) == (9, 50)
    assert reduce["args"]["wait_us"] == 40
    assert reduce["args"]["transfer_us"] == 10
    assert reduce["args"]["last_rank"] == 1
    assert reduce["args"]["site"] == "train.py:88 in step"
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert [(starts[i]["pid"], ends[i]["pid"]) for i in starts] == [(0, 1)]


def test_open(job, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    run(capsys, job, "--open")
    assert opened == [(job / "trace.html").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert str(job / "trace.html") in run(capsys, job, "--open", code=1).err


def test_a_directory_without_records(tmp_path, capsys):
    said = run(capsys, tmp_path, code=1).err
    assert "has no records" in said
    assert "phalanx run --trace" in said
    assert "is not a directory" in run(capsys, tmp_path / "none", code=1).err


def test_records_without_operations(tmp_path, capsys):
    made.write(tmp_path, 0, 1, [])
    assert "before their first operation" in run(capsys, tmp_path, code=1).err


def test_broken_files_are_named_and_the_others_are_read(job, capsys):
    (job / "rank2-9.trace").write_bytes(b"")
    (job / "rank3-9.trace").write_bytes(bytes(1 << 20))
    (job / "rank4-9.trace").write_bytes(b"something else" * 100)
    other = bytearray((job / "rank0-100.trace").read_bytes())
    other[8] = 9
    (job / "rank5-9.trace").write_bytes(other)
    said = run(capsys, job)
    assert "4 operations of 2 ranks" in said.out
    assert "rank2-9.trace: empty" in said.err
    assert "rank3-9.trace: empty" in said.err
    assert "rank4-9.trace: not a record" in said.err
    assert "rank5-9.trace: has format 9" in said.err
    for path in job.glob("rank[01]*"):
        path.unlink()
    said = run(capsys, job, code=1).err
    assert "nothing in" in said
    assert "rank5-9.trace" in said


@pytest.mark.parametrize("left", [511, 512, 600, 1000, 1151])
def test_a_truncated_file_is_read_as_far_as_it_goes(job, capsys, left):
    path = job / "rank1-101.trace"
    path.write_bytes(path.read_bytes()[:left])
    said = run(capsys, job)
    slots = (left - 512) // 128
    shown = 2 + (1 if slots >= 5 else 0)
    assert f"{shown} operations" in said.out
    assert ("no record of rank 1" in said.err) == (left < 512)
    assert ("rank1-101.trace: the end is missing" in said.err) == (left in (600, 1000, 1151))


def test_a_slot_that_was_being_written_ends_the_file(job, capsys):
    path = job / "rank1-101.trace"
    path.write_bytes(path.read_bytes()[:-128] + bytes(1) + b"\x09" * 127)
    assert "3 operations of 2 ranks" in run(capsys, job).out


def test_lost_operations_and_missing_ranks_are_told(tmp_path, capsys):
    slots = [made.site("a.py:1"), made.group(1, "w", 0, 4), made.operation("barrier", 1, 10, 20)]
    made.write(tmp_path, 0, 4, slots, error=errno.ENOSPC, lost=123)
    said = run(capsys, tmp_path).err
    assert "123 operations are not recorded" in said
    assert os.strerror(errno.ENOSPC) in said
    assert "no record of ranks 1-3" in said


def test_who_never_came_is_told(tmp_path, capsys):
    start = [made.site("train.py:88 in step"), made.group(1, "world", 0, 2)]
    made.write(tmp_path, 0, 2, [*start, made.operation("barrier", 1, 10, 20, state=6)])
    made.write(tmp_path, 1, 2, [made.group(1, "world", 1, 2)])
    said = run(capsys, tmp_path).out
    assert "rank 1 never came to barrier #1 on world at train.py:88 in step" in said
    assert "others waited 10 ns" in said


def test_runs_in_one_directory(job, capsys):
    """The newest is shown, unless another one or all are asked for."""
    slots = [made.site("b.py:1"), made.group(9, "w", 0, 1), made.operation("barrier", 1, 10, 20)]
    made.write(job, 0, 1, slots, "rank0-7.trace", pid=7, world=8, epoch=10**15)
    said = run(capsys, job)
    assert "1 operation of 1 rank" in said.out
    assert "2 runs that have no world in common" in said.err
    assert "2 ranks (processes 100 to 101)" in said.err
    assert "1 rank (process 7)" in said.err
    assert "number 2 " in said.err
    said = run(capsys, job, "--run", "1")
    assert "4 operations of 2 ranks" in said.out
    assert "number 1 " in said.err
    assert "5 operations of 2 ranks" in run(capsys, job, "--all").out
    said = run(capsys, job, "--run", "3", code=1).err
    assert "there is no run 3" in said
    assert "(process 7)" in said


def test_a_place_that_cannot_be_written(job, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "cannot write into" in run(capsys, job, "-o", tmp_path / "file", code=1).err


def test_it_starts_without_torch():
    code = "import sys, phalanx.trace.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (8.12e-7, "812 ns"), (4.56e-3, "4.56 ms"), (12.34, "12.3 s"), (4000, "4000 s")],
)
def test_moments(seconds, text):
    assert words.moment(seconds) == text


def test_the_page_is_shipped():
    folder = Path(words.__file__).parent
    assert {path.name for path in folder.iterdir()} >= {"page.html", "page.css", "page.js"}
