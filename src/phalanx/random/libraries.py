"""Streams of Python's `random` and of NumPy's global generator for each rank of a thread world.

Both libraries have one hidden generator, whose methods are the functions of their modules. While
there are ranks with streams, those functions, and the hidden generators themselves, are exchanged
for ones that find the generator of the calling thread's rank; also under names that modules have
given them (``from random import random``, ``from numpy.random import rand``).

Limits: what is kept elsewhere than in a module's namespace (a default argument, an attribute of an
object, a local variable) still draws from the process's generator. Generators that a program
has made (`random.Random()`, `numpy.random.default_rng()`) are its own, on every rank.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.random import mtrand

from phalanx.patches import Shared

_python: random.Random = cast(Any, random)._inst
_numpy: np.random.RandomState = cast(Any, mtrand)._rand


class Streams:
    """The generators of one rank, which start where those of the calling thread stand."""

    def __init__(self) -> None:
        self.python = random.Random()
        self.python.setstate(_here.python.getstate())
        self.numpy = np.random.RandomState(type(_here.numpy._bit_generator)())
        self.numpy.set_state(_here.numpy.get_state(legacy=False))


class _Here(threading.local):
    python = _python
    numpy = _numpy


_here = _Here()


@contextmanager
def draw_from(streams: Streams) -> Iterator[None]:
    """Let the calling thread draw from `streams`; within `told_apart` alone."""
    outer = _here.python, _here.numpy
    _here.python, _here.numpy = streams.python, streams.numpy
    try:
        yield
    finally:
        _here.python, _here.numpy = outer


class _Python(random.Random):
    """Stands in for the hidden generator of `random`."""

    def __getattribute__(self, name: str) -> Any:
        return getattr(_here.python, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_here.python, name, value)


class _Numpy(np.random.RandomState):
    """Stands in for the hidden generator of NumPy, which others use as an object too."""

    def __getattribute__(self, name: str) -> Any:
        return getattr(_here.numpy, name)


# Functions of numpy.random that are no methods of its generator.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "seed": lambda seed=None: _here.numpy.seed(seed),
    "ranf": lambda *args, **kwargs: _here.numpy.random_sample(*args, **kwargs),
    "sample": lambda *args, **kwargs: _here.numpy.random_sample(*args, **kwargs),
    "get_bit_generator": lambda: _here.numpy._bit_generator,
    "set_bit_generator": lambda bitgen: _here.numpy.__init__(bitgen),  # type: ignore[misc]
}


def _stand_ins() -> dict[int, Any]:
    """Return what takes the place of which object, by the object's id."""
    # Without __init__, which would seed the generator that it stands for.
    found: dict[int, Any] = {id(_python): _Python.__new__(_Python), id(_numpy): _Numpy(0)}
    for module, generator, library in ((random, _python, "python"), (np.random, _numpy, "numpy")):
        for function in vars(module).values():
            if getattr(function, "__self__", None) is generator:
                found[id(function)] = _finding(library, function.__name__, function)
    for name, function in _FUNCTIONS.items():
        found[id(getattr(np.random, name))] = function
    return found


def _finding(library: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method of the calling thread's generator."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(_here, library), name)(*args, **kwargs)

    drawn.__name__, drawn.__doc__ = name, function.__doc__
    return drawn


@contextmanager
def _exchanging() -> Iterator[None]:
    stand_ins = _stand_ins()
    exchanged: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and names is not globals():
            for name, value in list(names.items()):
                if id(value) in stand_ins:
                    exchanged.append((names, name, value))
                    names[name] = stand_ins[id(value)]
    try:
        yield
    finally:
        for names, name, value in exchanged:
            names[name] = value


# Has the functions of both libraries tell ranks apart.
told_apart = Shared(_exchanging)
