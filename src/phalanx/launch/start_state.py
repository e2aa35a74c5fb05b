"""The state that the process of a rank starts in, and its return to it between two runs.

A new process draws the same from torch's random stream as any other, bit for bit. Python's `random`
and NumPy's are seeded by the system. What cannot be put back is found instead: a process in which
there is any of that is not clean.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phalanx import world
from phalanx.debug import levels
from phalanx.launch.descendants import has_children
from phalanx.trace.recorder import VARIABLE as TRACE
from phalanx_autoload import REPLACE

# How long threads may take to end once the function of their rank has.
_ENDING = 2.0

# What lasts until the process ends once a variable has asked for it.
_FOR_LIFE = (REPLACE, TRACE)

# How to read a setting, and how to put it back.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    (np.geterr, lambda modes: np.seterr(**modes)),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    (lambda: list(logging.root.handlers), lambda kept: setattr(logging.root, "handlers", kept)),
    (lambda: list(warnings.filters), lambda filters: _set_warning_filters(filters)),
    (lambda: list(sys.meta_path), lambda finders: setattr(sys, "meta_path", finders)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (threading.gettrace, threading.settrace),
    (threading.getprofile, threading.setprofile),
    (threading.stack_size, threading.stack_size),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (
        lambda: torch.backends.mkldnn.enabled,
        lambda enabled: setattr(torch.backends.mkldnn, "enabled", enabled),
    ),
    (
        lambda: replace(torch._tensor_str.PRINT_OPTS),
        lambda options: setattr(torch._tensor_str, "PRINT_OPTS", options),
    ),
    (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
    *(
        (
            lambda name=name: getattr(sys, name),
            lambda value, name=name: setattr(sys, name, value),
        )
        for name in (
            *("stdin", "stdout", "stderr", "excepthook", "unraisablehook"),
            *("displayhook", "breakpointhook"),
        )
    ),
]


class StartState:
    """The state that the process is in now."""

    def __init__(self) -> None:
        self._settings = [get() for get, _ in _SETTINGS]
        self._random = random_state()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._umask = _umask()
        self._threads = set(threading.enumerate())
        self._interop_threads = torch.get_num_interop_threads()
        self._descriptors = _standard_descriptors()
        # Objects that are here stay: what a run leaves behind is found the faster.
        gc.collect()
        gc.freeze()

    def restore(self) -> list[str]:
        """Return to that state, and say what keeps this process from being there."""
        _leave_world()
        torch.set_default_device(None)
        torch.set_flush_denormal(False)
        levels.forget_debug_level()
        for value, (get, put) in zip(self._settings, _SETTINGS, strict=True):
            if get() != value:
                put(value)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        os.umask(self._umask)
        set_random_state(self._random)
        random.seed()
        gc.collect()
        return list(self._remains())

    def _remains(self) -> Iterator[str]:
        limit = time.monotonic() + _ENDING
        for thread in set(threading.enumerate()) - self._threads:
            if not isinstance(thread, threading._DummyThread):  # which end unnoticed
                thread.join(max(limit - time.monotonic(), 0))
                if thread.is_alive():
                    yield f"thread {thread.name} runs"
        if has_children():
            yield "it has child processes"
        if _standard_descriptors() != self._descriptors:
            yield "a standard stream leads elsewhere"
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            yield "a mode of torch is on"
        if torch.is_inference_mode_enabled():
            yield "inference mode is on"
        if torch.get_num_interop_threads() != self._interop_threads:
            yield "torch's inter-op threads are others"
        if world.is_initialized() or _torch_has_groups():
            yield "a process group is left"
        yield from (f"{name} was set" for name in _FOR_LIFE if name in os.environ)


def random_state() -> tuple[Any, Any]:
    """Return where torch's random stream stands, and NumPy's if somebody may have used it."""
    used = sys.modules.get("numpy.random")
    return torch.get_rng_state(), used and used.get_state()


def set_random_state(state: tuple[Any, Any]) -> None:
    """Have torch's and NumPy's random streams go on from there."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        np.random.set_state(state[1])
    elif "numpy.random" in sys.modules:
        np.random.seed()


def same_random_state(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Say whether two states lead to the same draws."""
    return torch.equal(one[0], other[0]) and (one[1] is None or repr(one[1]) == repr(other[1]))


def _leave_world() -> None:
    slot = world.current_slot()
    left, slot.world = slot.world, None
    if left is not None:
        left.close()


def _torch_has_groups() -> bool:
    """Say whether torch's own distributed package has a default group; it may not even be there."""
    package = sys.modules.get("torch.distributed")
    return package is not None and package.is_available() and package.is_initialized()


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _standard_descriptors() -> list[tuple[int, int] | None]:
    return [_identity(descriptor) for descriptor in range(3)]


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        stat = os.fstat(descriptor)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
