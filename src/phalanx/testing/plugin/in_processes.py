"""Run the body of a test on ranks that are processes, kept warm from test to test."""

from __future__ import annotations

import logging
import os
import pickle
import random
import selectors
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from phalanx import bystanders
from phalanx.launch import processes
from phalanx.launch.life import Group
from phalanx.launch.outcomes import Failure, as_error, first_real, story
from phalanx.launch.output import Screen, Speaker
from phalanx.launch.parcels import pack
from phalanx.launch.pool import Pool
from phalanx.launch.start_state import random_state
from phalanx.testing.plugin import console, output, reports
from phalanx.testing.plugin.arguments import of_ranks
from phalanx.testing.plugin.mark import WorldMark
from phalanx.testing.plugin.rank_process import (
    STREAMS,
    Answer,
    Body,
    Issued,
    Raised,
    StandIn,
    is_conftest,
    logged,
    serve_in_pytest,
)
from phalanx.testing.plugin.rank_process import (
    run as run_body,
)
from phalanx.types import seconds

_POOL = pytest.StashKey[Pool]()
_INTERRUPTED = 0.5  # seconds that ranks have to say where they were
_CRASH = "Fatal Python error: "  # what faulthandler begins with


def run(item: pytest.Function, world: WorldMark, arguments: dict[str, Any]) -> None:
    """Run the body once on each rank; raise the first real failure."""
    __tracebackhide__ = True
    pool = _pool(item.config)
    terminal = console.Terminal(item.config, world.size)
    directory = tempfile.mkdtemp(prefix="test-", dir=pool.directory)
    body = _body(item, world, arguments, directory)
    task = processes.pack_task(run_body, (body,))
    group = None if world.torch else Group(world.backend, world.group_timeout)
    failures: list[Failure] = []
    try:
        with (
            _output(item, arguments, directory, world.size, failures),
            pool.ranks(world.size, task, group, terminal.hear) as ranks,
        ):
            try:
                ranks.see_through(None if body.traces else world.timeout, False)
            except pytest.fail.Exception as error:  # somebody else's limit, of pytest-timeout say
                error.msg = f"{error.msg}\n{_places(ranks)}"
                raise
            except KeyboardInterrupt:
                _tell_where(item, ranks, terminal)
                raise
            failures += [_opened(each) for each in ranks.failures if not each.is_wanted]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    answers = [each for each in ranks.results if isinstance(each, Answer)]
    told = [each.error for each in ranks.failures if isinstance(each.error, Raised)]
    _warn(item, [each.warnings for each in answers] + [each.warnings for each in told])
    if failures:
        raise _error(item, failures, world, terminal)
    if any(each.has_returned for each in answers):
        reports.warn_of_result(item)


def _places(ranks: processes.Processes) -> str:
    """Say where ranks that still run stand."""
    return "\n".join(
        f"rank {each.rank}:\n{each.where()}" for each in ranks.ranks if each in ranks.running
    )


def _tell_where(
    item: pytest.Function, ranks: processes.Processes, terminal: console.Terminal
) -> None:
    """Print where ranks stood when the user interrupted them, who may wonder what they wait for."""
    if all(each.has_begun for each in ranks.running):
        ranks.wait(_INTERRUPTED, patient=True)  # from a terminal they are interrupted, too
    stories = [(each.rank, story(_opened(each).error)) for each in ranks.failures]
    stories += [(each.rank, each.where()) for each in ranks.running]
    reporter: Any = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    with terminal.uncaptured():
        reporter.ensure_newline()
        for rank, text in sorted(stories):
            reporter.write_line(f"rank {rank} of {len(ranks.ranks)} was here:\n{text.rstrip()}")


def _pool(config: pytest.Config) -> Pool:
    """Return the warm processes of this run of pytest, which end with it."""
    if _POOL not in config.stash:
        inside = partial(serve_in_pytest, _arguments(config), str(config.invocation_params.dir))
        pool = config.stash[_POOL] = Pool(inside)
        config.add_cleanup(pool.close)
        console.take_over(config)
    return config.stash[_POOL]


def _arguments(config: pytest.Config) -> list[str]:
    """Return what to start pytest with such that it imports as this one does."""
    conftests = filter(is_conftest, config.pluginmanager.get_plugins())
    places = {str(Path(str(each.__file__)).parent) for each in conftests}
    given = [str(each) for each in config.invocation_params.args]
    settled = [f"--rootdir={config.rootpath}", "--capture=no"]
    # What had to be imported early there has been told of here.
    settled += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if config.inipath is not None:
        settled += ["-c", str(config.inipath)]
    return [*given, *settled, *sorted(places)]


def _body(
    item: pytest.Function, world: WorldMark, arguments: dict[str, Any], directory: str
) -> Body:
    module = item.getparent(pytest.Module)
    assert module is not None
    limit = world.group_timeout
    instance = vars(item.instance) if item.cls else {}
    return Body(
        path=module.path,
        owner=item.cls.__qualname__ if item.cls else "",
        name=item.originalname,
        nodeid=item.nodeid,
        size=world.size,
        own=frozenset(of_ranks(item)),
        arguments=_packed(item, "fixture", _for_ranks(arguments)),
        attributes=_packed(item, "attribute", instance),
        marks=list(item.iter_markers("filterwarnings")),
        random=(random_state(), random.getstate()) if world.rng else None,
        log_level=logging.root.level,
        directory=directory,
        debugs=item.config.getoption("usepdb"),
        traces=item.config.getoption("trace"),
        torch_backend=world.backend if world.torch else "",
        group_timeout=None if limit is None else timedelta(seconds=seconds(limit)),
    )


def _for_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace values that each rank has its own of."""
    replaced = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, pytest.MonkeyPatch):
            replaced[name] = StandIn("monkeypatch")
        elif isinstance(value, pytest.CaptureFixture):
            replaced[name] = StandIn("binary capture" if name.endswith("binary") else "capture")
        elif isinstance(value, pytest.TempPathFactory):
            value.getbasetemp()  # made before it travels: each rank would clear it
    return replaced


def _packed(item: pytest.Function, what: str, values: dict[str, Any]) -> bytes:
    try:
        if not any(isinstance(value, pytest.WarningsRecorder) for value in values.values()):
            return pack(values)
    except TypeError:
        pass
    problems = {name: problem for name, value in values.items() if (problem := _problem(value))}
    name, problem = next(iter(problems.items()))
    pytest.fail(
        f"the {what} {name!r} of {item.nodeid}, of type {type(values[name]).__name__}, cannot be "
        f"sent to ranks that are processes: {problem}\n"
        "thread ranks share all values: @pytest.mark.world(..., ranks='threads')",
        pytrace=False,
    )


def _problem(value: object) -> str:
    """Say why a value cannot travel, "" if it can."""
    try:
        if not isinstance(value, pytest.WarningsRecorder):  # a copy of which records nothing
            pack(value)
            return ""
    except TypeError as error:
        problem = str(error)
    if getattr(value, "__module__", "").startswith("_pytest."):
        return (
            "it is part of the pytest that runs in the main process\nof pytest's own fixtures they "
            "have monkeypatch, capsys, capfd and their kin, tmp_path and tmp_path_factory"
        )
    return f"{problem}\nmake it in the body, or make it of what can be pickled"


@contextmanager
def _output(
    item: pytest.Function,
    arguments: dict[str, Any],
    directory: str,
    size: int,
    failures: list[Failure],
) -> Iterator[None]:
    """Add what ranks write to the test's report, or show it at once where nothing is captured."""
    reads = any(isinstance(value, pytest.CaptureFixture) for value in arguments.values())
    shows = not reads and item.config.getoption("capture") in ("no", "tee-sys")
    try:
        if shows:
            with _shown(directory, size):
                yield
        else:
            yield
    finally:
        for rank in range(size):
            for name in () if shows else STREAMS:
                path = Path(directory, f"{name}{rank}")
                if path.exists():
                    text = path.read_text(errors="replace")
                    if _CRASH in text:
                        text = processes.of_program(text)
                    output.add_section(item, rank, name, text)
            output.add_section(item, rank, "log", _log(item, directory, rank, failures))


def _log(item: pytest.Function, directory: str, rank: int, failures: list[Failure]) -> str:
    """Format what a rank has logged, without what says of its failure what the report says."""
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    handler = getattr(plugin, "report_handler", None)  # there is none with `-p no:logging`
    if handler is None:
        return ""
    known = {f"[rank {rank}] {each}" for each in failures if each.rank == rank}
    records = logged(Path(directory, f"log{rank}"))
    return "\n".join(handler.format(each) for each in records if each.msg not in known)


@contextmanager
def _shown(directory: str, size: int) -> Iterator[None]:
    """Print what ranks write, line by line and labelled."""
    screen = Screen()
    speakers: dict[int, Speaker] = {}
    for rank in range(size):
        for name in STREAMS:
            path = Path(directory, f"{name}{rank}")
            os.mkfifo(path)
            # Opened for writing as well: so it does not end while no rank has it open.
            pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            stream = screen.output if name == "stdout" else screen.errors
            speakers[pipe] = Speaker(rank, screen, stream, None)
    wake, stop = os.pipe()
    reader = threading.Thread(target=_pass_on, args=(speakers, wake), daemon=True)
    bystanders.mark(reader).start()
    try:
        yield
    finally:
        os.close(stop)
        reader.join()
        for pipe in (*speakers, wake):
            os.close(pipe)
        screen.close(10)


def _pass_on(speakers: dict[int, Speaker], wake: int) -> None:
    with selectors.DefaultSelector() as selector:
        for pipe in (*speakers, wake):
            selector.register(pipe, selectors.EVENT_READ)
        while ready := [key.fd for key, _ in selector.select()]:
            for pipe in set(ready) - {wake}:
                speakers[pipe].write(os.read(pipe, 1 << 16))
            if ready == [wake]:  # the ranks have ended, and all is read
                break
    for speaker in speakers.values():
        speaker.end()


def _warn(item: pytest.Function, issued: list[list[Issued]]) -> None:
    """Tell pytest of the warnings that ranks have recorded, of each once."""
    for each in dict.fromkeys(chain.from_iterable(issued)):
        category = pickle.loads(each.category)
        message = warnings.WarningMessage(each.message, category, each.filename, each.line)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )


def _error(
    item: pytest.Function, failures: list[Failure], world: WorldMark, terminal: console.Terminal
) -> BaseException:
    """Return what to raise for what ranks have told of their failures."""
    if terminal.has_shown is not None:  # that one is told, whoever else has failed
        failures = [
            replace(each, when=0) if each.rank == terminal.has_shown else each for each in failures
        ]
    error = reports.choose(first_real(failures, world.size), failures, world.size)
    reports.hint(error, world)
    is_from_outside = any(each.from_outside and each.error is error for each in failures)
    if terminal.has_shown is not None or is_from_outside:  # there is no frame to look into
        setattr(error, console.SHOWN, terminal)
    return error if item.config.getoption("fulltrace") else reports.begin_in_program(error)


def _opened(failure: Failure) -> Failure:
    raised = failure.error
    if not isinstance(raised, Raised):
        return failure
    return replace(failure, error=as_error(raised.open()), traceback="", when=raised.when)
