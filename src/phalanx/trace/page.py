"""The page: one HTML file with its data, style and program in it, which needs no network."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.trace.files import Trace
from phalanx.trace.joins import Joined
from phalanx.trace.layout import Layout
from phalanx.trace.words import shape_text

_SCRIPTS = (
    "words.js",
    "model.js",
    "paint.js",
    "overview.js",
    "timeline.js",
    "hands.js",
    "panel.js",
    "page.js",
)


def build(trace: Trace, joined: Joined, layout: Layout, summary: dict[str, Any], title: str) -> str:
    """Return the page as text."""
    facts, data = _payload(trace, joined, layout, summary, title)
    here = files("phalanx.trace")
    scripts = "\n".join(here.joinpath(name).read_text() for name in _SCRIPTS)
    page = here.joinpath("page.html").read_text()
    for mark, text in (
        ("/* style */", here.joinpath("page.css").read_text()),
        ("/* program */", scripts),
        ("<!-- title -->", _escaped(title)),
        ("<!-- facts -->", json.dumps(facts).replace("<", "\\u003c")),
        ("<!-- data -->", base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()),
    ):
        page = page.replace(mark, text)
    return page


def _payload(
    trace: Trace, joined: Joined, layout: Layout, summary: dict[str, Any], title: str
) -> tuple[dict[str, Any], bytes]:
    """Return what the page must know as JSON, and its columns of numbers one after the other."""
    columns, place, rows = _events(trace, joined, layout)
    shapes, columns["shape"] = _shapes(trace, columns.pop("_shape"), columns.pop("_ndim"))
    parts, manifest, offset = [], [], 0
    for name, values in {**columns, **_meetings(trace, joined, place)}.items():
        # Columns begin at multiples of eight, as typed arrays want them.
        data = values.tobytes()
        data += bytes(-len(data) % 8)
        manifest.append([name, values.dtype.str.lstrip("<|"), offset, int(values.size)])
        parts.append(data)
        offset += len(data)
    facts = {
        "title": title,
        "began": trace.began / 1e6,
        "length_ns": trace.length,
        "words": trace.words,
        "groups": [[group.name, group.size] for group in trace.groups],
        "sites": trace.sites,
        "names": _range_names(trace),
        "shapes": shapes,
        "rows": rows,
        "columns": manifest,
        "summary": _with_places(summary, place),
    }
    return facts, b"".join(parts)


def _events(
    trace: Trace, joined: Joined, layout: Layout
) -> tuple[dict[str, NDArray[Any]], NDArray[Any], list[list[int]]]:
    """Return the columns, where each operation stands in them, and the rows they make up.

    Operations and ranges stand in one list: by rank, row and start. A range's operation is one past
    the last that there is, and its site is its name.
    """
    table, ranges = trace.operations, trace.ranges
    names = _range_names(trace)
    both = np.concatenate
    zeros, none = np.zeros(ranges.size, np.int64), np.full(ranges.size, -1, np.int64)
    ends = np.where(ranges["finished"] < 0, trace.length, ranges["finished"])
    rank = both([table["rank"], ranges["rank"]])
    row = both([layout.operation_rows, layout.range_rows])
    start = both([table["posted"], ranges["started"]])
    order = np.lexsort((start, row, rank))
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    labels = np.array([names.index(_name(stretch)) for stretch in ranges], np.int64)
    partner = np.where(joined.partner >= 0, place[joined.partner], -1)
    queued = np.where(table["issued"] >= 0, table["posted"] - table["issued"], 0)
    peer = np.where(table["source"] >= 0, table["source"], table["root"])
    columns: dict[str, NDArray[Any]] = {
        "start": start.astype("<f8"),
        "length": both([joined.duration, ends - ranges["started"]]).astype("<f8"),
        "wait": both([joined.wait, zeros]).astype("<f8"),
        "queued": both([queued, zeros]).astype("<f8"),
        "bytes": both([table["bytes"], zeros.astype(np.uint64)]).astype("<f8"),
        "sequence": both([table["sequence"], zeros.astype(np.uint64)]).astype("<f8"),
        "rank": rank.astype("<i4"),
        "op": both([table["op"], zeros + len(trace.words["op"])]).astype("u1"),
        "dtype": both([table["dtype"], zeros]).astype("u1"),
        "reduce": both([table["reduce"], zeros]).astype("u1"),
        "state": both([table["state"], (ranges["finished"] >= 0).astype(np.int64)]).astype("u1"),
        "flags": both([table["flags"], zeros]).astype("u1"),
        "group": both([table["group"], zeros]).astype("<u2"),
        "site": both([table["site"], labels]).astype("<u4"),
        "peer": both([peer, none]).astype("<i4"),
        "tag": both([table["tag"], zeros]).astype("<i4"),
        "part": both([table["part"], zeros]).astype("<u2"),
        "parts": both([table["parts"], zeros]).astype("<u2"),
        "meeting": both([joined.meeting, none]).astype("<i4"),
        "partner": both([partner, none]).astype("<i4"),
        "_ndim": both([table["ndim"], zeros]).astype("<i8"),
        "_shape": both([table["shape"], np.zeros((ranges.size, 6), np.int64)]),
    }
    columns = {name: np.ascontiguousarray(values[order]) for name, values in columns.items()}
    return columns, place, _rows(rank[order], row[order], columns["op"], len(trace.words["op"]))


def _rows(rank: NDArray[Any], row: NDArray[Any], op: NDArray[Any], a_range: int) -> list[list[int]]:
    """Return for each row its rank, its first event, how many it has, whether they are ranges."""
    if not rank.size:
        return []
    at = np.flatnonzero(np.append(True, (rank[1:] != rank[:-1]) | (row[1:] != row[:-1])))
    counts = np.diff(np.append(at, rank.size))
    return [
        [int(rank[i]), int(i), int(count), int(op[i] == a_range)]
        for i, count in zip(at, counts, strict=True)
    ]


def _meetings(trace: Trace, joined: Joined, place: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return who met, as one list of events, and where each meeting begins in it."""
    met = np.flatnonzero(joined.meeting >= 0)
    met = met[np.argsort(joined.meeting[met], kind="stable")]
    return {
        "members": place[met].astype("<u4"),
        "meeting_at": np.concatenate([[0], np.cumsum(joined.came)]).astype("<u4"),
        "last": place[joined.last].astype("<u4"),
        "late": joined.late.astype("<f8"),
        "complete": joined.complete.astype("u1"),
    }


def _shapes(
    trace: Trace, shapes: NDArray[Any], ndim: NDArray[Any]
) -> tuple[list[str], NDArray[Any]]:
    """Return the different shapes in words, and which of them each event has."""
    keys = np.concatenate([ndim[:, None], shapes], axis=1)
    known, which = np.unique(keys, axis=0, return_inverse=True)
    return [shape_text(key[1:], key[0]) for key in known.tolist()], which.reshape(-1).astype("<u4")


def _range_names(trace: Trace) -> list[str]:
    return sorted({_name(stretch) for stretch in trace.ranges})


def _name(stretch: Any) -> str:
    return bytes(stretch["name"]).decode(errors="replace")


def _with_places(summary: dict[str, Any], place: NDArray[Any]) -> dict[str, Any]:
    def placed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**entry, "index": int(place[entry["index"]])} for entry in entries]

    return {
        **summary,
        "slowest": placed(summary["slowest"]),
        "stragglers": placed(summary["stragglers"]),
        "unmet": placed(summary["unmet"]),
    }


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
