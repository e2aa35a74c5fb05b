"""Taking the measurements: peers in turn, the slowest rank counts, the best round stands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from .operations import Operation
from .peers import Peer, Team, TeamFailed

BATCHED_BYTES = 64 << 10  # up to here calls are timed in rows, above each on its own
BATCH_CALLS = 50
BATCH_SECONDS = 0.02
MOST_CALLS = 20_000
FEWEST_BATCHES = 2


class Teams(contextlib.AbstractContextManager["Teams"]):
    """One living team per peer. One that failed is started anew, but not asked the same again."""

    def __init__(self, peers: list[Peer], size: int) -> None:
        self.peers, self.size = peers, size
        self._living: dict[str, Team] = {}
        self._refused: dict[tuple[str, str], str] = {}

    def __exit__(self, *_: object) -> None:
        for team in self._living.values():
            team.close()

    def of(self, peer: Peer) -> Team:
        if peer.name not in self._living:
            self._living[peer.name] = Team(peer, self.size)
        return self._living[peer.name]

    def refusal(self, peer: Peer, operation: Operation) -> str | None:
        """Return why this operation already failed at a smaller size."""
        return self._refused.get((peer.name, operation.name))

    def fail(self, peer: Peer, operation: Operation, error: TeamFailed) -> None:
        self._refused[peer.name, operation.name] = str(error)
        if team := self._living.pop(peer.name, None):
            team.close()


class Measurement:
    """One cell on one peer, taken step by step so that the peers can alternate."""

    def __init__(self, teams: Teams, peer: Peer, operation: Operation, num_bytes: int) -> None:
        self.teams, self.peer, self.operation, self.num_bytes = teams, peer, operation, num_bytes
        self.error = teams.refusal(peer, operation)
        self.samples: list[np.ndarray] = []  # per round: seconds, batches x calls

    def attempt(self, step: Callable[[Team], None]) -> None:
        """Take a step unless an earlier one failed."""
        if self.error is not None:
            return
        try:
            step(self.teams.of(self.peer))
        except TeamFailed as error:
            self.error = str(error)
            self.teams.fail(self.peer, self.operation, error)

    def prepare(self, team: Team, seconds: float) -> None:
        """Check the result, warm up, and choose how many calls fill `seconds`."""
        self.messages, *_ = team.ask("prepare", self.operation.name, self.num_bytes)
        self.batches, self.calls = warm_up(
            lambda calls: self._time(team, 1, calls).mean(), self.num_bytes, seconds
        )

    def run(self, team: Team) -> None:
        """Measure one round."""
        self.samples.append(self._time(team, self.batches, self.calls) / self.messages)

    def release(self, team: Team) -> None:
        """Give the buffers back."""
        team.ask("release")

    def _time(self, team: Team, batches: int, calls: int) -> np.ndarray:
        """Return the time of each call on the rank where it took longest."""
        return np.max(team.ask("time", batches, calls), axis=0)

    def result(self) -> dict:
        result = {
            "kind": self.peer.kind,
            "ranks": self.teams.size,
            "operation": self.operation.name,
            "bytes": self.num_bytes,
            "peer": self.peer.name,
            "error": self.error,
        }
        return result if self.error else result | summarise(self.samples)


def warm_up(time: Callable[[int], float], num_bytes: int, seconds: float) -> tuple[int, int]:
    """Choose how many batches of how many calls fill `seconds`, after trying some.

    `time(calls)` makes calls in a row and returns the seconds that each took on the slowest rank.
    """
    estimate = time(2)
    if trials := int(min(seconds / 5 / estimate, 500)):
        estimate = time(trials)
    calls = 1
    if num_bytes <= BATCHED_BYTES:
        calls = int(np.clip(BATCH_SECONDS / estimate, 1, BATCH_CALLS))
    most = max(FEWEST_BATCHES, MOST_CALLS // calls)
    return int(np.clip(seconds / estimate / calls, FEWEST_BATCHES, most)), calls


def measure(
    teams: Teams, operation: Operation, num_bytes: int, budget: float, rounds: int
) -> list[dict]:
    """Measure one cell on every peer, in turn, and return a result per peer.

    `budget` is the time each peer gets, in seconds, over all rounds.
    """
    taken = [
        Measurement(teams, peer, operation, num_bytes)
        for peer in teams.peers
        if peer.measures(operation, teams.size)
    ]
    for one in taken:
        one.attempt(lambda team, one=one: one.prepare(team, budget / rounds))
    for _ in range(rounds):
        for one in taken:
            one.attempt(one.run)
    for one in taken:
        one.attempt(one.release)
    return [one.result() for one in taken]


def summarise(samples: list[np.ndarray]) -> dict:
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
        "p50": min(one["p50"] for one in rounds),
        "p99": float(np.percentile(pooled, 99)),
        "rounds": rounds,
    }
