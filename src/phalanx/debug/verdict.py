"""What a look at a job means: who waits, for whom in the end, and what the job does."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx import _native
from phalanx.debug.outside import Group, Job, Operation, Rank, Wait

LONG = 1.0  # seconds of waiting that are worth a word
_SHOWN = 0.05  # seconds after which ranks show their waits themselves

_STATES = {
    "R": "computing",
    "S": "sleeping",
    "D": "in the system (disk)",
    "T": "stopped",
    "t": "in a debugger",
}


def rank_list(ranks: set[int] | list[int]) -> str:
    """Name ranks: "rank 2", "ranks 0-2, 5"."""
    return _native.rank_list(sorted(ranks))


def wait_of(job: Job, rank: Rank) -> Wait | None:
    """Return what a rank waits for, or None if it can act.

    A rank that is stopped or has ended waits for nobody: nothing that others do can move it.
    """
    if not rank.alive or rank.ended or rank.stopped or rank.presence != "here":
        return None
    mine = [wait for wait in rank.waits if not wait.lane]
    if not mine:
        return _wait_in_meeting(job, rank)
    # One that waits for its own asynchronous operation waits for what that waits for.
    real = [wait for wait in mine if not wait.own] or [w for w in rank.waits if w.lane] or mine
    return min(real, key=lambda wait: wait.started_ns)


def _wait_in_meeting(job: Job, rank: Rank) -> Wait | None:
    """Tell from the board that a rank waits which has not come to saying so."""
    for group in job.groups:
        seat = group.seat(rank.rank)
        operation = seat.collective if seat else None
        if seat is None or operation is None or operation.state != "waiting" or rank.waits:
            continue
        behind = [
            member
            for member, other in zip(group.members, group.seats, strict=True)
            if 0 < (seat.clock - other.clock) % 2**32 < 2**31
        ]
        if behind and job.seen_ns - operation.posted_ns > _SHOWN * 1e9:
            return Wait(
                op=operation.op,
                what=operation.text,
                group=group.name,
                site=operation.site,
                started_ns=operation.posted_ns,
                needs=behind,
                any=False,
                blocked=False,
                lane=False,
                own=False,
                making=False,
            )
    return None


def operation_of(job: Job, rank: int, wait: Wait) -> Operation | None:
    """Return the operation in which a rank waits."""
    for group in job.groups:
        seat = group.seat(rank)
        if seat is None or group.name != wait.group:
            continue
        for operation in (seat.collective, seat.message):
            if operation and operation.state == "waiting" and operation.text == wait.what:
                return operation
    return None


def numbered(job: Job, rank: int, wait: Wait) -> str:
    """Describe what a rank waits in, with its number: "barrier() #3 on group 'world'"."""
    if wait.making:
        return wait.what
    operation = operation_of(job, rank, wait)
    number = f" #{operation.sequence}" if operation else ""
    return f"{wait.what}{number} on group '{wait.group}'"


@dataclass(frozen=True)
class Culprit:
    """A rank that others wait for, and that waits for nobody."""

    rank: int
    waiting: list[int]  # for it, directly or through others


def culprits(job: Job) -> list[Culprit]:
    """Return who holds the others up, those first that hold up most."""
    waits = {rank.rank: wait_of(job, rank) for rank in job.ranks}
    held: dict[int, list[int]] = {}
    for rank, wait in waits.items():
        seen, ahead = {rank}, list(wait.needs) if wait else []
        while ahead:
            peer = ahead.pop()
            if peer in seen or peer not in waits:
                continue
            seen.add(peer)
            if (further := waits[peer]) is None:
                held.setdefault(peer, []).append(rank)
            else:
                ahead += further.needs
    found = [Culprit(rank, waiting) for rank, waiting in held.items()]
    return sorted(found, key=lambda culprit: (-len(culprit.waiting), culprit.rank))


def longest_wait(job: Job) -> float:
    """Return for how many seconds the rank that waits longest has waited."""
    waits = [wait for rank in job.ranks if (wait := wait_of(job, rank)) is not None]
    return max((seconds_since(job, wait.started_ns) for wait in waits), default=0.0)


def seconds_since(job: Job, then_ns: int) -> float:
    return max(job.seen_ns - then_ns, 0) * 1e-9


def condition(job: Job, rank: Rank) -> str:
    """Say in a word what a rank does: "waiting", "computing", "stopped", "gone", ...

    One on another host is "elsewhere".
    """
    if rank.gone:
        return "gone"
    if rank.presence in ("absent", "joining", "left", "failed"):
        return rank.presence
    if rank.remote:
        return "elsewhere"
    if wait_of(job, rank):
        return "waiting"
    return "ended" if rank.ended else _STATES.get(rank.state, rank.state)


def summary(job: Job) -> str:
    """Say in a few words what a job does."""
    for word in ("gone", "failed"):
        ranks = [rank.rank for rank in job.ranks if condition(job, rank) == word]
        if ranks:
            return f"{rank_list(ranks)} {word}"
    if job.deadlock:
        return "stuck: deadlock"
    stopped = [rank.rank for rank in job.ranks if rank.stopped]
    if stopped:
        return f"{rank_list(stopped)} stopped"
    if any(rank.presence in ("absent", "joining") for rank in job.ranks):
        return "starting"
    if longest_wait(job) < LONG:
        return "running"
    found = culprits(job)
    return f"waiting for rank {found[0].rank}" if found else "waiting"


def last_deed(job: Job, rank: int) -> str:
    """Say what a rank did last, in which group and where."""
    made: tuple[Group, Operation] | None = job.last_operation(rank)
    if job.ranks[rank].remote:
        return f"it is on host {job.ranks[rank].host}"
    if made is None:
        return "it has made no call yet"
    group, operation = made
    return f"its last call, on group '{group.name}': {operation.account}"
