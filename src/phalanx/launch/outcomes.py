"""What became of the ranks of a launched world, told to whoever launched it."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import phalanx
from phalanx import _native
from phalanx.errors import DistBackendError, DistError, DistTimeout, PeerFailed

# How long the others may take to end by themselves once a rank has failed.
GRACE = 5.0

_PACKAGE = os.path.dirname(os.path.abspath(phalanx.__file__)) + os.sep


# What a rank is told that comes to an operation of which others have despaired.
_GIVEN_UP = re.compile(r" was given up; rank \d+ is in ")


class Killed(BaseException):
    """Ends a rank that a test kills on purpose, which is nobody's failure."""


# Told of the Failure of a rank that is about to be killed on purpose, if its launcher listens.
last_word: Callable[[Failure], None] = lambda failure: None  # noqa: E731


@dataclass(frozen=True)
class Failure:
    """How one rank failed; `when` is comparable between the processes of a machine."""

    rank: int
    error: BaseException
    traceback: str = ""  # as text, where the frames could not travel with the error
    from_outside: bool = False  # the error is about the rank, which did not raise it itself
    when: float = field(default_factory=time.monotonic)

    @property
    def is_echo(self) -> bool:
        """Whether the rank only reports that another one failed."""
        text = str(self.error).partition("\n")[0]
        was_given_up = isinstance(self.error, DistBackendError) and _GIVEN_UP.search(text)
        return isinstance(self.error, PeerFailed) or bool(was_given_up)

    @property
    def is_wanted(self) -> bool:
        """Whether a test has ended the rank on purpose."""
        return isinstance(self.error, Killed)

    def __str__(self) -> str:
        text = str(self.error).partition("\n")[0]
        return f"{type(self.error).__name__}: {text}" if text else type(self.error).__name__


def story(error: BaseException) -> str:
    """Format an error as Python prints it, with frames of this package only if they may explain it.

    What the package itself diagnoses is about the program that called it.
    """
    told = traceback.TracebackException.from_exception(error)
    frames = _without_launcher(told.stack)
    while frames and isinstance(error, DistError) and is_ours(frames[-1].filename):
        del frames[-1]
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format())


def stack_of_program(frame: FrameType | None) -> str:
    """Format where a thread of a rank stands, from where the program begins."""
    return "".join(
        traceback.StackSummary.from_list(_without_launcher(traceback.extract_stack(frame))).format()
    )


def _without_launcher(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    frames = list(stack)
    while frames and is_ours(frames[0].filename):
        del frames[0]
    return frames


def is_ours(filename: str) -> bool:
    """Say whether code in a file is what runs the program, rather than the program."""
    return filename.startswith((_PACKAGE, threading.__file__))


def as_error(error: BaseException) -> BaseException:
    """Turn the wish of a rank to exit into an error: its launcher must not obey it."""
    if not isinstance(error, SystemExit):
        return error
    exited = DistError(f"sys.exit({'' if error.code is None else repr(error.code)}) was called")
    exited.__cause__ = error
    return exited


def reason(failure: Failure) -> str:
    """Say how a rank failed, to its peers; what it only heard from another is passed on."""
    if failure.is_echo:
        return f"gave up because of another rank:\n{failure.error}"
    if failure.is_wanted:
        return str(failure.error)
    text = failure.traceback or story(failure.error)
    return f"raised an exception\n{text.rstrip()}"


def overdue(stacks: dict[int, str], size: int, deadline: float) -> list[Failure]:
    """Fail the ranks that did not return in time, saying where each of them stands."""
    places = "".join(f"\n  rank {rank}:\n{stacks[rank].rstrip()}" for rank in sorted(stacks))
    error = DistTimeout(
        f"{spell(stacks)} of {size} did not return within {deadline:g} s; "
        f"look for what each of them waits for:{places}"
    )
    return [Failure(rank, error, from_outside=True) for rank in sorted(stacks)]


def settle(results: list[Any], failures: list[Failure], return_exceptions: bool) -> list[Any]:
    """Return the results by rank, or raise the first real failure, labelled with its rank.

    The failures of ranks that only heard of another's do not count as real unless there is no
    other; a rank that a test has killed on purpose has not failed, and its result is None. With
    `return_exceptions` nothing is raised: each failed rank's error is its result.
    """
    __tracebackhide__ = True
    if return_exceptions:
        for failure in failures:
            results[failure.rank] = failure.error
        return results
    if not all(failure.is_wanted for failure in failures):
        raise first_real(failures, len(results))
    return results


def spell(ranks: Iterable[int]) -> str:
    """Name ranks briefly: "rank 3", "ranks 0-2, 5"."""
    return _native.rank_list(sorted(ranks))


def first_real(failures: list[Failure], size: int) -> BaseException:
    """Return the error of the first real failure, labelled with its rank and with the others."""
    failures = [failure for failure in failures if not failure.is_wanted]
    real = [failure for failure in failures if not failure.is_echo] or failures
    together, *others = _alike(real)
    first = together[0]
    lines = [] if first.from_outside else [f"raised by {_ranks(together)} of {size}"]
    lines += [f"also failed: {_ranks(each)}: {each[0]}" for each in others]
    if first.from_outside:  # it could not speak for itself: those who waited for it can
        heard = _alike(failure for failure in failures if failure.is_echo)
        lines += [f"seen by {_ranks(each)}: {each[0].error}" for each in heard]
    if first.traceback:
        said = "".join(traceback.format_exception_only(first.error))
        # In a new process the main module has another name.
        where = first.traceback.removesuffix(f"__mp_main__.{said}").removesuffix(said)
        if "\n" in where.strip():  # more than a headline
            lines.append(f"on rank {first.rank}:\n{where.rstrip()}")
    if lines:
        label(first.error, "\n".join(lines))
    return first.error


def _alike(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Sort failures by what happened, the earliest first, and each by rank."""
    parties: dict[tuple[type, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.when):
        text = str(failure.error)
        if isinstance(failure.error, DistError):
            # The first line says what the rank itself did; times depend on when it was woken.
            text = re.sub(r"\d+(\.\d+)? (ms|s|min)\b", "", text.partition("\n")[2]) or text
        parties.setdefault((type(failure.error), text), []).append(failure)
    return [sorted(party, key=lambda failure: failure.rank) for party in parties.values()]


def _ranks(failures: list[Failure]) -> str:
    return spell(failure.rank for failure in failures)


_remarks: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def remark(world: Any, text: str) -> None:
    """Have a text be printed with whatever error ends this rank's world."""
    _remarks.setdefault(world, []).append(text)


def add_remarks(world: Any, error: BaseException) -> BaseException:
    """Print with an error what was remarked on the world that it ends."""
    for text in _remarks.get(world, []) if world is not None else []:
        if text not in getattr(error, "__notes__", []):
            label(error, text)
    return error


def label(error: BaseException, text: str) -> None:
    """Have a text be printed with an error."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:  # no notes there: what is printed above an error is its innermost cause
        while error.__cause__ or error.__context__:
            error = error.__cause__ or error.__context__
        error.__cause__ = DistError(text)
