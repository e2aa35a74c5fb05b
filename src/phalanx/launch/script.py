"""A rank's own program, run in this process as ``python`` would run it.

``python -m phalanx.launch.script`` is not a command: the keeper of a job calls `run` in a process
that it has forked. What ends the program is reported to the launcher, which knows better than the
rank what deserves to be printed: the others fail as well when one does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

_HERE = (__file__, runpy.__file__, "<frozen runpy>")


def run(program: str, arguments: list[str], module: bool, report: int) -> int:
    """Run a script or a module as ``__main__`` and return the exit code of the process.

    An exception that ends it is written to the descriptor `report`, not to stderr.
    """
    sys.argv = [program, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_script(program)
    except SystemExit as exit:
        return _exit_code(exit)
    except BaseException as error:
        return _report(error, report)
    return 0


def _run_script(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(path).resolve().parent))
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__.update(__builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _report(error: BaseException, report: int) -> int:
    """Tell the launcher of an uncaught exception, and Python's own hooks as well."""
    error.__traceback__ = _own(error.__traceback__)
    kind, trace = type(error), error.__traceback__
    # Python does so as well; what runs at exit looks there to tell an accident from an end.
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(kind, error, trace)
    record = {
        "when": time.monotonic(),
        "error": traceback.format_exception_only(kind, error)[-1].strip().partition("\n")[0],
        "traceback": _story(error),
        # Told by its name: a program that has not imported the package need not do so now.
        "echo": any(base.__name__ == "PeerFailed" for base in kind.__mro__),
        "interrupted": isinstance(error, KeyboardInterrupt),
    }
    with open(report, "w", closefd=False) as file:
        json.dump(record, file)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _story(error: BaseException) -> str:
    """Format the error, leaving out the package's own frames where they explain nothing."""
    if "phalanx.errors" in sys.modules:
        from phalanx.launch.outcomes import story

        return story(error)
    return "".join(traceback.format_exception(error))


def _own(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that run the program: what the user wrote comes after them."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _HERE:
        trace = trace.tb_next
    return trace
