"""How ranks find each other: an address, a file, or what their launcher tells them.

`rendezvous(url)` yields `(store, rank, world_size)`. What the schemes mean:

tcp://host:port    rank 0 runs a store there, the others connect to it.
file:///path       a file that all ranks can reach.
env://             the environment says: RANK and WORLD_SIZE (torchrun, or set by hand), or the
                   variables of Open MPI, of MPICH and its relatives, or of Slurm.
mpi://             MPI says, by mpi4py: rank, size, and where rank 0 runs a store.
redis://host/0     a Redis or Valkey server (rediss:// with TLS); rank and size are given, or the
                   launcher's. Jobs are told apart by ?job=NAME, or by what launchers call them.

With `env://`, MASTER_ADDR and MASTER_PORT are where rank 0 runs the store. They may be missing
under an MPI launcher or Slurm. If all ranks are on one machine, they then meet in a private
directory (see `meeting`), under a name made from what identifies the job. On several machines those
of an MPI launcher meet as with `mpi://`, if mpi4py is there, and those of Slurm on the first host
of their step, at a port made from its number. torchrun does set the variables, but to the store of
its own agent, which speaks another protocol: on one machine ranks meet in the directory, so that no
second port has to be agreed on; on several, rank 0 writes into that store where its own is. Ranks
of ``phalanx run`` meet in the directory as well: its port is left to torch's store.

A process may rendezvous again and again at one place: each time is a world of its own, and all
ranks must come the same number of times.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from phalanx import forks
from phalanx.extras import install
from phalanx.process import Stat
from phalanx.stores import FileStore, PrefixStore, Store, TCPStore, slurm
from phalanx.stores.arrival import arrive
from phalanx.stores.base import Timeout, seconds
from phalanx.stores.meeting import meet
from phalanx.stores.over_mpi import meet_over_mpi, mpi
from phalanx.stores.redis import meet as meet_in_redis
from phalanx.stores.redis import split_url

DEFAULT_TIMEOUT = timedelta(minutes=30)

Rendezvous = Iterator[tuple[Store, int, int]]
Handler = Callable[..., Rendezvous]

_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Make `rendezvous` call `handler(url, **kwargs)` for URLs of this scheme.

    The handler gets rank and world size, where the caller gave them, as the URL's query, and yields
    `(store, rank, world_size)`.
    """
    if scheme in _handlers:
        raise RuntimeError(f"scheme '{scheme}://' already has a rendezvous handler")
    _handlers[scheme] = handler


def rendezvous(
    url: str = "env://", rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Rendezvous:
    """Find the other ranks, and yield `(store, rank, world_size)` once.

    Every rank calls it with the same URL. `rank` and `world_size`, if not -1, win over what the
    environment says; giving them here and in the URL is an error.
    """
    if not isinstance(url, str):
        raise TypeError(f"rendezvous: url must be str, not {type(url).__name__}")
    parts = urlsplit(url)
    if parts.scheme not in _handlers:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_handlers))
        raise ValueError(f"rendezvous: unknown scheme in '{_shown(url)}' (known: {known})")
    query = dict(parse_qsl(parts.query))
    for name, number in (("rank", rank), ("world_size", world_size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"rendezvous: {name} must be an int, not {type(number).__name__}")
        if number == -1:
            continue
        if name in query:
            raise ValueError(
                f"rendezvous: {name} is given as an argument and in '{_shown(url)}'; give one"
            )
        query[name] = str(number)
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return _handlers[parts.scheme](parts._replace(query=text).geturl(), **kwargs)


def _shown(url: str) -> str:
    """Return a URL as it may be printed: without a password."""
    parts = urlsplit(url)
    _, at, place = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"...@{place}").geturl() if at else url


# --- worlds that follow each other at one place


_lock = threading.Lock()
forks.renew(sys.modules[__name__], "_lock", threading.Lock)
# A rank keeps its way to a place, and rank 0 the server there, until the process ends: a rank that
# is quick to come back must not find the server of the world before it about to close.
_places: dict[tuple[object, ...], TCPStore] = {}
_visits: Counter[tuple[object, ...]] = Counter()


@forks.after_fork_in_child
def _forget() -> None:
    with _lock:
        _places.clear()
        _visits.clear()


atexit.register(_forget)


def _next_world(place: tuple[object, ...], store: Store, rank: int) -> Store:
    """Return the part of the store that belongs to this rank's next visit of the place."""
    with _lock:
        visit = _visits[place]
        _visits[place] += 1
    if rank == 0 and visit >= 2:
        # Everybody has been seen in the world before this one, so the one before that is over.
        past = PrefixStore(f"world{visit - 2}", store)
        for key in past.list_keys():
            past.delete_key(key)
    return PrefixStore(f"world{visit}", store)


def _visit(place: tuple[object, ...], rank: int, arrive: Callable[[], TCPStore]) -> Store:
    place = (*place, rank)
    with _lock:
        store = _places.get(place)
    if store is None:
        store = arrive()
        with _lock:
            _places[place] = store
    return _next_world(place, store.clone(), rank)


# --- schemes


def _number(name: str, text: str, source: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{source}: {name} must be an integer, but it is {text!r}") from None


def _rank_and_size(url: str) -> tuple[int, int]:
    query, shown = dict(parse_qsl(urlsplit(url).query)), _shown(url)
    for name, meaning in (
        ("rank", "the number of this process, from 0"),
        ("world_size", "how many processes there are"),
    ):
        if name not in query:
            raise ValueError(
                f"{shown}: {name} ({meaning}) is missing; pass it as an argument or in the query"
            )
    return _number("rank", query["rank"], shown), _number("world_size", query["world_size"], shown)


def _tcp(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: object) -> Rendezvous:
    parts = urlsplit(url)
    if not parts.hostname or parts.port is None:
        raise ValueError(
            f"{_shown(url)}: must name rank 0's host and port, as in tcp://10.0.0.1:29500"
        )
    rank, world_size = _rank_and_size(url)
    yield _at(parts.hostname, parts.port, rank, timeout), rank, world_size
    raise _once("tcp://")


def _file(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: object) -> Rendezvous:
    parts = urlsplit(url)
    path = parts.netloc + parts.path
    if not path:
        raise ValueError(f"{url}: must name a file, as in file:///shared/job-17")
    rank, world_size = _rank_and_size(url)
    store = FileStore(path, world_size)
    store.set_timeout(timeout)
    yield _next_world(("file", os.path.abspath(path), rank), store, rank), rank, world_size
    raise _once("file://")


def _env(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: object) -> Rendezvous:
    yield from_environment(os.environ, dict(parse_qsl(urlsplit(url).query)), timeout)
    raise _once("env://")


def from_environment(
    environment: Mapping[str, str], given: Mapping[str, str], timeout: Timeout
) -> tuple[Store, int, int]:
    """Return store, rank and world size as a launcher's variables say; what is `given` wins."""
    launcher = _launcher(environment, given)

    def own(name: str, variable: str, meaning: str) -> int:
        if name in given:
            return _number(name, given[name], "env://")
        return _number(variable, _require(environment, variable, meaning), "env://")

    rank = own("rank", launcher.rank, "the number of this process, from 0")
    world_size = own("world_size", launcher.size, "how many processes there are")

    identity = _run_identity(environment) or _torchrun_identity(environment)
    told = {"MASTER_ADDR", "MASTER_PORT"} & environment.keys()
    if not identity and not told:
        identity = launcher.job(environment)
    if identity and not _is_one_machine(environment, launcher, world_size):
        if _torchrun_identity(environment):
            return _met_over_torch(environment, rank, timeout), rank, world_size
        if launcher.mpi and not given and importlib.util.find_spec("mpi4py") is not None:
            return _met_over_mpi(timeout)
        environment = _with_slurm_address(environment, launcher)
        _require_address(environment, launcher, world_size)
        identity = ()
    if identity:
        store = _visit(identity, rank, lambda: meet(identity, rank, world_size, seconds(timeout)))
        store.set_timeout(timeout)
    else:
        environment = _with_slurm_address(environment, launcher)
        host = _require(environment, "MASTER_ADDR", "the host that rank 0 runs on")
        port = _require(environment, "MASTER_PORT", "a free port on that host")
        hosts = not _is_one_machine(environment, launcher, world_size)
        store = _at(host, _number("MASTER_PORT", port, "env://"), rank, timeout, hosts)
    return store, rank, world_size


def _met_over_torch(environment: Mapping[str, str], rank: int, timeout: Timeout) -> Store:
    from phalanx.stores.over_torch import meet_over_torch

    host = _require(environment, "MASTER_ADDR", "the host of torchrun's first agent")
    port = _number("MASTER_PORT", _require(environment, "MASTER_PORT", "its port"), "env://")
    place = ("torchrun", host, port)
    store = _visit(place, rank, lambda: meet_over_torch(host, port, rank, seconds(timeout)))
    store.set_timeout(timeout)
    return store


def _mpi(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: object) -> Rendezvous:
    if urlsplit(url).query:
        raise ValueError(f"{url}: MPI says rank and world size; do not give them")
    yield _met_over_mpi(timeout)
    raise _once("mpi://")


def _met_over_mpi(timeout: Timeout) -> tuple[Store, int, int]:
    world = mpi().COMM_WORLD
    rank = world.Get_rank()
    store = _visit(("mpi",), rank, lambda: meet_over_mpi(seconds(timeout)))
    store.set_timeout(timeout)
    return store, rank, world.Get_size()


# What all ranks of a job find in their environment, on whichever host, and other jobs do not.
_JOB_NAMES = (
    *("PHALANX_JOB", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)


def _redis(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: object) -> Rendezvous:
    server, given = split_url(url)
    if not urlsplit(server).hostname:
        raise ValueError("redis://: must name the server's host, as in redis://10.0.0.1:6379/0")
    for name in {"rank", "world_size"} - given.keys():
        launcher = _launcher(os.environ, given)
        variable = launcher.rank if name == "rank" else launcher.size
        given[name] = _require(os.environ, variable, f"the {name.replace('_', ' ')}")
    rank, world_size = (_number(name, given[name], "redis://") for name in ("rank", "world_size"))
    names = [f"{name}={os.environ[name]}" for name in _JOB_NAMES if name in os.environ]
    job = given.get("job") or ",".join(names) or "job"
    yield meet_in_redis(server, job, rank, world_size, timeout), rank, world_size
    raise _once("redis://")


register_rendezvous_handler("tcp", _tcp)
register_rendezvous_handler("file", _file)
register_rendezvous_handler("env", _env)
register_rendezvous_handler("mpi", _mpi)
register_rendezvous_handler("redis", _redis)
register_rendezvous_handler("rediss", _redis)


def _at(host: str, port: int, rank: int, timeout: Timeout, hosts: bool = False) -> Store:
    """Return the store at an address; rank 0 runs it."""
    place = ("tcp", host, port)
    store = _visit(place, rank, lambda: arrive(host, port, rank, seconds(timeout), hosts))
    store.set_timeout(timeout)
    return store


def _once(scheme: str) -> RuntimeError:
    return RuntimeError(f"{scheme} yields one world; call rendezvous() again for another")


# --- launchers


@dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher tells a process who it is."""

    name: str
    rank: str
    size: str
    local_size: str
    identity: tuple[str, ...] = ()  # together the same for all ranks of a job, and for no other job
    ancestor: str = ""  # or the process that started all of them
    mpi: bool = False

    def job(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return what all ranks of this job share and no other job has; nothing if unknown."""
        values = [f"{name}={environment[name]}" for name in self.identity if name in environment]
        if self.ancestor:
            values.append(_ancestor(self.ancestor))
        return (self.name, *values) if values else ()


_LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        identity=("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_ess_base_jobid"),
        mpi=True,
    ),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ancestor="hydra", mpi=True),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        identity=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)


def _launcher(environment: Mapping[str, str], given: Mapping[str, str]) -> Launcher:
    """Return the launcher whose variables are there.

    MPI launchers come before Slurm, under which they may run themselves; a batch script that was
    not started by srun has a SLURM_PROCID too, but no step.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank not in environment:
            continue
        if launcher.name == "MPICH" and launcher.local_size not in environment:
            continue  # Slurm sets PMI_RANK as well
        if launcher.name == "Slurm" and "SLURM_STEP_ID" not in environment:
            continue
        return launcher
    if given or "WORLD_SIZE" in environment:
        return _LAUNCHERS[0]
    if "SLURM_PROCID" in environment:
        raise ValueError(
            "env://: Slurm has set SLURM_PROCID, but no SLURM_STEP_ID: this is the batch script "
            "itself; start ranks in it with srun"
        )
    others = ", ".join(f"{launcher.rank} ({launcher.name})" for launcher in _LAUNCHERS[1:])
    raise ValueError(
        "env:// found no launcher: RANK (the number of this process, from 0) is not set, and "
        f"neither is {others}; start with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT, or give another URL or a store"
    )


def _require(environment: Mapping[str, str], name: str, meaning: str) -> str:
    value = environment.get(name)
    if value:
        return value
    family = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = ", ".join(f"{other}={environment[other]}" for other in family if other in environment)
    state = "empty" if value == "" else "not set"
    raise ValueError(
        f"env://: the environment variable {name} ({meaning}) is {state}; found: {found or 'none'}"
    )


def _is_one_machine(environment: Mapping[str, str], launcher: Launcher, world_size: int) -> bool:
    # Slurm writes "4", or for several machines "4(x2)" or "4,3".
    return environment.get(launcher.local_size) in (None, str(world_size))


def _with_slurm_address(environment: Mapping[str, str], launcher: Launcher) -> Mapping[str, str]:
    """Add the address that Slurm's variables tell, where the environment has none."""
    if launcher.name != "Slurm" or not (host := slurm.first_host(environment)):
        return environment
    return {"MASTER_ADDR": host, "MASTER_PORT": str(slurm.port(environment)), **environment}


def _require_address(environment: Mapping[str, str], launcher: Launcher, world_size: int) -> None:
    if "MASTER_ADDR" in environment:
        return
    local = environment[launcher.local_size]
    more = f", or install mpi4py ({install('mpi')})" if launcher.mpi else ""
    raise ValueError(
        f"env://: of {world_size} ranks, {launcher.local_size}={local} are on this machine; ranks "
        "on several machines need an address: set MASTER_ADDR and MASTER_PORT, rank 0's host and a "
        f"free port there, or give tcp://HOST:PORT{more}"
    )


def _run_identity(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Name the job of ``phalanx run``, unless somebody has since told of another place to meet."""
    job = environment.get("PHALANX_JOB", "")
    if not job or job.rpartition(":")[2] != environment.get("MASTER_PORT"):
        return ()
    return ("phalanx run", job)


def _torchrun_identity(environment: Mapping[str, str]) -> tuple[str, ...]:
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ()
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    values = [f"{name}={environment.get(name, '')}" for name in names]
    # .../<made for this run>/attempt_0/<local rank>/error.json tells runs at one port apart.
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        values.append(str(Path(error_file).parent.parent))
    return ("torchrun", *values)


def _ancestor(name: str) -> str:
    """Return pid and start time of the nearest ancestor called so, or else of the parent."""
    parent = ""
    pid = os.getppid()
    while pid > 1 and (stat := Stat(f"/proc/{pid}")).start_time:
        label = f"pid={pid} start={stat.start_time}"
        if name and stat.name.startswith(name):
            return label
        parent = parent or label
        pid = stat.parent
    return parent
