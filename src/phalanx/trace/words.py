"""One operation of a trace in words, as tools show it."""

from __future__ import annotations

from typing import Any

from phalanx.trace.files import ASYNC, Trace
from phalanx.trace.joins import Joined

_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}


def shape_text(shape: Any, ndim: int) -> str:
    """Say a shape as torch does: "[4, 8]"."""
    return "[" + ", ".join(str(int(length)) for length in shape[:ndim]) + "]"


def describe(trace: Trace, joined: Joined, i: int) -> dict[str, Any]:
    """Return the facts of an operation, made of values that JSON knows."""
    row = trace.operations[i]
    op = trace.words["op"][row["op"]]
    site, api = trace.sites[row["site"]]
    facts: dict[str, Any] = {
        "op": op,
        "group": trace.groups[row["group"]].name,
        "sequence": int(row["sequence"]),
        "site": site,
    }
    if api and api != op:
        facts["for"] = api
    if op != "barrier":
        facts["dtype"] = trace.words["dtype"][row["dtype"]]
        facts["shape"] = shape_text(row["shape"], int(row["ndim"]))
        facts["bytes"] = int(row["bytes"])
    if op in _REDUCTIONS:
        facts["reduce"] = trace.words["reduce"][row["reduce"]]
    if op == "send":
        facts["to"], facts["tag"] = int(row["root"]), int(row["tag"])
    elif op == "recv":
        facts["from"] = int(row["source"]) if row["source"] >= 0 else int(row["root"])
        facts["tag"] = int(row["tag"])
    elif row["root"] >= 0:
        facts["root"] = int(row["root"])
    if row["parts"]:
        facts["part"] = f"{row['part']} of {row['parts']}"
    facts["async"] = bool(row["flags"] & ASYNC)
    facts["state"] = trace.words["state"][row["state"]]
    if joined.wait[i] >= 0:
        facts["wait_us"] = int(joined.wait[i]) / 1000
        facts["transfer_us"] = int(joined.transfer[i]) / 1000
    if row["issued"] >= 0:
        facts["queued_us"] = int(row["posted"] - row["issued"]) / 1000
    meeting = joined.meeting[i]
    if meeting >= 0 and joined.late[meeting] > 0:
        facts["last_rank"] = int(trace.operations["rank"][joined.last[meeting]])
        facts["late_us"] = int(joined.late[meeting]) / 1000
    return facts


def moment(seconds: float) -> str:
    """Say how long something took: "812 ns", "4.56 ms", "12.3 s"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.0f} ns"
