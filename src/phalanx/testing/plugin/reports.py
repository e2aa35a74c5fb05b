"""How the failure of a world is told in pytest's report."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from phalanx.launch.outcomes import Failure
    from phalanx.testing.plugin.mark import WorldMark

# What says how a test is to be counted, and not that it failed.
_WISHES = (pytest.skip.Exception, pytest.xfail.Exception)
# What ends the whole run of pytest.
_ENDS = (pytest.exit.Exception, KeyboardInterrupt)

# What may be raised about a test without having passed through its body.
_FROM_OUTSIDE = (RuntimeError, ValueError, Warning, pytest.fail.Exception)

_WHO = re.compile(r"^raised by (ranks? .+ of \d+)$", re.MULTILINE)


def choose(error: BaseException, failures: Sequence[Failure], size: int) -> BaseException:
    """Return what to report: `error`, the first of the failures, unless another counts more."""
    from phalanx.launch.outcomes import first_real

    for failure in failures:
        if isinstance(failure.error, _ENDS):
            vars(failure.error).pop("__notes__", None)  # it is shown on one line
            return failure.error
    if isinstance(error.__cause__, SystemExit):  # pytest itself knows how to tell of an exit
        error.__cause__.__notes__ = getattr(error, "__notes__", [])
        return error.__cause__
    if isinstance(error, _WISHES):
        real = [each for each in failures if not (each.is_echo or isinstance(each.error, _WISHES))]
        if real:
            return first_real(real, size)
        vars(error).pop("__notes__", None)  # their reason is shown on one line
    return error


# What may be a mistake of the package, or of torch, itself: where it was made explains it.
_MISTAKES = (AssertionError, AttributeError, LookupError, NameError)


def begin_in_program(error: BaseException) -> BaseException:
    """Leave frames of this package and of torch out of an error's traceback.

    What they diagnose is about the program that called them.
    """
    from phalanx.launch.outcomes import is_ours

    frames = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    files = [each.tb_frame.f_code.co_filename for each in frames]
    program = [each for each, file in zip(frames, files, strict=True) if not is_ours(file)]
    if not program:
        return error
    if not isinstance(error, _MISTAKES):
        inner = [each for each, file in zip(frames, files, strict=True) if not _is_below(file)]
        if inner:
            inner[-1].tb_next = None
    return error.with_traceback(program[0])


def _is_below(filename: str) -> bool:
    """Say whether code in a file is what programs call."""
    from phalanx.launch.outcomes import is_ours

    torch = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    return is_ours(filename) or filename.startswith((torch, contextlib.__file__))


def hint(error: BaseException, world: WorldMark | None) -> None:
    """Say what to write in the mark, if an error says what to write in a program."""
    said = str(error)
    if world and not world.torch and said.startswith("Default process group has not been init"):
        missing = (
            "this test runs on ranks of phalanx; if its code calls torch.distributed, mark it with "
            f"@pytest.mark.world({world.size}, torch=True)"
        )
    elif world is None and said.startswith("the default process group has not been init"):
        missing = "a test that is to run on ranks is marked with @pytest.mark.world(4)"
    elif world and not world.torch and "init_process_group(timeout=...)" in said:
        missing = f"in a marked test: @pytest.mark.world({world.size}, group_timeout=...)"
    else:
        return
    from phalanx.launch.outcomes import label

    label(error, missing)


def warn_of_result(item: pytest.Item) -> None:
    """Warn of a test that returned something."""
    item.warn(
        pytest.PytestReturnNotNoneWarning(
            f"{item.nodeid} returned a value on a rank: tests return None. "
            "Did you mean to use `assert` instead of `return`?"
        )
    )


def _labels(error: BaseException | None) -> Iterator[str]:
    """Yield what may say whose error it is: notes, or a cause where Python has no notes."""
    while error is not None:
        yield from getattr(error, "__notes__", [])
        if sys.version_info < (3, 11):
            yield str(error)
        error = error.__cause__ or error.__context__


def shape(report: pytest.TestReport, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Put the rank into the short summary; leave out frames if none is of the test."""
    if report.outcome != "failed":
        return
    path = str(report.fspath)
    if isinstance(excinfo.value, _FROM_OUTSIDE) and not any(
        str(entry.path).endswith(path) for entry in excinfo.traceback
    ):
        told: Any = excinfo.getrepr(style="value")  # which leaves out notes
        notes = [each for each in _labels(excinfo.value) if not _WHO.search(each)]
        told.reprtraceback.reprentries[-1].lines += "\n".join(notes).splitlines()
        report.longrepr = told
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return
    crash.message = crash.message.removeprefix("phalanx.errors.")
    if who := _WHO.search("\n".join(_labels(excinfo.value))):
        crash.message = f"{who[1]}: {crash.message}"
