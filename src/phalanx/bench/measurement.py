"""Taking the measurements: peers in turn, the slowest rank counts, the best round stands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from phalanx.bench.cells import Times
from phalanx.bench.operations import Conditions
from phalanx.bench.peers import Peer
from phalanx.bench.plan import Cell, Effort
from phalanx.bench.teams import PATIENCE, Team, TeamFailed

BATCHED_BYTES = 64 << 10  # up to here calls are timed in rows, above each on its own
BATCH_CALLS = 50
BATCH_SECONDS = 0.02
MOST_CALLS = 20_000
FEWEST_BATCHES = 2

Result = dict[str, Any]


class Teams(contextlib.AbstractContextManager["Teams"]):
    """One living team per peer. One that failed is started anew, but not asked the same again.

    How teams are started can be told: `team` are further arguments of Team.
    """

    def __init__(self, peers: list[Peer], size: int, *, pinned: bool = False, **team: Any) -> None:
        self.peers, self.size = peers, size
        self._start: Callable[[Peer, int], Team] = partial(Team, pinned=pinned, **team)
        self._living: dict[str, Team] = {}
        self._refused: dict[tuple[str, str, Conditions], str] = {}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        for team in self._living.values():
            team.close(1 if interrupted else PATIENCE)

    def of(self, peer: Peer) -> Team:
        """Return the team of a peer, started if need be."""
        if peer.name not in self._living:
            self._living[peer.name] = self._start(peer, self.size)
        return self._living[peer.name]

    def refusal(self, peer: Peer, cell: Cell) -> str | None:
        """Return why this operation already failed at a smaller size."""
        return self._refused.get((peer.name, cell.operation.name, cell.conditions))

    def fail(self, peer: Peer, cell: Cell, error: TeamFailed) -> None:
        """Give up the team of a peer, and a cell and its larger sizes with it."""
        self._refused[peer.name, cell.operation.name, cell.conditions] = str(error)
        if team := self._living.pop(peer.name, None):
            team.close()


class Measurement:
    """One cell on one peer, taken step by step so that the peers can alternate."""

    def __init__(self, teams: Teams, peer: Peer, cell: Cell) -> None:
        self.teams, self.peer, self.cell = teams, peer, cell
        self.error = teams.refusal(peer, cell)
        self.samples: list[Times] = []  # per round: seconds, batches x calls

    def attempt(self, step: Callable[[Team], None]) -> None:
        """Take a step unless an earlier one failed."""
        if self.error is not None:
            return
        try:
            step(self.teams.of(self.peer))
        except TeamFailed as error:
            self.error = str(error)
            self.teams.fail(self.peer, self.cell, error)

    def prepare(self, team: Team, effort: Effort) -> None:
        """Check the result, warm up, and choose how many calls a round has."""
        operation, num_bytes, conditions = self.cell
        self.messages, *_ = team.ask("prepare", operation.name, num_bytes, conditions)
        if effort.iterations is None:
            self.batches, self.calls = warm_up(
                lambda calls: float(self._time(team, 1, calls).mean()),
                num_bytes,
                effort.seconds / effort.rounds,
                effort.warmup,
            )
        else:
            if warmup := 5 if effort.warmup is None else effort.warmup:
                self._time(team, 1, warmup)
            wanted = -(-effort.iterations // effort.rounds)
            self.calls = min(wanted, BATCH_CALLS) if num_bytes <= BATCHED_BYTES else 1
            self.batches = -(-wanted // self.calls)

    def run(self, team: Team) -> None:
        """Measure one round."""
        self.samples.append(self._time(team, self.batches, self.calls) / self.messages)

    def release(self, team: Team) -> None:
        """Give the buffers back."""
        team.ask("release")

    def _time(self, team: Team, batches: int, calls: int) -> Times:
        """Return the time of each call on the rank where it took longest."""
        times: Times = np.max(team.ask("time", batches, calls), axis=0)
        return times

    def result(self) -> Result:
        """Return what there is to say of the cell on this peer; times are in seconds."""
        operation, num_bytes, conditions = self.cell
        size = self.teams.size
        result = {
            "kind": self.peer.kind,
            "ranks": size,
            "operation": operation.name,
            "bytes": num_bytes,
            "count": operation.count(num_bytes, size, conditions.item_bytes) if num_bytes else 0,
            "dtype": conditions.dtype,
            "reduce_op": conditions.reduce_op if operation.reduces else None,
            "peer": self.peer.name,
            "error": self.error,
        }
        return result if self.error else result | summarise(self.samples)


def warm_up(
    time: Callable[[int], float], num_bytes: int, seconds: float, warmup: int | None = None
) -> tuple[int, int]:
    """Choose how many batches of how many calls fill `seconds`, after trying some, or `warmup`.

    `time(calls)` makes calls in a row and returns the seconds that each took on the slowest rank.
    """
    estimate = time(2)
    if trials := int(min(seconds / 5 / estimate, 500)) if warmup is None else warmup:
        estimate = time(trials)
    calls = 1
    if num_bytes <= BATCHED_BYTES:
        calls = int(np.clip(BATCH_SECONDS / estimate, 1, BATCH_CALLS))
    most = max(FEWEST_BATCHES, MOST_CALLS // calls)
    return int(np.clip(seconds / estimate / calls, FEWEST_BATCHES, most)), calls


def measure(
    teams: Teams, cell: Cell, effort: Effort, tell: Callable[[str], None] = lambda what: None
) -> list[Result]:
    """Measure one cell on every peer, in turn, and return a result per peer.

    `tell` is told of every step before it is taken.
    """
    taken = [
        Measurement(teams, peer, cell)
        for peer in teams.peers
        if peer.measures(cell.operation, teams.size)
    ]
    for one in taken:
        tell(f"{one.peer.title}, warming up")
        one.attempt(partial(one.prepare, effort=effort))
    for turn in range(effort.rounds):
        for one in taken:
            tell(f"{one.peer.title}, round {turn + 1} of {effort.rounds}")
            one.attempt(one.run)
    for one in taken:
        one.attempt(one.release)
    return [one.result() for one in taken]


def summarise(samples: list[Times]) -> Result:
    """Reduce the samples of a cell, an array of batches x calls per round, to its numbers."""
    rounds = [
        {
            "calls": batches.size,
            "p50": float(np.median(batches.mean(axis=1))),
            "p99": float(np.percentile(batches, 99)),
            "min": float(batches.min()),
            "max": float(batches.max()),
            "mean": float(batches.mean()),
        }
        for batches in samples
    ]
    pooled = np.concatenate([batches.ravel() for batches in samples])
    return {
        "calls": pooled.size,
        "p50": min(one["p50"] for one in rounds),
        "p99": float(np.percentile(pooled, 99)),
        "min": float(pooled.min()),
        "rounds": rounds,
    }
