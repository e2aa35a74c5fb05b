"""Worlds whose ranks are actors of a Ray cluster."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from phalanx import world
from phalanx.errors import DistError, DistTimeout
from phalanx.extras import need
from phalanx.launch import outcomes
from phalanx.launch.environment import HeldPort
from phalanx.launch.life import Group, heed_environment
from phalanx.launch.outcomes import GRACE, Failure, as_error, overdue, reason, settle, story

T = TypeVar("T")

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_PLACED = 30.0  # seconds for a cluster to make room, unless the caller says more


def ray(
    fn: Callable[..., T],
    *args: object,
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    placement_timeout: float = _PLACED,
    backend: str | None = "phalanx",
    timeout: float | timedelta | None = None,
    deadline: float | None = None,
    return_exceptions: bool = False,
    env: Mapping[str, str] | None = None,
    **kwargs: object,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on ranks of a Ray cluster and return what each returned.

    The cluster is the one that this program is connected to; if there is none, `ray.init()` finds
    or makes one, and the connection is closed again at the end. Each rank is an actor with its
    share of a placement group: `resources_per_worker` (one CPU), placed by `placement_strategy`
    ("PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD") within `placement_timeout` seconds. Ranks
    of a node have numbers that follow each other, and torchrun's variables; `env` is added to
    those.

    Before `fn` the default group is initialised with `backend` and `timeout`, unless the backend is
    None. `deadline` is how many seconds the ranks may take once they have a place. The first real
    failure is raised as on its rank, labelled with it; the death of an actor or a node is one too.
    Then, or when the deadline passes, or if this call is interrupted, all actors are ended and the
    placement group is given back. With `return_exceptions` failures are returned in their rank's
    place.
    """
    __tracebackhide__ = True
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"ray needs num_workers to be at least 1, got {num_workers!r}")
    if placement_strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        raise ValueError(f"unknown placement strategy {placement_strategy!r} (known: {known})")
    theirs = need("ray", "ray", "phalanx.launch.ray")
    need("ray.util.placement_group", "ray", "phalanx.launch.ray")
    need("ray.util.scheduling_strategies", "ray", "phalanx.launch.ray")
    was_connected = theirs.is_initialized()
    if not was_connected:
        theirs.init()
    group = Group(backend, timeout) if backend is not None else None
    resources = dict(resources_per_worker or {"CPU": 1})
    crew = _Crew(theirs, num_workers, resources, placement_strategy)
    try:
        crew.place(placement_timeout)
        crew.start((fn, args, kwargs), group, env or {})
        crew.see_through(deadline, return_exceptions)
    finally:
        crew.end()
        if not was_connected:
            theirs.shutdown()
    return settle(crew.results, crew.failures, return_exceptions)


class _Place(NamedTuple):
    """Where an actor runs."""

    node: str
    address: str
    host: str
    pid: int


class _Crew:
    """The actors of one run, on the launcher's side."""

    def __init__(self, theirs: Any, size: int, resources: dict[str, float], strategy: str) -> None:
        self._ray = theirs
        self._size = size
        self._resources = resources
        self._strategy = strategy
        self._placement: Any = None
        self._actors: list[Any] = []
        self._places: list[_Place] = []
        self._running: dict[Any, int] = {}
        self.results: list[Any] = [None] * size
        self.failures: list[Failure] = []

    def place(self, timeout: float) -> None:
        """Reserve what the ranks need, or say why it cannot be had."""
        bundles = [dict(self._resources) for _ in range(self._size)]
        self._placement = self._ray.util.placement_group(bundles, strategy=self._strategy)
        if not self._placement.wait(timeout):
            raise DistTimeout(
                f"Ray found no place for {self._size} workers with {_spell(self._resources)} each "
                f"({self._strategy}) within {timeout:g} s; of {self._of_cluster('cluster')} in the "
                f"cluster, on {self._num_nodes()} node(s), {self._of_cluster('available')} is "
                "free: ask for less, wait longer (placement_timeout), or choose another "
                "placement_strategy"
            )

    def _num_nodes(self) -> int:
        return sum(node["Alive"] for node in self._ray.nodes())

    def _of_cluster(self, what: str) -> str:
        held = getattr(self._ray, f"{what}_resources")()
        return _spell({name: held.get(name, 0) for name in self._resources})

    def start(self, task: Any, group: Group | None, env: Mapping[str, str]) -> None:
        """Start the actors, tell them who they are, and let them begin."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {_OPTIONS[name]: n for name, n in self._resources.items() if name in _OPTIONS}
        rest = {name: n for name, n in self._resources.items() if name not in _OPTIONS}
        kind = self._ray.remote(_Rank)
        actors = [
            kind.options(
                **{"num_cpus": 0, **options},
                resources=rest,
                scheduling_strategy=strategy(self._placement, index),
                max_restarts=0,
            ).remote()
            for index in range(self._size)
        ]
        self._actors = actors
        places = [_Place(*told) for told in self._ray.get([each.place.remote() for each in actors])]
        # Ranks of a node follow each other, and nodes come in the order of their first actors.
        nodes = list(dict.fromkeys(place.node for place in places))
        order = sorted(range(self._size), key=lambda index: nodes.index(places[index].node))
        self._actors = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        address = self._places[0].address
        own, torch_port = self._ray.get(self._actors[0].hold_ports.remote(address))
        shared = {
            **env,
            "WORLD_SIZE": str(self._size),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(torch_port),
            "PHALANX_SECRET": secrets.token_hex(32),
        }
        packed = self._ray.put(task)
        for rank, actor in enumerate(self._actors):
            node = self._places[rank].node
            local = [each for each, place in enumerate(self._places) if place.node == node]
            variables = {
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(local.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(local)),
                "GROUP_RANK": str(nodes.index(node)),
            }
            url = f"tcp://{f'[{address}]' if ':' in address else address}:{own}"
            work = actor.run.remote(packed, variables, group, url)
            self._running[work] = rank

    def see_through(self, deadline: float | None, return_exceptions: bool) -> None:
        """Wait until all ranks have ended, or until it makes no sense to wait longer."""
        limit = float("inf") if deadline is None else time.monotonic() + deadline
        while self._running and (left := limit - time.monotonic()) > 0:
            done, _ = self._ray.wait(list(self._running), timeout=min(left, 3600.0))
            for work in done:
                failed = self._receive(work)
                if failed and not return_exceptions:
                    limit = min(limit, time.monotonic() + GRACE)
        if self._running and deadline is not None and (return_exceptions or not self.failures):
            where = {rank: f"  {self._where(rank)}" for rank in self._running.values()}
            self.failures += overdue(where, self._size, deadline)

    def _receive(self, work: Any) -> bool:
        """Keep what came of a rank; return whether it failed."""
        rank = self._running.pop(work)
        try:
            outcome = self._ray.get(work)
        except self._ray.exceptions.RayTaskError as error:  # what fn itself raises is a Failure
            stuck = TypeError(
                f"rank {rank} could not take the function, or send back what it returned: "
                f"{error.cause}; workers must be able to import what the function is from (Ray's "
                "runtime_env), and results are tensors, numbers, and what else can be pickled"
            )
            outcome = Failure(rank, stuck, from_outside=True)
        except self._ray.exceptions.RayError as error:
            text = str(error).strip().partition("\n")[0]
            died = DistError(f"rank {rank} of {self._size} ({self._where(rank)}) died: {text}")
            outcome = Failure(rank, died, from_outside=True)
        if isinstance(outcome, Failure):
            # Clocks of several hosts cannot be compared: what counts is when we hear of it.
            self.failures.append(replace(outcome, when=time.monotonic()))
            return True
        self.results[rank] = outcome.value
        return False

    def _where(self, rank: int) -> str:
        place = self._places[rank]
        return f"pid {place.pid} on host {place.host}, {place.address}"

    def end(self) -> None:
        """End all actors and give back what was reserved."""
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._placement is not None:
            self._ray.util.remove_placement_group(self._placement)


class _Result(NamedTuple):
    value: Any


class _Rank:
    """One rank, on the side of its actor."""

    def place(self) -> _Place:
        theirs = need("ray", "ray", "phalanx.launch.ray")
        node = theirs.get_runtime_context().get_node_id()
        address = theirs.util.get_node_ip_address()
        return _Place(node, address, socket.gethostname(), os.getpid())

    def hold_ports(self, address: str) -> tuple[int, int]:
        """Keep two ports of this host free: for our store, and for one of torch's."""
        self._ports = [HeldPort(address), HeldPort(address)]
        return self._ports[0].number, self._ports[1].number

    def run(
        self, task: Any, variables: dict[str, str], group: Group | None, url: str
    ) -> _Result | Failure:
        """Do what one rank has to."""
        os.environ.update(variables)
        heed_environment()
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        fn, args, kwargs = task
        try:
            if group is not None:
                world.init_process_group(
                    group.backend,
                    init_method=url,
                    rank=rank,
                    world_size=size,
                    timeout=group.timeout,
                )
            value = fn(*args, **kwargs)
            if world.is_initialized():
                world.destroy_process_group()
            return _Result(value)
        except BaseException as error:
            outcomes.add_remarks(world.current(), error)
            failure = Failure(rank, as_error(error), story(error))
            world.current_slot().fail(reason(failure))
            return _movable(failure)


def _movable(failure: Failure) -> Failure:
    """Return a failure that can travel: an error that cannot be pickled becomes text."""
    pickler = need("ray.cloudpickle", "ray", "phalanx.launch.ray")
    try:
        pickler.loads(pickler.dumps(failure))
    except Exception:
        return replace(failure, error=DistError(str(failure)))
    return failure


def _spell(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
