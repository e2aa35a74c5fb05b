"""What the body of a test is called with."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest


class _OfARank:
    """Stands for what only a rank has, where there is none: in fixtures."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: each rank has its own>"

    def _refuse(self, *_: object) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail(
            f"{self.name!r} was used where there is no rank: fixtures are set up once, before the "
            "ranks start. Ask for it in the test itself, or call phalanx.get_rank() in its body"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and pytest look for in any object
            raise AttributeError(name)
        self._refuse()

    __int__ = __index__ = __float__ = __bool__ = __hash__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __str__ = __format__ = _refuse


RANK = _OfARank("rank")
WORLD = _OfARank("world")
_PLACES = (RANK, WORLD)


def _all_given_to(item: pytest.Function) -> dict[str, Any]:
    return {name: item.funcargs[name] for name in item._fixtureinfo.argnames}


def given_to(item: pytest.Function) -> dict[str, Any]:
    """Return the values of the fixtures that the body takes, without those each rank has."""
    given = _all_given_to(item).items()
    return {name: value for name, value in given if not _is_place(value)}


def of_ranks(item: pytest.Function) -> set[str]:
    """Return which of `rank` and `world` the body takes."""
    return set(_names_in(_all_given_to(item)))


def is_asked_for(item: pytest.Function) -> str | None:
    """Return which of `rank` and `world` a test, or one of its fixtures, asks for."""
    return next(iter(_names_in(item.funcargs)), None)


def _names_in(given: dict[str, Any]) -> list[str]:
    return [place.name for place in _PLACES if any(value is place for value in given.values())]


def _is_place(value: Any) -> bool:
    return any(value is place for place in _PLACES)
