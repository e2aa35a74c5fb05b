"""The life of a process that is a rank, from where its launcher has started it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phalanx import bystanders, world
from phalanx.errors import DistError
from phalanx.launch import notebook, outcomes
from phalanx.launch.descendants import kill_below
from phalanx.launch.environment import Job
from phalanx.launch.outcomes import Failure, as_error, reason, story
from phalanx.launch.parcels import pack
from phalanx.launch.placement import THREADS_VARIABLE
from phalanx.launch.relay import Mouth
from phalanx.stores import FileStore
from phalanx_autoload import REPLACE, register

# Asks a rank to write down where each of its threads stands.
DUMP_STACKS = signal.SIGUSR2


class Brief(NamedTuple):
    """All that a rank's process needs to know."""

    size: int
    task: bytes  # see `pack_task`
    environment: dict[str, str]
    group: Group | None  # if there is none, the function is told its rank and makes its own
    directory: str


class Group(NamedTuple):
    """How the default group is initialised."""

    backend: str
    timeout: float | timedelta | None


def be(rank: int, brief: Brief, sender: Connection, mouth: Mouth | None) -> None:
    """Be one rank: the whole life of its process."""
    if mouth:
        mouth.open()
    begin(brief.directory, sender)
    if not os.path.isdir(brief.directory):  # the launcher was interrupted and has given up
        return
    outcomes.last_word = lambda failure: sender.send_bytes(packed(failure))
    outcome = live(rank, brief)
    with suppress(BrokenPipeError):  # nobody waits for it
        sender.send_bytes(outcome)
    sender.close()


def begin(directory: str, line: Connection) -> threading.Thread:
    """Begin the life of a process that ends with its launcher, as does that directory.

    Return who sees to that: a thread that ends this process, and never returns.
    """
    # What the rank starts, or becomes by exec, does not hold the line to the launcher.
    os.set_inheritable(line.fileno(), False)
    watch = threading.Thread(target=_end_with_launcher, args=(directory,), daemon=True)
    bystanders.mark(watch).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return watch


def live(rank: int, brief: Brief, loaded: Callable[[], None] = lambda: None) -> bytes:
    """Do what one rank has to, and return the outcome, packed; call `loaded` just before."""
    os.environ.clear()
    os.environ.update(brief.environment, **Job.rank_variables(rank))
    heed_environment()
    with open(Path(brief.directory, f"stacks{rank}"), "w") as stacks:
        faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)
        outcome = _outcome(rank, brief, loaded)
        faulthandler.unregister(DUMP_STACKS)
    return outcome


def heed_environment() -> None:
    """Do what torch does with variables as it is imported: this may be forked from where it was."""
    num_threads = os.environ.get(THREADS_VARIABLE, "")
    if num_threads.isdecimal():
        torch.set_num_threads(int(num_threads))
    if REPLACE in os.environ:
        register()


def _outcome(rank: int, brief: Brief, loaded: Callable[[], None]) -> bytes:
    try:
        fn, args, kwargs = unpack_task(brief.task)
        loaded()
        if brief.group is None:
            args = (rank, *args)
        else:
            _init(rank, brief, brief.group)
        result = fn(*args, **kwargs)
        if world.is_initialized():
            world.destroy_process_group()
        return packed_result(result)
    except BaseException as error:
        return failed(rank, error)


def unpack_task(task: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a function and its arguments that another process has packed."""
    fn, args, kwargs, cells = pickle.loads(task)
    notebook.know(cells)
    return fn, args, kwargs


def failed(rank: int, error: BaseException) -> bytes:
    """Tell the other ranks how this one failed, and pack it for the launcher."""
    outcomes.add_remarks(world.current(), error)
    failure = Failure(rank, as_error(error), story(error))
    world.current_slot().fail(reason(failure))
    return packed(failure)


def _init(rank: int, brief: Brief, group: Group) -> None:
    store = FileStore(str(Path(brief.directory, "store")), brief.size)
    world.init_process_group(
        group.backend, store=store, rank=rank, world_size=brief.size, timeout=group.timeout
    )


def packed_result(result: object) -> bytes:
    """Pack what a rank returned."""
    try:
        return pack(result)
    except TypeError as error:
        raise TypeError(
            f"cannot send the result, of type {type(result).__name__}, to the launcher: {error}; "
            "return tensors, numbers, and what else can be pickled"
        ) from None


def packed(failure: Failure) -> bytes:
    """Pack a failure; an error that cannot be moved between processes travels as text."""
    try:
        data = pack(failure)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(replace(failure, error=DistError(str(failure))))
    return data


def _end_with_launcher(directory: str) -> None:
    """Once the launcher is gone, however that ended, leave nothing behind either."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        shutil.rmtree(directory, ignore_errors=True)
        kill_below(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
