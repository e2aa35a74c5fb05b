"""A rank's own program, run in this process as ``python`` would run it.

The keeper of a job calls `run` in a process that it has forked. What ends the program is reported
to the launcher, which knows better than the rank what deserves to be printed: the others fail as
well when one does.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

# What ``python -m`` itself calls: unlike runpy's public functions it leaves the module in place.
_run_module = runpy._run_module_as_main  # type: ignore[attr-defined]

_HERE = (__file__, runpy.__file__, "<frozen runpy>")


def run(program: str, arguments: list[str], kind: str, report: int) -> int:
    """Run a script or a module as ``__main__`` and return the exit code of the process.

    An exception that ends it is written to the descriptor `report`, not to stderr.
    """
    rank = os.getpid()
    sys.argv = [program, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    try:
        if kind == "module":
            with contextlib.suppress(FileNotFoundError):  # a working directory that is gone
                _look_first_in(os.getcwd())
            _run_module(program)
        elif kind == "archive":  # or a directory
            _look_first_in(program)
            _run_module("__main__", False)
        else:
            _look_first_in(str(Path(program).resolve().parent))
            _run_script(os.path.abspath(program), main)
    except SystemExit as exit:
        return _exit_code(exit)
    except BaseException as error:
        error.__traceback__ = _own(error.__traceback__)
        # What a process that the rank has forked dies of is not the rank's.
        return _report(error, report if os.getpid() == rank else None)
    return 0


def _look_first_in(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _run_script(path: str, main: ModuleType) -> None:
    main.__file__ = path
    main.__dict__.update(__cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _report(error: BaseException, report: int | None) -> int:
    """Tell the launcher of an uncaught exception, and Python's own hooks as well."""
    kind, trace = type(error), error.__traceback__
    # Python does so as well; what runs at exit looks there to tell an accident from an end.
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    hook = sys.excepthook
    # Torch's adds the rank to every line, which the launcher does.
    known = hook is sys.__excepthook__ or hook.__module__.startswith("torch.distributed")
    if report is None or not known:
        try:
            hook(kind, error, trace)
        except BaseException:
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()
    interrupted = isinstance(error, KeyboardInterrupt)
    if report is not None:
        record = {
            "when": time.monotonic(),
            "error": traceback.format_exception_only(kind, error)[-1].strip().partition("\n")[0],
            "traceback": _story(error),
            # Told by its name: a program that has not imported the package need not do so now.
            "echo": any(base.__name__ == "PeerFailed" for base in kind.__mro__),
            "interrupted": interrupted,
            "where": _where(trace),
        }
        with open(report, "w", closefd=False) as file:
            file.write(json.dumps(record) + "\n")
    return 128 + signal.SIGINT if interrupted else 1


def _story(error: BaseException) -> str:
    """Format the error, leaving out the package's own frames where they explain nothing."""
    if "phalanx.errors" in sys.modules:
        from phalanx.launch.outcomes import story

        return story(error)
    return "".join(traceback.format_exception(error))


def _where(trace: TracebackType | None) -> str:
    """Say where the program was: in the last of its own lines, not in a library's."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    for frame in (own or frames)[-1:]:
        return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def _own(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that run the program: what the user wrote comes after them."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _HERE:
        trace = trace.tb_next
    return trace
