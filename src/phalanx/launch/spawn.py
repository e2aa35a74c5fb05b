"""Start ranks as processes from a program or a notebook, as torch.multiprocessing.spawn does."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal, TypeVar, overload

from phalanx.launch import notebook, placement
from phalanx.launch.environment import HeldPort, Job
from phalanx.launch.life import Group
from phalanx.launch.outcomes import settle
from phalanx.launch.processes import Processes, pack_task
from phalanx.launch.relay import Relay
from phalanx.machine import Machine

T = TypeVar("T")


@overload
def spawn(
    fn: Callable[..., T],
    args: tuple[Any, ...] = ...,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
    *,
    label: bool | None = ...,
) -> list[T]: ...


@overload
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: str = ...,
    label: bool | None = ...,
) -> SpawnContext: ...


@overload
def spawn(
    fn: Callable[..., T],
    size: int,
    /,
    *args: object,
    backend: str = ...,
    timeout: float | timedelta | None = ...,
    deadline: float | None = ...,
    return_exceptions: bool = ...,
    label: bool | None = ...,
    **kwargs: object,
) -> list[T]: ...


def spawn(  # type: ignore[misc]  # for fn's keyword arguments: none is called as one of these
    fn: Callable[..., Any], args: Any = (), *more: Any, **options: Any
) -> Any:
    """Run a function on ranks that are new processes and return what each returned, by rank.

    `spawn(fn, 4)` does it as `run_threads(fn, 4)` does: each rank calls `fn()`, in a default group
    that is initialised before it and destroyed after it. Further arguments are passed to `fn`;
    `backend`, `timeout`, `deadline` and `return_exceptions` mean what they mean there.

    `spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="forkserver")` is called as
    torch.multiprocessing.spawn is: each rank calls `fn(rank, *args)` and makes its own group. With
    `join=False` the SpawnContext of the running processes is returned instead of their results.
    `daemon` processes are ended with the program if nobody has joined them, and cannot have
    children. `start_method` is "forkserver", "spawn" or "fork", as in multiprocessing.

    The variables of torchrun are set in each process, so that `init_process_group()` needs no
    arguments, here and in torch.distributed. `fn`, its arguments and its results are pickled,
    tensors by value; functions of a notebook cell and lambdas need cloudpickle
    (``pip install "phalanx[notebook]"``). A script must call this under
    `if __name__ == "__main__":`. Unless OMP_NUM_THREADS is set the ranks share the cores evenly.

    With `label` every line that a rank prints is passed on by this process, to its own output, and
    begins with "[rank 2]"; unless you say, that is so in a notebook.

    The first real failure is raised as in its process, labelled with its rank, and ends the others:
    they have 5 s to end by themselves, then they are asked to (SIGTERM), and 2 s later they are
    killed. No process outlives this one.
    """
    __tracebackhide__ = True
    if isinstance(args, int) and not isinstance(args, bool):
        if unfit := sorted(set(_AS_TORCH) & options.keys()):
            raise TypeError(
                f"spawn(fn, size) takes no {' or '.join(unfit)}: it calls fn as run_threads does; "
                "spawn(fn, args, nprocs) calls fn(rank, *args) and takes that"
            )
        return _run(fn, args, more, **options)
    unfit = [repr(value) for value in more[len(_AS_TORCH) :]]
    unfit += sorted(options.keys() - {*_AS_TORCH, "label"})
    if unfit:
        raise TypeError(
            f"spawn(fn, args, nprocs) takes no {' or '.join(unfit)}: it calls fn(rank, *args), "
            "which makes its own group; spawn(fn, size) calls fn in a group and takes that"
        )
    return _start(fn, args, *more, **options)


# What torch.multiprocessing.spawn takes behind the arguments, in its order.
_AS_TORCH = ("nprocs", "join", "daemon", "start_method")


def _run(
    fn: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    *,
    backend: str = "phalanx",
    timeout: float | timedelta | None = None,
    deadline: float | None = None,
    return_exceptions: bool = False,
    label: bool | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` in a world that is there."""
    __tracebackhide__ = True
    if size < 1:
        raise ValueError(f"spawn needs a size of at least 1, got {size}")
    task = pack_task(fn, args, kwargs)
    with closing(HeldPort()) as port:
        environment = _environment(Job(size), port.number)
        relay = Relay() if notebook.labelling(label) else None
        group = Group(backend, timeout)
        with Processes(size, task, environment, group=group, relay=relay) as ranks:
            ranks.see_through(deadline, return_exceptions)
    return settle(ranks.results, ranks.failures, return_exceptions)


def _start(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "forkserver",
    label: bool | None = None,
) -> list[Any] | SpawnContext:
    """Run `fn(rank, *args)`, as torch does."""
    __tracebackhide__ = True
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"spawn needs nprocs to be a number of at least 1, got {nprocs!r}")
    if not isinstance(args, tuple):
        raise TypeError(
            f"spawn needs args to be a tuple, got {type(args).__name__}: "
            "fn is called as fn(rank, *args); one argument is written (x,)"
        )
    known = multiprocessing.get_all_start_methods()
    if start_method not in known:
        raise ValueError(f"unknown start method {start_method!r} (known: {', '.join(known)})")
    task = pack_task(fn, args)
    context = SpawnContext(task, nprocs, daemon, start_method, notebook.labelling(label))
    if not join:
        return context
    try:
        context.join()
    except BaseException:  # an interrupt, say
        context.end()
        raise
    return context.results


class SpawnContext:
    """Processes that `spawn(join=False)` has started."""

    def __init__(
        self, task: bytes, size: int, daemon: bool, start_method: str, label: bool
    ) -> None:
        port = HeldPort()
        self._release = Finalize(self, port.close, exitpriority=10)
        environment = _environment(Job(size), port.number)
        self._ranks = Processes(
            size,
            task,
            environment,
            start_method=start_method,
            daemon=daemon,
            relay=Relay() if label else None,
        )
        self._results: list[Any] | None = None
        self._error: BaseException | None = None

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all ranks have returned, or for `timeout` seconds; return whether they have.

        The first real failure is raised, as `spawn` does; by then no process is left.
        """
        __tracebackhide__ = True
        if not self._ranks.wait(timeout):
            return False
        self.end()
        _ = self.results
        return True

    def end(self) -> None:
        """End the ranks that still run: ask them to (SIGTERM), and kill them 2 s later."""
        self._ranks.end()
        self._release()
        if self._results is None and self._error is None:
            try:
                self._results = settle(self._ranks.results, self._ranks.failures, False)
            except BaseException as error:
                self._error = error

    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [rank.pid for rank in self._ranks.ranks]

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes by rank; those of a context that was joined are closed."""
        return [rank.process for rank in self._ranks.ranks]

    @property
    def results(self) -> list[Any]:
        """What the ranks returned; there once `join` has returned True."""
        __tracebackhide__ = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._results is None:
            raise RuntimeError("the ranks have not returned yet: call join() first")
        return self._results


def _environment(job: Job, port: int) -> dict[str, str]:
    """Return what the processes are told, beside their own ranks."""
    # If this is itself a rank of another launcher, its job is not theirs.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
    }
    placed = placement.place(job.size, Machine(), environment, "none")
    if placed.threads is not None:
        environment[placement.THREADS_VARIABLE] = str(placed.threads)
    return environment | job.variables(port, attempt=0)
