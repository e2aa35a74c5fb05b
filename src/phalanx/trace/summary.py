"""The facts of a trace that fit on a page: who waits, for whom, and what takes longest."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.trace.files import DONE, WAITING, Trace
from phalanx.trace.joins import Joined

_SECOND = 1e9
_SHOWN = 20  # entries of a list


def summarize(trace: Trace, joined: Joined) -> dict[str, Any]:
    """Return what ``phalanx trace --json`` prints; times are seconds."""
    unmet = list(_unmet(trace, joined))
    return {
        "started": datetime.fromtimestamp(trace.began / _SECOND, tz=timezone.utc).isoformat(),
        "seconds": trace.length / _SECOND,
        "operations": int(trace.operations.size),
        "unfinished": int(np.count_nonzero(trace.operations["state"] == WAITING)),
        "ranks": [_of_rank(trace, joined, unmet, rank) for rank in trace.ranks],
        "by_operation": list(_by_operation(trace, joined)),
        "groups": list(_by_group(trace, joined)),
        "slowest": list(_slowest(trace, joined)),
        "stragglers": list(_stragglers(trace, joined)),
        "unmet": unmet[:_SHOWN],
        "problems": trace.problems,
    }


def _of_rank(
    trace: Trace, joined: Joined, unmet: list[dict[str, Any]], rank: int
) -> dict[str, Any]:
    mine = trace.operations["rank"] == rank
    hosts = {source.host for source in trace.sources if source.rank == rank}
    pids = sorted({source.pid for source in trace.sources if source.rank == rank})
    was_last = trace.operations["rank"][joined.last] == rank
    in_vain = sum(entry["waited_seconds"] for entry in unmet if rank in entry["absent"])
    return {
        "rank": rank,
        "host": ", ".join(sorted(hosts)),
        "pids": pids,
        "operations": int(np.count_nonzero(mine)),
        "bytes": int(trace.operations["bytes"][mine].sum()),
        "lost_seconds": float(joined.lost[mine].sum() / _SECOND),
        "wait_seconds": float(np.maximum(joined.wait[mine], 0).sum() / _SECOND),
        "transfer_seconds": float(joined.transfer[mine].sum() / _SECOND),
        "came_last": int(np.count_nonzero(was_last & (joined.late > 0))),
        "kept_others_seconds": float(joined.waited[was_last].sum() / _SECOND) + in_vain,
    }


def _by_operation(trace: Trace, joined: Joined) -> Iterator[dict[str, Any]]:
    for code in np.unique(trace.operations["op"]):
        these = trace.operations["op"] == code
        yield {
            "op": trace.words["op"][code],
            "calls": int(np.count_nonzero(these)),
            "bytes": int(trace.operations["bytes"][these].sum()),
            "seconds": float(joined.duration[these].sum() / _SECOND),
            "wait_seconds": float(np.maximum(joined.wait[these], 0).sum() / _SECOND),
            "median_seconds": float(np.median(joined.duration[these]) / _SECOND),
            "longest_seconds": float(joined.duration[these].max() / _SECOND),
        }


def _by_group(trace: Trace, joined: Joined) -> Iterator[dict[str, Any]]:
    for place, group in enumerate(trace.groups):
        these = trace.operations["group"] == place
        yield {
            "name": group.name,
            "ranks": sorted(group.members),
            "size": group.size,
            "operations": int(np.count_nonzero(these)),
            "bytes": int(trace.operations["bytes"][these].sum()),
            "wait_seconds": float(np.maximum(joined.wait[these], 0).sum() / _SECOND),
            "transfer_seconds": float(joined.transfer[these].sum() / _SECOND),
        }


def _slowest(trace: Trace, joined: Joined) -> Iterator[dict[str, Any]]:
    """Tell of the longest operations: of each collective the rank that was in it longest."""
    table = trace.operations
    shown: set[tuple[bool, int]] = set()
    for i in np.argsort(-joined.duration, kind="stable"):
        meeting, partner = int(joined.meeting[i]), int(joined.partner[i])
        key = (True, meeting) if meeting >= 0 else (False, int(max(i, partner)))
        if key in shown:
            continue
        shown.add(key)
        entry = {
            "index": int(i),
            "op": trace.words["op"][table["op"][i]],
            "rank": int(table["rank"][i]),
            "group": trace.groups[table["group"][i]].name,
            "sequence": int(table["sequence"][i]),
            "site": trace.sites[table["site"][i]][0],
            "bytes": int(table["bytes"][i]),
            "seconds": float(joined.duration[i] / _SECOND),
            "wait_seconds": None if joined.wait[i] < 0 else float(joined.wait[i] / _SECOND),
            "state": trace.words["state"][table["state"][i]],
            "last_rank": None,
        }
        if meeting >= 0 and joined.late[meeting] > 0:
            entry["last_rank"] = int(table["rank"][joined.last[meeting]])
        yield entry
        if len(shown) == _SHOWN:
            return


def _stragglers(trace: Trace, joined: Joined) -> Iterator[dict[str, Any]]:
    """Tell, by the call site of the rank that came last, who kept the others waiting."""
    table = trace.operations
    if not joined.last.size:
        return
    site, op = table["site"][joined.last], table["op"][joined.last]
    key = site.astype(np.int64) * 256 + op
    keys, which = np.unique(key, return_inverse=True)
    total = np.bincount(which, weights=joined.waited, minlength=keys.size)
    for k in np.argsort(-total, kind="stable")[:_SHOWN]:
        if total[k] <= 0:
            return
        meetings = np.flatnonzero((which == k) & (joined.late > 0))
        ranks = table["rank"][joined.last[meetings]]
        late = joined.late[meetings]
        rank = _heaviest(ranks, joined.waited[meetings])
        worst = int(meetings[np.argmax(late)])
        yield {
            "site": trace.sites[keys[k] // 256][0],
            "op": trace.words["op"][keys[k] % 256],
            "meetings": int(meetings.size),
            "waited_seconds": float(total[k] / _SECOND),
            "rank": rank,
            "rank_share": float(np.mean(ranks == rank)),
            "median_late_seconds": float(np.median(late) / _SECOND),
            "worst_late_seconds": float(late.max() / _SECOND),
            "index": int(joined.last[worst]),
        }


def _unmet(trace: Trace, joined: Joined) -> Iterator[dict[str, Any]]:
    """Tell of collectives that failed, or never ended, because some ranks did not come."""
    table = trace.operations
    met = np.flatnonzero(joined.meeting >= 0)
    stuck = met[~joined.complete[joined.meeting[met]] & (table["state"][met] != DONE)]
    came_to: dict[int, list[int]] = {}
    for i in met[np.isin(joined.meeting[met], joined.meeting[stuck])].tolist():
        came_to.setdefault(int(joined.meeting[i]), []).append(i)
    for meeting, came in sorted(came_to.items()):
        first = int(joined.first[meeting])
        group = trace.groups[table["group"][first]]
        yield {
            "index": first,
            "op": trace.words["op"][table["op"][first]],
            "group": group.name,
            "sequence": int(table["sequence"][first]),
            "site": trace.sites[table["site"][first]][0],
            "came": table["rank"][came].tolist(),
            "absent": sorted(set(group.members) - set(table["rank"][came].tolist())),
            "waited_seconds": float(np.maximum(joined.wait[came], 0).sum() / _SECOND),
        }


def _heaviest(ranks: NDArray[Any], weights: NDArray[Any]) -> int:
    known, which = np.unique(ranks, return_inverse=True)
    return int(known[np.argmax(np.bincount(which, weights=weights))])
