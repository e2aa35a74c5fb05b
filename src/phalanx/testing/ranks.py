"""Run a function on several ranks, as threads or as processes, and get what each returned."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar

from phalanx.launch.processes import run_processes
from phalanx.launch.start_state import random_state, set_random_state
from phalanx.launch.threads import run_threads
from phalanx.random import Choice

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T],
    size: int,
    *args: object,
    ranks: Literal["threads", "processes"] = "threads",
    timeout: float = 60,
    backend: str = "phalanx",
    group_timeout: float | timedelta | None = None,
    return_exceptions: bool = False,
    rng: Choice = True,
    **kwargs: object,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `size` ranks and return their results by rank.

    The default group is initialised on each rank before `fn` and destroyed after it. A run that is
    not over after `timeout` seconds is ended and raises DistTimeout, which says where each rank
    stands. `backend` and `group_timeout` are the default group's. The first real failure is raised,
    labelled with its rank; with `return_exceptions` each failed rank's error takes its result's
    place, and the others may go on. For process ranks `fn` must be defined at the top level of a
    module. `rng` says which random streams thread ranks have of their own, as for `run_threads`;
    process ranks have all of them, which start where the caller's stand unless `rng` is False.
    """
    launchers: dict[str, Callable[..., list[T]]] = {
        "threads": run_threads,
        "processes": run_processes,
    }
    if ranks not in launchers:
        raise ValueError(f"unknown kind of ranks {ranks!r} (known: {', '.join(launchers)})")
    if ranks == "threads":
        kwargs["rng"] = rng
    elif rng:
        fn = _FromHere(fn)
    return launchers[ranks](
        fn,
        size,
        *args,
        backend=backend,
        timeout=group_timeout,
        deadline=timeout,
        return_exceptions=return_exceptions,
        **kwargs,
    )


class _FromHere(Generic[T]):
    """A function that, in another process, draws on from where the random streams stand here."""

    def __init__(self, fn: Callable[..., T]) -> None:
        self._fn = fn
        self._states = random_state(), random.getstate()

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        set_random_state(self._states[0])
        random.setstate(self._states[1])
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._fn)
