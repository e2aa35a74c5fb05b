"""The trace in the format of Chrome and Perfetto: https://ui.perfetto.dev opens it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from phalanx.trace.files import Trace
from phalanx.trace.joins import Joined
from phalanx.trace.layout import Layout
from phalanx.trace.words import Facts

_MICROSECOND = 1000


def write(file: TextIO, trace: Trace, joined: Joined, layout: Layout) -> None:
    """Write a process per rank, a thread per row; the wait is a slice within its operation."""
    file.write('{"displayTimeUnit": "ms", "otherData": ')
    json.dump({"began_ns": str(trace.began), "problems": trace.problems}, file)
    file.write(', "traceEvents": [\n')
    separator = ""
    for event in _events(trace, joined, layout):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _events(trace: Trace, joined: Joined, layout: Layout) -> Iterator[dict[str, Any]]:
    yield from _lanes(trace, layout)
    table, facts = trace.operations, Facts(trace, joined)
    ranks, rows = table["rank"].tolist(), layout.operation_rows.tolist()
    starts, durations = (table["posted"] / _MICROSECOND).tolist(), joined.duration.tolist()
    waits, meetings, partners = (
        each.tolist() for each in (joined.wait, joined.meeting, joined.partner)
    )
    for i, start in enumerate(starts):
        place = {"pid": ranks[i], "tid": rows[i]}
        told = facts[i]
        yield {
            "ph": "X",
            "name": told["op"],
            "cat": "message" if meetings[i] < 0 else "collective",
            "ts": start,
            "dur": durations[i] / _MICROSECOND,
            "args": told,
            **place,
        }
        if 0 < waits[i] < durations[i]:
            waiting = {"ts": start, "dur": waits[i] / _MICROSECOND}
            yield {"ph": "X", "name": "wait", "cat": "wait", **waiting, **place}
        if told["op"] == "send" and partners[i] >= 0:
            yield from _arrow(table, layout, i, partners[i])
    for i, stretch in enumerate(trace.ranges):
        end = stretch["finished"] if stretch["finished"] >= 0 else trace.length
        yield {
            "ph": "X",
            "name": stretch["name"].decode(errors="replace"),
            "cat": "range",
            "ts": int(stretch["started"]) / _MICROSECOND,
            "dur": int(end - stretch["started"]) / _MICROSECOND,
            "pid": int(stretch["rank"]),
            "tid": int(layout.range_rows[i]),
        }


def _lanes(trace: Trace, layout: Layout) -> Iterator[dict[str, Any]]:
    for rank in trace.ranks:
        hosts = sorted({source.host for source in trace.sources if source.rank == rank})
        for name, value in (
            ("process_name", {"name": f"rank {rank} ({', '.join(hosts)})"}),
            ("process_sort_index", {"sort_index": rank}),
        ):
            yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": value}
        for row, title in enumerate(layout.titles[rank]):
            for name, value in (
                ("thread_name", {"name": title}),
                ("thread_sort_index", {"sort_index": row}),
            ):
                yield {"ph": "M", "name": name, "pid": rank, "tid": row, "args": value}


def _arrow(table: Any, layout: Layout, send: int, recv: int) -> Iterator[dict[str, Any]]:
    for phase, i in (("s", send), ("f", recv)):
        event = {
            "ph": phase,
            "id": send,
            "name": "message",
            "cat": "message",
            "ts": int(table["posted"][i]) / _MICROSECOND,
            "pid": int(table["rank"][i]),
            "tid": int(layout.operation_rows[i]),
        }
        yield event if phase == "s" else {**event, "bp": "e"}
