"""What an operation's time went into: waiting for other ranks, and moving data.

Ranks are joined by group and sequence. A collective waits until the last of its ranks has come;
from then on it moves data. A message waits until its other end is there. One clock is all it takes:
nothing is exchanged while recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.trace.files import ASYNC, DONE, MISMATCH, ON_LANE, Trace

_MESSAGES = ("send", "recv")


@dataclass
class Joined:
    """Per operation of a trace, in its order; times in nanoseconds.

    ``wait`` and ``transfer`` add up to ``duration``; where they cannot be known, since another
    rank's record is missing, ``wait`` is -1 and ``transfer`` 0. ``lost`` is the part of the wait in
    which the user's thread stood still. ``meeting`` is the place of a collective in the lists
    below, -1 for a message; ``partner`` the operation at the other end of a message, -1 if there is
    none.

    Per meeting: how many ``came``, whether that is all, the ``first`` to come and the ``last``, as
    operations, how much later the last one came, and the time that all ranks together waited for
    it; both are 0 where not all came.
    """

    duration: NDArray[Any]
    wait: NDArray[Any]
    transfer: NDArray[Any]
    lost: NDArray[Any]
    meeting: NDArray[Any]
    partner: NDArray[Any]
    came: NDArray[Any]
    complete: NDArray[Any]
    first: NDArray[Any]
    last: NDArray[Any]
    late: NDArray[Any]
    waited: NDArray[Any]


def join(trace: Trace) -> Joined:
    """Compare the ranks' records."""
    table = trace.operations
    names = np.array(trace.words["op"])
    is_message = np.isin(names[table["op"]], _MESSAGES)
    finished = np.where(table["finished"] < 0, trace.length, table["finished"])
    duration = np.maximum(finished - table["posted"], 0)
    wait = np.full(table.size, -1, np.int64)
    meeting = np.full(table.size, -1, np.int64)
    partner = np.full(table.size, -1, np.int64)

    collectives = np.flatnonzero(~is_message)
    first, last, came, alone = _meet(table, collectives, meeting)
    sizes = np.array([group.size for group in trace.groups] or [1])
    complete = came == sizes[table["group"][last]] if last.size else np.zeros(0, bool)
    # Where somebody never came, nobody who came is to blame.
    late = np.where(complete, table["posted"][last] - table["posted"][first], 0)
    met = np.flatnonzero(meeting >= 0)
    until = table["posted"][last[meeting[met]]] - table["posted"][met]
    wait[met] = np.clip(until, 0, duration[met])
    absent = met[~complete[meeting[met]]]
    wait[absent] = np.where(table["state"][absent] == DONE, -1, duration[absent])
    wait[alone] = duration[alone]

    sends, recvs = _pair(table, names, np.flatnonzero(is_message))
    partner[sends], partner[recvs] = recvs, sends
    behind = np.clip(table["posted"][sends] - table["posted"][recvs], 0, duration[recvs])
    wait[recvs] = behind
    # A short message goes into the receiver's mailbox: its sender is done before it is asked for.
    ahead = table["posted"][recvs] - table["posted"][sends]
    wait[sends] = np.where(ahead < duration[sends], np.maximum(ahead, 0), 0)
    unmatched = np.flatnonzero(is_message & (partner < 0))
    wait[unmatched] = np.where(table["state"][unmatched] == DONE, -1, duration[unmatched])

    waited = np.zeros(last.size, np.int64)
    np.add.at(waited, meeting[met], np.maximum(wait[met], 0))
    waited[~complete] = 0
    return Joined(
        duration,
        wait,
        np.where(wait < 0, 0, duration - wait),
        _lost(table, is_message, wait),
        meeting,
        partner,
        came,
        complete,
        first,
        last,
        late,
        waited,
    )


def _meet(
    table: NDArray[Any], collectives: NDArray[Any], meeting: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Number the meetings in `meeting`; return who came first and last, how many, and who alone."""
    keys = table[["group", "sequence", "rank", "posted"]][collectives]
    order = np.lexsort((keys["posted"], keys["rank"], keys["sequence"], keys["group"]))
    ordered = keys[order]
    # A sequence number that a rank could not use is used again: only its last use counts.
    again = np.zeros(order.size, bool)
    if order.size:
        again[:-1] = (
            (ordered["group"][:-1] == ordered["group"][1:])
            & (ordered["sequence"][:-1] == ordered["sequence"][1:])
            & (ordered["rank"][:-1] == ordered["rank"][1:])
        )
    alone = collectives[order[again]]
    used = collectives[order[~again]]
    used = used[np.lexsort((table["posted"][used], table["sequence"][used], table["group"][used]))]
    if not used.size:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty, alone
    group, sequence = table["group"][used], table["sequence"][used]
    begins = np.ones(used.size, bool)
    begins[1:] = (group[1:] != group[:-1]) | (sequence[1:] != sequence[:-1])
    meeting[used] = np.cumsum(begins) - 1
    at = np.flatnonzero(begins)
    came = np.diff(np.append(at, used.size))
    return used[at], used[at + came - 1], came, alone


def _pair(
    table: NDArray[Any], names: NDArray[Any], messages: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Find the two ends of each message: they match by source and tag in order of sending."""
    state = table["state"][messages]
    moved = messages[(state == DONE) | (state == MISMATCH)]
    is_send = names[table["op"][moved]] == "send"
    given = table[["group", "rank", "root", "source", "tag", "sequence"]][moved]
    source = np.where(is_send, given["rank"], given["source"])
    target = np.where(is_send, given["root"], given["rank"])
    order = np.lexsort(
        (given["sequence"], is_send, given["tag"], target, source, given["group"].astype(np.int64))
    )
    columns = (given["group"], source, target, given["tag"], is_send)
    begins = np.ones(order.size, bool)
    if order.size:
        begins[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    at = np.flatnonzero(begins)
    number = np.arange(order.size) - np.repeat(at, np.diff(np.append(at, order.size)))
    nth = np.empty(order.size, np.int64)
    nth[order] = number
    again = np.lexsort((is_send, nth, given["tag"], target, source, given["group"]))
    same = np.zeros(max(order.size - 1, 0), bool)
    if order.size:
        same = (
            np.all([c[again][1:] == c[again][:-1] for c in (*columns[:4], nth)], axis=0)
            & ~is_send[again][:-1]
        )
    pairs = np.flatnonzero(same & is_send[again][1:]) if order.size else same.astype(np.int64)
    return moved[again[pairs + 1]], moved[again[pairs]]


def _lost(table: NDArray[Any], is_message: NDArray[Any], wait: NDArray[Any]) -> NDArray[Any]:
    """Return the part of each wait in which the user's thread could do nothing else."""
    flags = table["flags"]
    meanwhile = np.where(is_message, flags & ASYNC, flags & ON_LANE) != 0
    never = np.iinfo(np.int64).max
    awaited = np.where(table["awaited"] < 0, never, table["awaited"])
    blocked_from = np.where(meanwhile, np.maximum(awaited, table["posted"]), table["posted"])
    until = table["posted"] + np.maximum(wait, 0)
    return np.where(blocked_from < until, until - np.minimum(blocked_from, until), 0)
