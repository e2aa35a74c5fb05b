"""Errors that travel between processes with their tracebacks."""

from __future__ import annotations

import pickle
import traceback

import pytest

from phalanx.launch import tracebacks


class Picky(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def innermost(number: int, *, name: str) -> None:
    local = [number]
    raise KeyError(name, *local)


def outer() -> None:
    try:
        innermost(5, name="a name")
    except KeyError as error:
        raise Picky("this", "that") from error


def caught() -> Exception:
    try:
        outer()
    except Picky as error:
        return error
    raise AssertionError


def there_and_back(error: BaseException) -> BaseException:
    parcel: tracebacks.Parcel = pickle.loads(pickle.dumps(tracebacks.parcel(error)))
    return parcel.open()


def frames(error: BaseException) -> list[tuple[str, str, int | None, str | None]]:
    summary = traceback.extract_tb(error.__traceback__)
    return [(each.filename, each.name, each.lineno, each.line) for each in summary]


def test_frames_are_where_they_were() -> None:
    error = caught()
    opened = there_and_back(error)
    assert frames(opened) == frames(error)
    assert error.__cause__ is not None
    assert opened.__cause__ is not None
    assert frames(opened.__cause__) == frames(error.__cause__)


def test_variables_look_as_they_did() -> None:
    cause = there_and_back(caught()).__cause__
    assert cause is not None
    *_, (frame, _) = traceback.walk_tb(cause.__traceback__)
    assert {name: repr(value) for name, value in frame.f_locals.items()} == {
        "number": "5",
        "name": "'a name'",
        "local": "[5]",
    }
    code = frame.f_code
    assert (code.co_argcount, code.co_name) == (2, "innermost")
    assert code.co_firstlineno == innermost.__code__.co_firstlineno


def test_an_error_that_cannot_be_pickled_has_its_name_and_text() -> None:
    opened = there_and_back(caught())
    assert type(opened).__name__ == "Picky"
    assert type(opened).__module__ == Picky.__module__
    assert str(opened) == "this and that"
    assert type(opened) is type(there_and_back(caught()))


def test_others_are_what_they_were() -> None:
    error = KeyError("lost")
    error.add_note("look behind the sofa")
    opened = there_and_back(error)
    assert isinstance(opened, KeyError)
    assert opened.args == ("lost",)
    assert opened.__notes__ == ["look behind the sofa"]
    assert opened.__traceback__ is None


def test_a_ring_of_errors_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    opened = there_and_back(one)
    assert str(opened.__context__) == "other"
    assert opened.__context__ is not None
    assert opened.__context__.__context__ is None


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError


def show(value: object) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("value", "shown"), [(Shy(), "<Shy whose repr raises RuntimeError>"), ("x" * 1000, "'xxx")]
)
def test_values_are_shown_briefly_and_safely(value: object, shown: str) -> None:
    with pytest.raises(ValueError, match=r"^$") as raised:
        show(value)
    *_, (frame, _) = traceback.walk_tb(there_and_back(raised.value).__traceback__)
    assert repr(frame.f_locals["value"]).startswith(shown)
    assert len(repr(frame.f_locals["value"])) < 300
