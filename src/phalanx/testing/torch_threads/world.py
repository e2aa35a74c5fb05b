"""Run programs that use torch.distributed on thread ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from phalanx import random
from phalanx.launch.outcomes import Failure, as_error, reason
from phalanx.launch.threads import run_as_ranks
from phalanx.testing.torch_threads.meeting import Meeting
from phalanx.testing.torch_threads.patches import ranks_are_threads
from phalanx.testing.torch_threads.ranks import RankState, known_groups
from phalanx.torch_backend.theirs import dist
from phalanx.types import seconds

P = ParamSpec("P")
T = TypeVar("T")


class TorchWorld:
    """What `torch_world` returns: something that runs functions, each in a world of its own."""

    def __init__(
        self,
        size: int,
        timeout: float | None,
        group_timeout: timedelta | None,
        backend: str,
        init: bool,
        rng: random.Choice,
        return_exceptions: bool,
    ) -> None:
        self.size = size
        self._timeout = timeout
        self._group_timeout = group_timeout
        self._backend = backend
        self._init = init
        self._rng = rng
        self._return_exceptions = return_exceptions
        self._block = ExitStack()

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank and return what each returned."""
        __tracebackhide__ = True
        store, meeting = dist.HashStore(), Meeting(self.size)
        states: list[RankState] = []

        def live(rank: int) -> T:
            __tracebackhide__ = True
            states.append(state := RankState(rank, store, meeting))
            try:
                if self._init:
                    dist.init_process_group(self._backend, timeout=self._group_timeout)
                    state.given = True
                result = fn(*args, **kwargs)
            except BaseException as error:
                meeting.leave(rank, reason(Failure(rank, as_error(error))))
                raise
            meeting.leave(rank, "has returned")
            if dist.is_initialized():
                dist.destroy_process_group()
            return result

        with ranks_are_threads:
            try:
                return run_as_ranks(
                    live, self.size, self._rng, self._timeout, self._return_exceptions, known_groups
                )
            finally:
                for state in states:
                    state.close()

    def __call__(self, fn: Callable[P, T]) -> Callable[P, list[T] | None]:
        """Return a function that runs `fn` on every rank and returns the results.

        It returns None where no rank has a result, as pytest wants it of a test.
        """

        @functools.wraps(fn)
        def on_ranks(*args: P.args, **kwargs: P.kwargs) -> list[T] | None:
            __tracebackhide__ = True
            results = self.run(fn, *args, **kwargs)
            return results if any(result is not None for result in results) else None

        return on_ranks

    def __enter__(self) -> TorchWorld:
        self._block.enter_context(ranks_are_threads)
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.close()


def torch_world(
    size: int,
    *,
    timeout: float | None = 60,
    group_timeout: float | timedelta | None = None,
    backend: str = "phalanx",
    init: bool = True,
    rng: random.Choice = True,
    return_exceptions: bool = False,
) -> TorchWorld:
    """Run code that calls torch.distributed itself on `size` ranks, each a thread.

    ``torch_world(4).run(fn, *args)`` returns results by rank; as a decorator, ``@torch_world(4)``
    makes a function or a test one that runs on four ranks; ``with torch_world(4) as w`` is for
    several runs. DistributedDataParallel, DeviceMesh, DTensor, `fully_shard` and all else that
    stands on torch.distributed work as in processes, on CPU tensors.

    The default group is made before the function, by the name `backend`, and destroyed after it. A
    function that calls `init_process_group` itself makes its own in its place, as long as it has
    not used the one it found; with `init` False it finds none. Phalanx serves all groups, be they
    asked for as gloo, nccl, threaded or without a name, and `get_backend` repeats what was asked.
    Each rank has its own RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in `os.environ`; ``env://`` and ``tcp://`` meet in memory.

    A run that is not over after `timeout` seconds raises DistTimeout, which says where each rank
    stands; None lets it take any time. `group_timeout` is how long operations of the default group
    wait. The first real failure is raised, labelled with its rank, and the others raise PeerFailed;
    with `return_exceptions` errors take the place of results. `rng` is whether each rank draws from
    a torch random stream of its own, and with "all" from streams of `random` and NumPy too.
    """
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"torch_world needs a size, as in @torch_world(4), got {size!r}")
    if size < 1:
        raise ValueError(f"torch_world needs a size of at least 1, got {size}")
    limit = None if group_timeout is None else timedelta(seconds=seconds(group_timeout))
    return TorchWorld(size, timeout, limit, backend, init, rng, return_exceptions)
