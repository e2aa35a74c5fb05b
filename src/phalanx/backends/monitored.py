"""A barrier in which rank 0 asks one rank after the other, and so knows who is missing.

Every rank counts its monitored barriers. To rank 0 it sends the number of the one it has come to,
and the negative number if it has given that up; rank 0 answers with the number and a flag for every
rank that is missing, to all, so that those who come too late find an answer as well. Numbers that
belong to earlier barriers are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from phalanx.errors import DistBackendError, DistTimeout, PeerFailed, expected
from phalanx.types import Deadline

if TYPE_CHECKING:
    from phalanx.backends.base import GroupBackend


def lead(
    backend: GroupBackend, number: int, tag: int, timeout: float, wait_all_ranks: bool
) -> None:
    """Be rank 0: raise DistTimeout or PeerFailed if somebody is missing, and tell the others."""
    deadline = Deadline(timeout)
    missing: dict[int, str] = {}
    timed_out = False
    token = torch.zeros(1, dtype=torch.int64)
    for peer in range(1, backend.size):
        token.zero_()
        try:
            with expected():
                while token[0] < number:
                    backend.recv(token, peer, tag, timeout=deadline.left())
        except DistBackendError as error:
            missing[peer] = backend.describe(peer)
            timed_out |= not isinstance(error, PeerFailed)
            if not wait_all_ranks:
                break
    for peer in range(1, backend.size) if not missing else ():
        with suppress(DistBackendError), expected():
            backend.recv(token, peer, tag, timeout=0)
            who = f"rank {backend.global_ranks[peer]}"
            missing[peer] = f"{who} was here and gave up before rank {backend.global_ranks[0]} came"
    verdict = torch.tensor([number] + [peer in missing for peer in range(backend.size)])
    for peer in range(1, backend.size):
        with suppress(DistBackendError), expected():
            backend.send(verdict, peer, tag, async_op=bool(missing))
    if not missing:
        return
    ranks = backend.global_ranks
    who = f"Rank{'s' * wait_all_ranks} {_spell(ranks, missing)} failed to pass monitoredBarrier"
    lines = [f"\n  {what}" for what in missing.values() if what]
    if timed_out:
        after = f"Rank {ranks[0]} timed out in monitoredBarrier after {timeout:g} s: "
        raise DistTimeout(after + who + "".join(lines))
    raise PeerFailed(who + "".join(lines))


def attend(backend: GroupBackend, number: int, tag: int, timeout: float) -> None:
    """Be another rank: raise if rank 0 does not answer, or answers that somebody is missing."""
    deadline = Deadline(timeout)
    ranks = backend.global_ranks
    here = (
        f"Rank {ranks[backend.rank]} successfully reached monitoredBarrier, but received errors "
        f"while waiting for send/recv from rank {ranks[0]}"
    )
    verdict = torch.zeros(1 + backend.size, dtype=torch.int64)
    try:
        with expected():
            backend.send(torch.tensor([number]), 0, tag, timeout=deadline.left())
            while verdict[0] < number:
                backend.recv(verdict, 0, tag, timeout=deadline.left())
    except DistBackendError as error:
        with suppress(DistBackendError), expected():
            backend.send(torch.tensor([-number]), 0, tag, async_op=True)
        if isinstance(error, DistTimeout):
            here += f", which has not answered after {timeout:g} s"
        raise type(error)(here + _doings(backend, [0])) from error
    missing = [peer for peer in range(backend.size) if verdict[1 + peer]]
    if backend.rank in missing:
        raise DistTimeout(
            f"Rank {ranks[backend.rank]} came too late to monitoredBarrier: rank {ranks[0]} has "
            "given it up"
        )
    if missing:
        spelled = f"rank{'s' * (len(missing) > 1)} {_spell(ranks, missing)}"
        raise DistBackendError(f"{here}: it misses {spelled}{_doings(backend, missing)}")


def _doings(backend: GroupBackend, peers: Sequence[int]) -> str:
    return "".join(f"\n  {what}" for peer in peers if (what := backend.describe(peer)))


def _spell(ranks: Sequence[int], missing: Sequence[int] | dict[int, str]) -> str:
    return ", ".join(str(ranks[peer]) for peer in missing)
