"""Run the body of a test on ranks that are threads."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, cast

import pytest

from phalanx import testing
from phalanx.launch import identity
from phalanx.launch.outcomes import Failure
from phalanx.launch.threads import run_threads
from phalanx.testing.handle import WorldHandle
from phalanx.testing.plugin import debugger, examples, output, patches, reports
from phalanx.testing.plugin.arguments import of_ranks
from phalanx.testing.plugin.mark import WorldMark

_FOR_EVER = 1e8  # seconds


def run(item: pytest.Function, world: WorldMark, arguments: dict[str, Any]) -> None:
    """Run the body once on each rank; raise the first real failure."""
    __tracebackhide__ = True
    _take_turns(arguments)
    with debugger.ready(item.config) as terminal, output.kept_apart(item, arguments) as captures:
        ranks = _Ranks(item, world, captures, terminal)
        if hasattr(item.obj, "hypothesis"):
            examples.run(item, arguments, ranks.call)
        else:
            ranks.call(item.obj, (), arguments)


def _take_turns(arguments: dict[str, Any]) -> None:
    """Have one rank at a time ask for a fixture: the first sets it up, for all."""
    for request in arguments.values():
        if isinstance(request, pytest.FixtureRequest):
            lock, ask = threading.Lock(), request.getfixturevalue

            def ask_alone(name: str, lock: Any = lock, ask: Any = ask) -> Any:
                with lock:
                    return ask(name)

            cast(Any, request).getfixturevalue = ask_alone


def _run_torch(function: Callable[[], Any], size: int, **options: Any) -> list[Any]:
    return testing.torch_world(size, **options).run(function)


class _Ranks:
    """The worlds that a test is run in."""

    def __init__(
        self,
        item: pytest.Function,
        world: WorldMark,
        captures: output.Captures,
        terminal: debugger.Terminal,
    ) -> None:
        self._item, self._world = item, world
        self._captures, self._terminal = captures, terminal
        self._own = of_ranks(item)
        self._failures: list[Failure] = []
        self._launch = self._launcher()

    def call(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        within: Callable[[Any], Any] = lambda body: body,
    ) -> None:
        """Call `within(body)` on each rank of a new world; raise the first real failure.

        The patches that the body is decorated with are made once, around all ranks.
        """
        __tracebackhide__ = True
        self._failures.clear()
        self._asked = body, args, kwargs
        error: BaseException | None = None
        try:
            results = self._launch(update_wrapper(partial(self._live, within), self._item.function))
        except BaseException as caught:
            error = caught
        self._captures.forget_logs_of(self._failures)
        if error is not None:
            error = reports.choose(error, self._failures, self._world.size)
            reports.hint(error, self._world)
            whole = self._item.config.getoption("fulltrace")
            raise error if whole else reports.begin_in_program(error)
        if any(result is not None for result in results):
            reports.warn_of_result(self._item)

    def _launcher(self) -> Any:
        """Return what runs a function on the ranks of a world as the test asks for."""
        world = self._world
        is_traced = self._item.config.getoption("trace")
        timeout = None if is_traced else world.timeout
        group_timeout = _FOR_EVER if is_traced else world.group_timeout
        common: dict[str, Any] = {"backend": world.backend, "rng": world.rng}
        run: Callable[..., list[Any]]
        if world.torch:
            run = partial(_run_torch, timeout=timeout, group_timeout=group_timeout, **common)
        else:
            run = partial(run_threads, deadline=timeout, timeout=group_timeout, **common)

        def run_anew(function: Any, size: int) -> list[Any]:
            self._captures.forget_output()  # of a run before, which is not the one to be reported
            with patches.made_once(*self._asked) as self._call:
                return run(function, size)

        def explore(function: Any) -> list[Any]:
            seeds = range(world.interleavings) if world.seed is None else [world.seed]
            replay = f"pytest --world-seed={{seed}} {shlex.quote(self._item.nodeid)}"
            explored = testing.explore(
                function, world.size, seeds=seeds, launch=run_anew, replay=replay
            )
            return [result for each in explored for result in each.results]

        return explore if world.interleavings else lambda body: run_anew(body, world.size)

    def _live(self, within: Callable[[Any], Any]) -> Any:
        """Be one rank."""
        __tracebackhide__ = True
        body, args, kwargs = self._call
        rank = identity.ancestry(identity.here.rank)[-1].rank
        own = {"rank": rank, "world": WorldHandle(rank, self._world.size, "threads")}
        given = self._captures.of_rank(rank, kwargs)
        given |= {name: own[name] for name in self._own}
        if body is self._item.obj and self._item.config.getoption("trace"):
            if rank == 0:  # pytest has wrapped the body into its debugger
                self._terminal.begin()
            else:
                body = cast(Any, body).__wrapped__
        error: BaseException | None = None
        try:
            return within(body)(*args, **given)
        except BaseException as caught:
            error = caught
            self._failures.append(Failure(rank, error))
            raise
        finally:
            self._terminal.end(error)
