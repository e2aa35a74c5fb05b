"""What `@pytest.mark.world(...)` says."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn

import pytest

SIZE = "_world_size"  # the parameter of tests that are run on worlds of several sizes

HELP = (
    "world(size, *, ranks='threads', timeout=60, group_timeout=None, backend='phalanx', rng=True, "
    "torch=False, interleavings=0): run the test's body once on each of `size` ranks; a list of "
    "sizes makes a test of each."
)


@dataclass(frozen=True)
class WorldMark:
    """The world that a test asks for."""

    size: int
    ranks: Literal["threads", "processes"] = "threads"
    timeout: float | None = 60  # seconds, for the whole body
    group_timeout: float | timedelta | None = None
    backend: str = "phalanx"
    rng: bool | Literal["all"] = True
    torch: bool = False  # the body calls torch.distributed itself
    interleavings: int = 0  # run the body under so many schedules
    seed: int | None = None  # run it under this schedule alone


_KEYWORDS = [field.name for field in fields(WorldMark) if field.name not in ("size", "seed")]


def marker(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark that holds for a test: of itself, the nearest class, or its module."""
    for node in reversed(item.listchain()):
        own = [each for each in node.own_markers if each.name == "world"]
        if len(own) > 1 and not isinstance(node, pytest.Class):
            pytest.fail(
                f"{node.nodeid} has {len(own)} marks `world`: one world is what a test runs in; "
                "for several sizes write @pytest.mark.world([2, 3])",
                pytrace=False,
            )
        if own:
            return own[-1]  # a class has the marks of its bases first
    return None


def sizes(node: pytest.Item) -> list[int] | None:
    """Return the sizes that a test is to be made for, None if it is not to be parametrised."""
    size = _parse(node)[0]
    return None if isinstance(size, int) else list(size)


def of(item: pytest.Item) -> WorldMark | None:
    """Return the world that a test asks for, None if it does not."""
    if marker(item) is None:
        return None
    size, mark = _parse(item)
    if not isinstance(size, int):
        size = item.callspec.params[SIZE]  # type: ignore[attr-defined]
    seed = item.config.getoption("world_seed")
    return replace(mark, size=size, seed=seed if mark.interleavings else None)


def _parse(item: pytest.Item) -> tuple[int | list[int], WorldMark]:
    found = marker(item)
    assert found is not None
    try:
        return _read(*found.args, **found.kwargs)
    except (TypeError, ValueError) as error:
        given = [*map(repr, found.args), *(f"{k}={v!r}" for k, v in found.kwargs.items())]
        said = f"@pytest.mark.world({', '.join(given)})"
        problem = f"{item.nodeid}: {said}: {error}"
    pytest.fail(problem, pytrace=False)


def _read(*args: Any, **kwargs: Any) -> tuple[int | list[int], WorldMark]:
    if not args and "size" in kwargs:
        args = (kwargs.pop("size"),)
    if len(args) != 1:
        raise TypeError(
            f"one argument is needed, the size or a list of sizes, got {len(args)}: "
            "@pytest.mark.world(4)"
        )
    if unknown := [name for name in kwargs if name not in _KEYWORDS]:
        raise TypeError(f"unknown keyword {unknown[0]!r} (known: {', '.join(_KEYWORDS)})")
    size = _sizes(args[0])
    mark = WorldMark(size=0, **kwargs)
    _check(mark)
    return size, mark


def _sizes(given: Any) -> int | list[int]:
    if isinstance(given, Iterable) and not isinstance(given, str):
        several = [_size(each) for each in given]
        if not several:
            raise ValueError("a list of sizes needs at least one")
        return several
    return _size(given)


def _size(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"a size is a whole number, at least 1, or a list of such: got {given!r}")
    return given


def _check(mark: WorldMark) -> None:
    if mark.ranks not in ("threads", "processes"):
        raise ValueError(f"unknown kind of ranks {mark.ranks!r} (known: threads, processes)")
    if mark.timeout is not None and not (_is_number(mark.timeout) and mark.timeout > 0):
        raise ValueError(f"timeout is a number of seconds above 0, or None: got {mark.timeout!r}")
    limit = mark.group_timeout
    if limit is not None and not isinstance(limit, timedelta) and not _is_number(limit):
        raise ValueError(f"group_timeout is seconds, a timedelta or None: got {limit!r}")
    if not isinstance(mark.backend, str):
        raise ValueError(f"backend is the name of one: got {mark.backend!r}")
    if mark.rng not in (True, False, "all"):
        raise ValueError(f"rng is True, False or 'all': got {mark.rng!r}")
    if not isinstance(mark.torch, bool):
        raise ValueError(f"torch is True or False: got {mark.torch!r}")
    if not isinstance(mark.interleavings, int) or mark.interleavings < 0:
        raise ValueError(f"interleavings is how many schedules: got {mark.interleavings!r}")
    if mark.interleavings and mark.ranks == "processes":
        raise ValueError("interleavings needs ranks='threads': processes cannot be scheduled")


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def require(item: pytest.Item, name: str) -> NoReturn:
    """Refuse a test that is not marked and asks for what only ranks have."""
    pytest.fail(
        f"{item.nodeid} asks for {name!r}, but does not run on ranks: mark it with "
        "@pytest.mark.world(4), or another size",
        pytrace=False,
    )


def check_body(item: pytest.Item, body: Any) -> None:
    """Refuse a test that cannot be run on ranks."""
    if hasattr(body, "hypothesis") and _parse(item)[1].ranks == "processes":
        pytest.fail(
            f"{item.nodeid}: Hypothesis would draw other examples on each rank that is a process: "
            "run the test with ranks='threads', where an example is drawn once for all ranks",
            pytrace=False,
        )
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        pytest.fail(
            f"{item.nodeid}: an async test cannot run on ranks: make it a plain function, and call "
            "asyncio.run(...) in its body",
            pytrace=False,
        )
