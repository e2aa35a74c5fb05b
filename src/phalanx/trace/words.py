"""One operation of a trace in words, as tools show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.trace.files import ASYNC, Trace
from phalanx.trace.joins import Joined

_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}


def shape_text(shape: Sequence[int], ndim: int) -> str:
    """Say a shape as torch does: "[4, 8]"."""
    return "[" + ", ".join(map(str, shape[:ndim])) + "]"


def moment(seconds: float) -> str:
    """Say how long something took: "812 ns", "4.56 ms", "12.3 s"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.0f} ns"


def count(number: int, what: str) -> str:
    """Say how many: "1 rank", "1,000 ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Facts:
    """What there is to say of each operation, made of values that JSON knows."""

    def __init__(self, trace: Trace, joined: Joined) -> None:
        self._trace = trace
        table = trace.operations
        # Lists: reading single values of arrays is slow.
        self._rows = {name: table[name].tolist() for name in table.dtype.names or ()}
        self._wait, self._transfer = joined.wait.tolist(), joined.transfer.tolist()
        self._meeting, self._late = joined.meeting.tolist(), joined.late.tolist()
        self._last_rank = table["rank"][joined.last].tolist()

    def __getitem__(self, i: int) -> dict[str, Any]:
        words, rows = self._trace.words, self._rows
        op = words["op"][rows["op"][i]]
        site, api = self._trace.sites[rows["site"][i]]
        facts: dict[str, Any] = {
            "op": op,
            "group": self._trace.groups[rows["group"][i]].name,
            "sequence": rows["sequence"][i],
            "site": site,
        }
        if api and api != op:
            facts["for"] = api
        if op != "barrier":
            facts["dtype"] = words["dtype"][rows["dtype"][i]]
            facts["shape"] = shape_text(rows["shape"][i], rows["ndim"][i])
            facts["bytes"] = rows["bytes"][i]
        if op in _REDUCTIONS:
            facts["reduce"] = words["reduce"][rows["reduce"][i]]
        facts |= self._peer(op, i)
        if rows["parts"][i]:
            facts["part"] = f"{rows['part'][i]} of {rows['parts'][i]}"
        facts["async"] = bool(rows["flags"][i] & ASYNC)
        facts["state"] = words["state"][rows["state"][i]]
        return facts | self._times(i)

    def _peer(self, op: str, i: int) -> dict[str, Any]:
        root, source, tag = (self._rows[name][i] for name in ("root", "source", "tag"))
        if op == "send":
            return {"to": root, "tag": tag}
        if op == "recv":
            return {"from": source if source >= 0 else root, "tag": tag}
        return {"root": root} if root >= 0 else {}

    def _times(self, i: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self._wait[i] >= 0:
            facts["wait_us"] = self._wait[i] / 1000
            facts["transfer_us"] = self._transfer[i] / 1000
        if self._rows["issued"][i] >= 0:
            facts["queued_us"] = (self._rows["posted"][i] - self._rows["issued"][i]) / 1000
        meeting = self._meeting[i]
        if meeting >= 0 and self._late[meeting] > 0:
            facts["last_rank"] = self._last_rank[meeting]
            facts["late_us"] = self._late[meeting] / 1000
        return facts
