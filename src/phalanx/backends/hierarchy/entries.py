"""What the hosts read from the store, checked: others have written it, and it may be anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from phalanx import _native, errors
from phalanx.errors import DistBackendError

_MOST = 2**63


class Malformed(ValueError):
    """Says what is wrong with something that was read."""


def _number(value: Any, _size: int) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise Malformed(f"{value!r} is not a number from 0 to 2**63 - 1")
    return value


def _rank(value: Any, size: int) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise Malformed(f"{value!r} is not a rank of a world of {size}")
    return value


def _text(value: Any, _size: int = 0) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{value!r} is not a text")
    return value.encode(errors="replace").decode()  # JSON can say half a character


def _error(value: Any, _size: int) -> type[DistBackendError]:
    kind = getattr(errors, _text(value), None)
    if isinstance(kind, type) and issubclass(kind, DistBackendError):
        return kind
    return DistBackendError


def _list(value: Any, size: int, length: int = 0) -> list[Any]:
    if not isinstance(value, list) or (length and len(value) != length):
        raise Malformed(f"{value!r} is not a list" + (f" of {length}" if length else ""))
    return value


def _waits(value: Any, size: int) -> list[tuple[int, int]]:
    pairs = [_list(each, size, 2) for each in _list(value, size)]
    return [(_rank(rank, size), _number(since, size)) for rank, since in pairs]


_FIELDS: dict[str, dict[str, Callable[[Any, int], Any]]] = {
    "ended": {"rank": _rank, "text": _text},
    "broken": {"group": _text, "number": _number, "error": _error, "text": _text},
    "deadlock": {"waits": _waits, "text": _text},
    "left": {"group": _text, "rank": _rank},
    "suspected": {"host": _text},
    "closed": {"rank": _rank},
    "ask": {"group": _text},
}


def _load(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None


def log_entry(data: bytes, size: int) -> dict[str, Any]:
    """Return an entry of the log of a world of this size."""
    entry = _load(data)
    fields = _FIELDS.get(str(entry.get("kind"))) if isinstance(entry, dict) else None
    if fields is None:
        raise Malformed("it is of no kind that is known")
    if missing := fields.keys() - entry.keys():
        raise Malformed(f"it lacks {', '.join(sorted(missing))}")
    checked = {name: check(entry[name], size) for name, check in fields.items()}
    return {"kind": entry["kind"], **checked}


def account(data: bytes) -> tuple[int, str]:
    """Return what a rank says that it does: the number of its collective, and a text."""
    number, text = _list(_load(data), 0, 2)
    return _number(number, 0), _text(text)


def waits_of_host(data: bytes, size: int) -> tuple[int, list[tuple[int, int, bytes]]]:
    """Return a host's report of who waits: its number, and (rank, since, facts) of each wait."""
    number, told = _list(_load(data), size, 2)
    return _number(number, size), [_wait(each, size) for each in _list(told, size)]


def _wait(value: Any, size: int) -> tuple[int, int, bytes]:
    rank, since, text = _list(value, size, 3)
    try:
        facts = base64.b64decode(_text(text), validate=True)
        _native.check_facts(facts)
    except ValueError as error:
        raise Malformed(str(error)) from None
    return _rank(rank, size), _number(since, size), facts
