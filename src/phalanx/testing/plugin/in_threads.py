"""Run the body of a test on ranks that are threads."""

from __future__ import annotations

import shlex
import warnings
from functools import partial, update_wrapper
from typing import Any, cast

import pytest

from phalanx import testing
from phalanx.launch import identity
from phalanx.launch.outcomes import Failure
from phalanx.launch.threads import run_threads
from phalanx.testing.handle import WorldHandle
from phalanx.testing.plugin import debugger, output, reports
from phalanx.testing.plugin.arguments import of_ranks
from phalanx.testing.plugin.mark import WorldMark

_FOR_EVER = 1e8  # seconds


def run(item: pytest.Function, world: WorldMark, arguments: dict[str, Any]) -> None:
    """Run the body once on each rank; raise the first real failure."""
    __tracebackhide__ = True
    failures: list[Failure] = []
    with debugger.ready(item.config) as terminal, output.kept_apart(item, arguments) as captures:
        body = _Body(item, world, captures, terminal, failures)
        error: BaseException | None = None
        try:
            results = _launcher(item, world, captures)(body)
        except BaseException as caught:
            error = caught
        captures.forget_logs_of(failures)
    if error is not None:
        error = reports.choose(error, failures, world.size)
        raise error if item.config.getoption("fulltrace") else reports.begin_in_program(error)
    if any(result is not None for result in results):
        warnings.warn(
            pytest.PytestReturnNotNoneWarning(
                f"{item.nodeid} returned a value on a rank: tests return None. "
                "Did you mean to use `assert` instead of `return`?"
            ),
            stacklevel=2,
        )


def _launcher(item: pytest.Function, world: WorldMark, captures: output.Captures) -> Any:
    """Return what runs a function on the ranks of the world that the test asks for."""
    is_traced = item.config.getoption("trace")
    timeout = None if is_traced else world.timeout
    group_timeout = _FOR_EVER if is_traced else world.group_timeout
    common: dict[str, Any] = {"backend": world.backend, "rng": world.rng}
    if world.torch:
        make = cast(Any, testing).torch_world
        return make(world.size, timeout=timeout, group_timeout=group_timeout, **common).run
    run: Any = partial(run_threads, deadline=timeout, timeout=group_timeout, **common)
    if not world.interleavings:
        return lambda body: run(body, world.size)

    def run_anew(body: Any, size: int) -> list[Any]:
        captures.forget_output()  # of the run before, which is not the one to be reported
        return cast("list[Any]", run(body, size))

    def explore(body: Any) -> list[Any]:
        seeds = range(world.interleavings) if world.seed is None else [world.seed]
        replay = f"pytest --world-seed={{seed}} {shlex.quote(item.nodeid)}"
        explored = cast(Any, testing).explore(
            body, world.size, seeds=seeds, launch=run_anew, replay=replay
        )
        return [result for each in explored for result in each.results]

    return explore


class _Body:
    """The body of a test, as each rank calls it."""

    def __init__(
        self,
        item: pytest.Function,
        world: WorldMark,
        captures: output.Captures,
        terminal: debugger.Terminal,
        failures: list[Failure],
    ) -> None:
        self._item, self._world, self._captures = item, world, captures
        self._terminal, self._failures = terminal, failures
        self._own = of_ranks(item)
        update_wrapper(self, item.function)

    def __call__(self) -> Any:
        __tracebackhide__ = True
        member = identity.ancestry(identity.here.rank)[-1]
        rank = member.rank
        given = self._captures.of_rank(rank)
        handle = WorldHandle(rank, self._world.size, "threads")
        given |= {"rank": rank} if "rank" in self._own else {}
        given |= {"world": handle} if "world" in self._own else {}
        body = self._item.obj
        if self._item.config.getoption("trace"):  # pytest has wrapped the body into its debugger
            if rank == 0:
                self._terminal.begin()
            else:
                body = body.__wrapped__
        error: BaseException | None = None
        try:
            return body(**given)
        except BaseException as caught:
            error = caught
            self._failures.append(Failure(rank, error))
            raise
        finally:
            self._terminal.end(error)
