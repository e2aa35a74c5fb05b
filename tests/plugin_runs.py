"""Running pytest, with the plugin, on tests that a test has written."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

# Imported here, so that runs within this process find them and do not import them anew.
import phalanx.debug.breakpoints
import phalanx.testing.plugin
import phalanx.testing.plugin.in_threads

IS_INSTALLED = any(each.name == "phalanx" for each in entry_points(group="pytest11"))
# Where the package is only on the path, nobody tells pytest of the plugin.
PLUGIN = [] if IS_INSTALLED else ["-p", phalanx.testing.plugin.__name__]
# What another plugin imports anew in each run, and what pytest says of modules imported before it.
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
OPTIONS += ["-W", "default", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
HEAD = "import pytest, sys, threading, torch\nimport phalanx as dist\n\n"


def run(pytester, source, *arguments):
    """Run tests in this process; return what pytest printed, and what became of them."""
    pytester.makepyfile(test_one=HEAD + source)
    return pytester.runpytest_inprocess(*PLUGIN, *OPTIONS, *arguments)


def run_apart(pytester, monkeypatch, source, *arguments, stdin=b""):
    """Run tests in a process of its own."""
    pytester.makepyfile(test_one=HEAD + source)
    monkeypatch.setenv("PYTHONPATH", str(Path(phalanx.__file__).parents[1]), os.pathsep)
    command = [sys.executable, "-m", "pytest", *PLUGIN, *OPTIONS, *arguments]
    return pytester.run(*command, stdin=stdin)


def summary(result):
    """Return the lines of the short summary."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if "short test summary" in line)
    return [line for line in lines[start + 1 :] if line and line[0] not in "=!"]
