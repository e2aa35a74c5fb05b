"""Joining the records of ranks: who waited for whom, and who met."""

import numpy as np
import pytest
import trace_files as made
from hypothesis import given
from hypothesis import strategies as st

from phalanx.trace import files, joins, layout, summary

MOMENTS = st.integers(1, 10**12)


def build(*ranks, groups=("world",), size=None):
    """Return a trace of these operations without a file; their group is a place in `groups`."""
    slots = [
        [made.site("a.py:1"), *_groups(groups, rank, size or len(ranks))]
        for rank in range(len(ranks))
    ]
    sources = []
    for rank, operations in enumerate(ranks):
        data = made.head(rank, len(ranks)) + b"".join(slots[rank] + list(operations))
        sources.append(files.parse(made.PATH, np.frombuffer(data, np.uint8)))
    return files.assemble(sources)


def _groups(names, rank, size):
    return [made.group(i, name, rank, size) for i, name in enumerate(names)]


@given(st.lists(st.tuples(MOMENTS, st.integers(0, 10**9)), min_size=1, max_size=8))
def test_wait_and_transfer_are_the_whole(times):
    """Of a collective: all wait for the last, who waits for nobody."""
    latest = max(posted for posted, _ in times)
    ranks = [[made.operation("all_reduce", 1, p, latest + tail)] for p, tail in times]
    trace = build(*ranks)
    joined = joins.join(trace)
    by_rank = np.argsort(trace.operations["rank"])
    posted = np.array([p for p, _ in times])
    assert (joined.wait[by_rank] == latest - posted).all()
    assert (joined.wait + joined.transfer == joined.duration).all()
    assert (joined.transfer[by_rank] == [tail for _, tail in times]).all()
    assert joined.late.tolist() == [latest - posted.min()]
    assert joined.waited.tolist() == [(latest - posted).sum()]
    assert trace.operations["posted"][joined.last[0]] == latest - trace.began
    assert (joined.lost == joined.wait).all()


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=3, max_size=3),
        min_size=2,
        max_size=4,
    )
)
def test_meetings_do_not_mix(ranks):
    """Ranks that meet several times on several groups are joined by group and sequence."""
    slots = []
    for gaps in ranks:
        now, mine = 1, []
        for number, (before, length) in enumerate(gaps):
            now += before
            mine += [
                made.operation("barrier", number + 1, now, now + length, group=0),
                made.operation("barrier", number + 1, now + length, now + length, group=1),
            ]
            now += length
        slots.append(mine)
    trace = build(*slots, groups=("world", "other"))
    joined = joins.join(trace)
    assert joined.came.tolist() == [len(ranks)] * 6
    for place in range(6):
        members = trace.operations[joined.meeting == place]
        assert len(set(members["rank"])) == len(ranks)
        assert len(set(members["group"])) == len(set(members["sequence"])) == 1
    assert (joined.wait >= 0).all()
    assert (joined.wait <= joined.duration).all()


@given(st.permutations([0, 0, 0, 1, 1, 2]), st.permutations([0, 0, 0, 1, 1, 2]))
def test_messages_match_in_the_order_of_sending(sent, received):
    """By source and tag: the n-th of a tag is the n-th that is received with it."""
    sends = [
        made.operation("send", i + 1, 10 + i, 11 + i, root=1, tag=tag) for i, tag in enumerate(sent)
    ]
    recvs = [
        made.operation("recv", i + 1, 50 + i, 52 + i, root=-1, source=0, tag=tag)
        for i, tag in enumerate(received)
    ]
    trace = build(sends, recvs)
    joined = joins.join(trace)
    table = trace.operations
    assert (joined.partner >= 0).all()
    assert (joined.partner[joined.partner] == np.arange(table.size)).all()
    for i, other in enumerate(joined.partner):
        assert table["tag"][i] == table["tag"][other]
        assert table["rank"][i] != table["rank"][other]
    for tag in (0, 1, 2):
        of_tag = np.flatnonzero((table["tag"] == tag) & (table["rank"] == 0))
        assert (np.diff(table["sequence"][joined.partner[of_tag]].astype(int)) > 0).all()
    assert (joined.wait == 0).all()  # all was sent before it was asked for


def test_a_message_waits_for_its_other_end():
    send = made.operation("send", 1, 100, 180, root=1)
    recv = made.operation("recv", 1, 130, 200, root=0, source=0)
    early = made.operation("recv", 2, 300, 450, root=0, source=0)
    late = made.operation("send", 2, 400, 410, root=1)
    joined = joins.join(build([send, late], [recv, early]))
    assert joined.wait.tolist() == [30, 0, 100, 0]
    assert joined.transfer.tolist() == [50, 70, 50, 10]
    assert joined.partner.tolist() == [1, 0, 3, 2]


def test_only_a_thread_that_stands_still_loses_time():
    """What the lane does meanwhile is lost only from when somebody waits for it."""
    lane = files.ASYNC | files.ON_LANE
    slots = [
        made.operation("all_reduce", 1, 100, 300, flags=0),
        made.operation("all_reduce", 2, 400, 600, flags=lane, awaited=450),
        made.operation("all_reduce", 3, 700, 900, flags=lane),
        made.operation("all_reduce", 4, 1000, 1200, flags=files.ASYNC, awaited=1000),
        made.operation("all_reduce", 5, 1300, 1500, flags=lane, awaited=1450),
    ]
    others = [
        made.operation("all_reduce", i + 1, at, at + 100)
        for i, at in enumerate((200, 500, 800, 1100, 1400))
    ]
    trace = build(slots, others)
    joined = joins.join(trace)
    mine = trace.operations["rank"] == 0
    assert joined.wait[mine].tolist() == [100] * 5
    assert joined.lost[mine].tolist() == [100, 50, 0, 100, 0]
    assert not joined.lost[~mine].any()


def test_who_never_comes_is_waited_for_to_the_end():
    failed = made.operation("barrier", 2, 100, 900, state=6)
    trace = build(
        [made.operation("barrier", 1, 10, 20), failed], [made.operation("barrier", 1, 15, 20)]
    )
    joined = joins.join(trace)
    facts = summary.summarize(trace, joined)
    (unmet,) = facts["unmet"]
    assert (unmet["op"], unmet["sequence"]) == ("barrier", 2)
    assert (unmet["came"], unmet["absent"]) == ([0], [1])
    lost = sum(rank["lost_seconds"] for rank in facts["ranks"])
    assert 0 < unmet["waited_seconds"] <= lost
    assert sum(rank["kept_others_seconds"] for rank in facts["ranks"]) == pytest.approx(lost)
    assert joined.wait.tolist() == [5, 0, 800]
    assert joined.complete.tolist() == [True, False]


def test_a_missing_record_leaves_the_wait_unknown():
    trace = build([made.operation("barrier", 1, 10, 20)], [], size=3)
    joined = joins.join(trace)
    assert joined.wait.tolist() == [-1]
    assert joined.transfer.tolist() == [0]
    assert summary.summarize(trace, joined)["slowest"][0]["wait_seconds"] is None


def test_what_is_not_finished_lasts_until_the_end():
    trace = build([made.operation("barrier", 1, 100, 0)], [made.operation("send", 1, 50, 400)])
    joined = joins.join(trace)
    assert joined.duration.tolist() == [350, 300]
    assert summary.summarize(trace, joined)["unfinished"] == 1


def test_a_number_that_was_used_again_counts_once():
    """A rank that could not begin an operation uses its number for the next one."""
    slots = [made.operation("barrier", 1, 10, 20, state=6), made.operation("barrier", 1, 30, 60)]
    trace = build(slots, [made.operation("barrier", 1, 50, 60)])
    joined = joins.join(trace)
    assert joined.came.tolist() == [2]
    assert joined.wait.tolist() == [10, 20, 0]


def test_machines_are_aligned_by_the_time_of_day(tmp_path):
    """Ranks of one machine by its monotonic clock, whatever their files say of the time of day."""
    for rank, (boot, epoch, posted) in enumerate(
        [("one", 10**15, 100), ("one", 10**15 + 77, 140), ("two", 10**15 - 500, 650)]
    ):
        slots = [
            made.site("a.py:1"),
            made.group(1, "world", rank, 3),
            made.operation("barrier", 1, posted, posted + 100),
        ]
        made.write(tmp_path, rank, 3, slots, boot=boot, epoch=epoch)
    trace = files.assemble(files.read_all(tmp_path)[0])
    assert trace.operations["posted"].tolist() == [0, 40, 50]
    assert trace.began == 10**15 + 100


def test_summary(tmp_path):
    trace = made.trace_of(
        tmp_path,
        [made.operation("all_reduce", 1, 1_000, 9_000, bytes=64)],
        [made.operation("all_reduce", 1, 8_000, 9_000, bytes=64)],
    )
    facts = summary.summarize(trace, joins.join(trace))
    assert facts["operations"] == 2
    assert facts["seconds"] == pytest.approx(8e-6)
    waits = [rank["lost_seconds"] for rank in facts["ranks"]]
    assert waits == pytest.approx([7e-6, 0])
    assert [rank["came_last"] for rank in facts["ranks"]] == [0, 1]
    assert facts["ranks"][1]["kept_others_seconds"] == pytest.approx(7e-6)
    assert facts["groups"][0]["bytes"] == 128
    (straggler,) = facts["stragglers"]
    assert (straggler["site"], straggler["rank"], straggler["rank_share"]) == (
        "train.py:1 in step",
        1,
        1,
    )
    (slowest,) = facts["slowest"]
    assert (slowest["rank"], slowest["last_rank"]) == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_rows_hold_what_does_not_overlap(spans):
    spans = sorted((start, start + length) for start, length in spans)
    rows = layout.pack([start for start, _ in spans], [end for _, end in spans])
    last = {}
    for (start, end), row in zip(spans, rows.tolist(), strict=True):
        assert last.get(row, 0) <= start
        last[row] = end
    deepest = max((sum(s <= at < max(e, s + 1) for s, e in spans) for at, _ in spans), default=0)
    assert (rows.max() + 1 if rows.size else 0) <= deepest
