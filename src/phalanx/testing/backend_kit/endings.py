"""The rules for how groups end: each needs a group of its own, which is closed afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.backends.base import GroupBackend
from phalanx.errors import DistBackendError, DistTimeout
from phalanx.testing.backend_kit.inputs import Rule, started
from phalanx.types import ReduceOp

_REASON = "rank 0 has had enough"
_GO_ON = 51  # the tag of a message that lets a rank go on
_PATIENCE = 60.0
_SHORT = 0.05
_BRIEF = 0.01
_COALESCED = ("all_reduce", "all_gather_single", "reduce_scatter_single")


def late_collectives(backend: GroupBackend) -> None:
    """An operation to which not all come raises DistTimeout on who waits, in its own time."""
    if backend.rank == 0:
        _time_out(
            backend,
            [
                (name, partial(getattr(backend, name), *args, timeout=_BRIEF))
                for name, args in needing_others(backend)
            ],
        )
    _after_rank_0(backend)


def late_works(backend: GroupBackend) -> None:
    """A work to which not all come raises DistTimeout in the time that its call was given."""
    if backend.rank == 0:
        works = [
            (name, started(getattr(backend, name)(*args, timeout=_BRIEF, async_op=True)))
            for name, args in needing_others(backend)
        ]
        begin = time.monotonic()
        while not works[-1][1].is_completed():  # who only looks learns of it as well
            assert time.monotonic() - begin < backend.timeout / 2, "a receive has no end"
            time.sleep(_BRIEF)
        _time_out(backend, [(f"the work of {name}", work.wait) for name, work in works])
        for name, work in works:
            assert work.is_completed(), f"{name}: a work that has failed is completed"
            assert work.exception() is not None, f"{name}: a work that has failed has an exception"
        _time_out(backend, [(f"another wait for {name}", work.wait) for name, work in works])
    _after_rank_0(backend)


def late_in_the_groups_time(backend: GroupBackend) -> None:
    """An operation without a timeout of its own has that of the group, also when coalesced."""
    if backend.rank == 0:
        usual, backend.timeout = backend.timeout, _BRIEF
        calls = needing_others(backend)
        collected = [call for call in calls if call[0] in _COALESCED]
        works = [("coalesce", started(backend.coalesce(collected, async_op=True)))]
        for name, args in calls:
            works.append((name, started(getattr(backend, name)(*args, async_op=True))))
        _time_out(
            backend,
            [
                *((f"the work of {name}", work.wait) for name, work in works),
                ("coalesce", lambda: backend.coalesce(collected)),
                ("scatter", lambda: backend.scatter(torch.ones(3), None, 1)),
            ],
            usual,
        )
        backend.timeout = usual
    _after_rank_0(backend)


def needing_others(backend: GroupBackend) -> list[tuple[str, tuple[Any, ...]]]:
    """Return each operation in a form that rank 0 cannot end alone, however much is buffered."""
    size = backend.size

    def several() -> list[Tensor]:
        return [torch.ones(3) for _ in range(size)]

    return [
        ("all_reduce", (torch.ones(3), ReduceOp.SUM)),
        ("all_gather_single", (torch.ones(3 * size), torch.ones(3))),
        ("reduce_scatter_single", (torch.ones(3), torch.ones(3 * size), ReduceOp.SUM)),
        ("broadcast", (torch.ones(3), 1)),
        ("reduce", (torch.ones(3), 0, ReduceOp.SUM)),
        ("all_gather", (several(), torch.ones(3))),
        ("gather", (several(), torch.ones(3), 0)),
        ("scatter", (torch.ones(3), None, 1)),
        ("reduce_scatter", (torch.ones(3), several(), ReduceOp.SUM)),
        ("all_to_all", (several(), several())),
        ("all_to_all_single", (torch.ones(3 * size), torch.ones(3 * size), None, None)),
        ("barrier", ()),
        ("recv", (torch.ones(3), 1, 55)),
        ("recv", (torch.ones(3), None, 55)),
    ]


def _time_out(
    backend: GroupBackend,
    calls: list[tuple[str, Callable[[], Any]]],
    usual: float | None = None,
) -> None:
    """Assert that calls raise DistTimeout, long before the usual timeout of the group.

    A collective that was given up may end its group: calls after it then say so at once.
    """
    usual = backend.timeout if usual is None else usual
    has_ended = False
    for index, (what, call) in enumerate(calls):
        begin = time.monotonic()
        error = _raised(call, f"{what}, which only rank 0 has called,")
        took = time.monotonic() - begin
        has_ended = has_ended or (index > 0 and not isinstance(error, DistTimeout))
        is_right = has_ended or isinstance(error, DistTimeout)
        assert is_right, f"{what} raised {type(error).__name__}: {error}"
        assert took < usual / 2, f"{what} took {took:.2f} s of the {_BRIEF} s that it was given"


def missing_ranks(backend: GroupBackend) -> None:
    """A monitored barrier to which one does not come raises, and rank 0 is told its name."""
    missing = backend.size - 1
    if backend.rank != missing:
        limit = 5 * _SHORT if backend.rank == 0 else _PATIENCE
        error = _raised(
            lambda: backend.monitored_barrier(timeout=limit, wait_all_ranks=True),
            "a monitored barrier that one rank does not come to",
        )
        if backend.rank == 0:  # another may be told that it came too late itself
            assert isinstance(error, DistTimeout), f"rank 0 raised {type(error).__name__}"
            assert str(missing) in str(error), f"rank {missing} is not named in: {error}"
    _after_rank_0(backend)


def closing(backend: GroupBackend) -> None:
    """Closing makes works that are pending fail, and calls that come later raise."""
    peer = (backend.rank + 1) % backend.size
    work = started(backend.recv(torch.empty(1), peer, 52, async_op=True))
    backend.close()
    _must_fail(lambda: work.wait(_PATIENCE), "a receive that was pending when its group was closed")
    assert work.is_completed(), "a work that has failed is completed"
    assert work.exception() is not None, "a work that has failed has an exception"
    assert not work.is_success(), "a work that has failed is no success"
    _must_fail(lambda: backend.send(torch.ones(1), peer, 53), "a send on a closed group")
    backend.close()  # twice is fine


def aborting(backend: GroupBackend) -> None:
    """An abort wakes all who wait, here and on other ranks, with its reason."""
    _give_up(backend, lambda: backend.abort(_REASON))


def failing(backend: GroupBackend) -> None:
    """The failure of a rank reaches all who wait for it, with its reason."""
    _give_up(backend, lambda: backend.fail(_REASON))


def _give_up(backend: GroupBackend, end: Callable[[], None]) -> None:
    if backend.rank == 0:
        # By then all have a work, and wait for another message or are about to.
        for peer in range(1, backend.size):
            backend.recv(torch.empty(1), peer)
        end()
        return
    work = started(backend.recv(torch.empty(1), 0, 54, async_op=True))
    with suppress(DistBackendError):  # the end may be here before this has returned
        backend.send(torch.ones(1), 0)
    for what, call in (
        ("a receive", lambda: backend.recv(torch.empty(1), 0, 9, timeout=_PATIENCE)),
        ("a work", lambda: work.wait(_PATIENCE)),
        ("a later call", lambda: backend.all_reduce(torch.ones(1), ReduceOp.SUM)),
    ):
        error = _must_fail(call, what)
        assert "had enough" in str(error), f"{what} is not told the reason, but: {error}"


def _must_fail(call: Callable[[], Any], what: str) -> DistBackendError:
    """Return the error of a call that must neither return nor run out of time."""
    error = _raised(call, what)
    assert not isinstance(error, DistTimeout), f"{what} was not woken: {error}"
    return error


def _raised(call: Callable[[], Any], what: str) -> DistBackendError:
    try:
        call()
    except DistBackendError as error:
        return error
    raise AssertionError(f"{what} returned")


def _after_rank_0(backend: GroupBackend) -> None:
    """Wait, without a collective, until rank 0 is here."""
    if backend.rank == 0:
        for peer in range(1, backend.size):
            backend.send(torch.ones(1), peer, _GO_ON)
    else:
        backend.recv(torch.empty(1), 0, _GO_ON)


# The last one is for ever: on a backend of a whole world the rank counts as failed from then on.
RULES: list[Rule] = [
    late_collectives,
    late_works,
    late_in_the_groups_time,
    missing_ranks,
    closing,
    aborting,
    failing,
]
