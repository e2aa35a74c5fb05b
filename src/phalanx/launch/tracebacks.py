"""Errors that travel between processes with their tracebacks.

Frames cannot be pickled. What is shown of them can: where the code is, the line, and how the values
of the variables look. In the other process frames are made that show the same.
"""

from __future__ import annotations

import keyword
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from phalanx.launch.parcels import pack

_HIDE = "__tracebackhide__"  # what pytest leaves out
_MOST_VARIABLES = 40
_LONGEST = 240  # characters of a value


@dataclass(frozen=True)
class _Frame:
    filename: str
    name: str
    first_line: int
    line: int
    module: str
    arguments: dict[str, str]
    variables: dict[str, str]
    is_hidden: bool


@dataclass(frozen=True)
class Parcel:
    """An error, with its traceback and those that it was raised from."""

    error: bytes  # packed, empty if that is not possible
    kind: str
    text: str
    frames: list[_Frame]
    cause: Parcel | None
    context: Parcel | None
    suppresses_context: bool

    def open(self) -> BaseException:
        """Return the error; one that could not be packed is of a class of the same name."""
        error = self._error()
        error.__traceback__ = _traceback(self.frames)
        error.__cause__ = self.cause.open() if self.cause else None
        error.__context__ = self.context.open() if self.context else None
        error.__suppress_context__ = self.suppresses_context
        return error

    def _error(self) -> BaseException:
        try:
            error: BaseException = pickle.loads(self.error)
        except Exception:
            error = _class(self.kind)(self.text)
        return error


@cache
def _class(kind: str) -> type[Exception]:
    module, _, name = kind.rpartition(".")
    return type(name, (Exception,), {"__module__": module})


def parcel(error: BaseException, *seen: BaseException) -> Parcel:
    """Pack an error, without what it is chained to if that has been `seen`."""
    seen = (*seen, error)
    cause, context = error.__cause__, error.__context__
    return Parcel(
        _packed(error),
        f"{type(error).__module__}.{type(error).__qualname__}",
        str(error),
        list(_frames(error.__traceback__)),
        None if cause is None or cause in seen else parcel(cause, *seen),
        None if context is None or context in (cause, *seen) else parcel(context, *seen),
        error.__suppress_context__,
    )


def _packed(error: BaseException) -> bytes:
    try:
        data = pack(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data


def _frames(entry: TracebackType | None) -> Iterator[_Frame]:
    while entry is not None:
        yield _frame(entry.tb_frame, entry.tb_lineno)
        entry = entry.tb_next


def _frame(frame: FrameType, line: int) -> _Frame:
    code = frame.f_code
    num_arguments = code.co_argcount + code.co_kwonlyargcount
    arguments = set(code.co_varnames[:num_arguments])
    values = {
        name: _shown(value)
        for name, value in list(frame.f_locals.items())[:_MOST_VARIABLES]
        if name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("@")
    }
    if code.co_name == "<module>":  # its variables are all that it defines
        values = {}
    return _Frame(
        code.co_filename,
        code.co_name,
        code.co_firstlineno,
        line,
        frame.f_globals.get("__name__", ""),
        {name: text for name, text in values.items() if name in arguments},
        {name: text for name, text in values.items() if name not in arguments},
        frame.f_locals.get(_HIDE, False) is True,
    )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


class _Value:
    """Looks like a value of another process."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _traceback(frames: list[_Frame]) -> TracebackType | None:
    entry: TracebackType | None = None
    for frame in reversed(frames):
        # Which instruction it was is not known: then the line alone is told.
        entry = TracebackType(entry, _made(frame), -1, frame.line)
    return entry


def _made(frame: _Frame) -> FrameType:
    """Make a frame that looks like one of another process, by raising in it."""
    values: dict[str, Any] = {name: _Value(text) for name, text in frame.variables.items()}
    if frame.is_hidden:
        values[_HIDE] = True
    body = "".join(f"{name} = _values[{name!r}]; " for name in values)
    # All on one line, that on which the function begins.
    lines = "\n" * (frame.first_line - 1)
    source = f"{lines}def _made({', '.join(frame.arguments)}): {body}raise _Made"
    module = compile(source, frame.filename, "exec", dont_inherit=True)
    code = next(each for each in module.co_consts if isinstance(each, CodeType))
    code = code.replace(co_name=frame.name)
    scope = {"__name__": frame.module, "__file__": frame.filename, "_values": values}
    function = FunctionType(code, {**scope, "_Made": _Made})
    try:
        function(*(_Value(text) for text in frame.arguments.values()))
    except _Made as made:
        *_, (innermost, _) = traceback.walk_tb(made.__traceback__)
    return innermost


class _Made(Exception):
    """Ends the function of a frame that is made."""
