"""The process of a rank that runs the bodies of tests.

It is started once with the options that pytest was started with, so that the conftest files and the
plugins are there and assertions are rewritten; then it runs what it is sent.
"""

from __future__ import annotations

import bdb
import copy
import faulthandler
import importlib
import io
import logging
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from phalanx import world
from phalanx.launch import tracebacks
from phalanx.launch.outcomes import Failure, reason, story
from phalanx.launch.parcels import pack
from phalanx.launch.start_state import set_random_state
from phalanx.testing.handle import WorldHandle
from phalanx.testing.plugin import console

STREAMS = {"stdout": 1, "stderr": 2}

# What pytest raises to say how a test is to be counted; these cannot be pickled.
OUTCOMES: dict[str, Any] = {
    each.__name__: each
    for each in (
        pytest.skip.Exception,
        pytest.fail.Exception,
        pytest.xfail.Exception,
        pytest.exit.Exception,
    )
}


_FAILURES = (Exception, pytest.fail.Exception)


@dataclass(frozen=True)
class Body:
    """What a rank is to run, and in what surroundings."""

    path: Path  # of the module
    owner: str  # the class that has the function, "" if it is the module
    name: str
    nodeid: str
    size: int
    own: frozenset[str]  # which of `rank` and `world` it takes
    arguments: bytes
    attributes: bytes  # of the instance
    marks: list[pytest.Mark]
    random: tuple[Any, Any] | None  # where the streams of torch and NumPy, and `random`, start
    log_level: int
    directory: str  # for what it writes
    debugs: bool  # its failure, in pdb
    traces: bool  # it from its first line on, on rank 0
    torch_backend: str  # of torch.distributed's default group, "" if it is Phalanx that has one
    group_timeout: timedelta | None


class Issued(NamedTuple):
    """A warning that was recorded."""

    message: str
    category: bytes
    filename: str
    line: int


class Answer(NamedTuple):
    """What became of a body."""

    has_returned: bool  # something else than None
    warnings: list[Issued]


class Raised(Exception):
    """The body has raised an error, which is told here in a way that can travel."""

    def __init__(self, kind: str, details: Any, when: float, issued: list[Issued]) -> None:
        super().__init__(kind, details, when, issued)
        self.kind, self.when, self.warnings = kind, when, issued
        self._details = details

    def open(self) -> BaseException:
        """Return the error."""
        if self.kind in OUTCOMES:
            message, attributes, origin = self._details
            error: BaseException = OUTCOMES[self.kind](message)
            vars(error).update(attributes)
            return error.with_traceback(origin.open().__traceback__)
        opened: BaseException = self._details.open()
        return opened


def serve_in_pytest(arguments: list[str], directory: str, serve: Callable[[], None]) -> None:
    """Serve inside of a pytest that was started with the given arguments, in a directory."""
    os.chdir(directory)
    plugin = _Plugin(serve)
    code = pytest.main(arguments, plugins=[plugin])
    if not plugin.has_served:
        raise RuntimeError(
            f"pytest does not start in the process of a rank (exit code {int(code)}, "
            f"arguments {arguments})"
        )


class _Plugin:
    """Has pytest serve ranks instead of running tests."""

    def __init__(self, serve: Callable[[], None]) -> None:
        self._serve = serve
        self.has_served = False
        self._work: Callable[[], Any] = lambda: None
        self._issued: list[Issued] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        global _here
        _here = self
        self._session = pytest.Session.from_config(config)
        conftests = filter(is_conftest, config.pluginmanager.get_plugins())
        self._hook("pytest_configure", *conftests).call_historic(kwargs={"config": config})
        self.has_served = True
        self._serve()
        return 0

    @cache  # noqa: B019 (there is one)
    def module(self, path: Path) -> pytest.Module:
        """Return the test module of a file, imported as pytest imports it."""
        module: pytest.Module = pytest.Module.from_parent(self._session, path=path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the main process has imported it, and told of them
            _ = module.obj
        return module

    def call(self, body: Body, work: Callable[[], Any]) -> tuple[Any, list[Issued]]:
        """Call something with assertions and warnings as in a test, and return the warnings too."""
        item = _Item.from_parent(self.module(body.path), name=body.name, nodeid=body.nodeid)
        item.own_markers.extend(body.marks)
        issued: list[Issued] = []
        self._issued = issued
        results: list[Any] = []
        self._work = lambda: results.append(work())
        get = self._session.config.pluginmanager.get_plugin
        protocol = self._hook("pytest_runtest_protocol", self, get("assertion"), get("warnings"))
        protocol(item=item, nextitem=None)
        return results[0], issued

    def _hook(self, name: str, *callees: object) -> Any:
        """Return a hook of these plugins alone: what others do, they do in the main process."""
        plugins = self._session.config.pluginmanager
        return plugins.subset_hook_caller(name, plugins.get_plugins() - set(callees))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: object) -> bool:
        self._work()
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        try:
            category = pack(warning_message.category)
        except TypeError:
            category = pack(UserWarning)
        where = warning_message.filename, warning_message.lineno
        self._issued.append(Issued(str(warning_message.message), category, *where))


def is_conftest(plugin: object) -> bool:
    """Say whether a plugin is a conftest file."""
    return Path(getattr(plugin, "__file__", None) or "").name == "conftest.py"


class _Item(pytest.Item):
    """A test, as plugins know it that look after one."""

    def runtest(self) -> None:
        raise NotImplementedError("its body is called by who makes it")


_here: _Plugin | None = None


def run(*told: Any) -> Answer:
    """Be a rank that runs the body of a test, the last that it is told."""
    plugin = _here
    assert plugin is not None
    rank, body = int(os.environ["RANK"]), cast(Body, told[-1])
    with _written_down(body.directory, rank, body.log_level), console.at_hand(rank) as debugger:
        work = _Work(body, plugin, rank, debugger)
        result, issued = plugin.call(body, work.do)
        if work.error is not None:
            raise work.told(issued)
    return Answer(result is not None, issued)


class _Work:
    """Calls the body, and tells of its error."""

    def __init__(self, body: Body, plugin: _Plugin, rank: int, debugger: Any) -> None:
        self._body, self._plugin, self._rank, self._debugger = body, plugin, rank, debugger
        self.error: BaseException | None = None
        self._when = 0.0

    def do(self) -> Any:
        body = self._body
        try:
            with ExitStack() as stack:
                if body.torch_backend:
                    stack.enter_context(_torch_group(body, self._rank))
                function, given = self._prepare(stack)
                if body.traces and self._rank == 0:
                    return self._debugger.runcall(function, **given)
                return function(**given)
        except BaseException as error:
            self._when = time.monotonic()
            self.error = error
            # The others are not to wait while somebody looks into this.
            failure = Failure(self._rank, error, story(error))
            world.current_slot().fail(reason(failure))
            is_real = isinstance(error, _FAILURES) and not failure.is_echo
            if body.debugs and is_real:
                console.post_mortem(self._rank, error, failure.traceback)

    def _prepare(self, stack: ExitStack) -> tuple[Callable[..., Any], dict[str, Any]]:
        body = self._body
        owner: Any = self._plugin.module(body.path).obj
        if body.owner:
            for name in body.owner.split("."):
                owner = getattr(owner, name)
            owner = owner()
            vars(owner).update(pickle.loads(body.attributes))
        given = pickle.loads(body.arguments)
        for name, value in given.items():
            if isinstance(value, StandIn):
                given[name] = stack.enter_context(_STAND_INS[value.kind](body, self._rank))
        if "rank" in body.own:
            given["rank"] = self._rank
        if "world" in body.own:
            given["world"] = WorldHandle(self._rank, body.size, "processes")
        if body.random is not None:
            set_random_state(body.random[0])
            random.setstate(body.random[1])
        return getattr(owner, body.name), given

    def told(self, issued: list[Issued]) -> Raised:
        """Return the error such that it can travel."""
        error = self.error
        assert error is not None
        if isinstance(error, bdb.BdbQuit):
            quits = pytest.exit.Exception("Quitting debugger")
            error = quits.with_traceback(error.__traceback__)
        kind = type(error).__name__
        if isinstance(error, OUTCOMES.get(kind, ())):
            origin = tracebacks.parcel(Exception().with_traceback(error.__traceback__))
            attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
            return Raised(kind, (error.msg, attributes, origin), self._when, issued)
        return Raised("", tracebacks.parcel(error), self._when, issued)


@contextmanager
def _torch_group(body: Body, rank: int) -> Iterator[None]:
    """Make the default group of torch.distributed; what is left after an error is not reused."""
    dist = importlib.import_module("phalanx.torch_backend.theirs").dist
    store = dist.FileStore(str(Path(body.directory, "store")), body.size)
    dist.init_process_group(
        body.torch_backend,
        store=store,
        rank=rank,
        world_size=body.size,
        timeout=body.group_timeout,
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class StandIn(NamedTuple):
    """Stands for a fixture's value that each rank has its own of."""

    kind: str


class _Output(NamedTuple):
    out: Any
    err: Any


class _Capture:
    """What capsys and capfd are on a rank: both read all that the process has written."""

    def __init__(self, body: Body, rank: int, is_binary: bool) -> None:
        self._paths = [Path(body.directory, f"{name}{rank}") for name in STREAMS]
        self._is_binary = is_binary

    def readouterr(self) -> _Output:
        """Return, and forget, what the rank has written."""
        _flush()
        read = []
        for path in self._paths:
            read.append(path.read_bytes() if self._is_binary else path.read_text(errors="replace"))
            os.truncate(path, 0)
        return _Output(*read)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        raise RuntimeError("a rank that is a process cannot turn capturing off: use pytest -s")
        yield


@contextmanager
def _capture(body: Body, rank: int, is_binary: bool = False) -> Iterator[_Capture]:
    yield _Capture(body, rank, is_binary)


_STAND_INS: dict[str, Callable[[Body, int], Any]] = {
    "monkeypatch": lambda body, rank: pytest.MonkeyPatch.context(),
    "capture": _capture,
    "binary capture": lambda body, rank: _capture(body, rank, True),
}


@contextmanager
def _written_down(directory: str, rank: int, level: int) -> Iterator[None]:
    """Have what the process writes, and logs, go to files of that directory."""
    handler = _ToFile(Path(directory, f"log{rank}"))
    logging.root.addHandler(handler)
    logging.root.setLevel(level)
    _flush()
    saved = {name: (os.dup(number), getattr(sys, name)) for name, number in STREAMS.items()}
    try:
        for name, number in STREAMS.items():
            file = os.open(Path(directory, f"{name}{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
            # Without a buffer: what is written must be there even if the process dies.
            raw: Any = io.FileIO(number, "wb", closefd=False)
            text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
            setattr(sys, name, text)
        faulthandler.enable(STREAMS["stderr"])  # a crash says where it happened
        yield
    finally:
        faulthandler.disable()
        _flush()
        for name, number in STREAMS.items():
            before, stream = saved[name]
            os.dup2(before, number)
            os.close(before)
            setattr(sys, name, stream)
        logging.root.removeHandler(handler)
        handler.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


class _ToFile(logging.Handler):
    """Writes log records down such that another process can format them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        told = copy.copy(record)
        told.msg, told.args = record.getMessage(), None
        if told.exc_info:
            told.exc_text = logging.Formatter().formatException(told.exc_info)
            told.exc_info = None
        simple = {name: value for name, value in vars(told).items() if _is_plain(value)}
        self._file.write(pickle.dumps(simple))

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def logged(path: Path) -> Iterator[logging.LogRecord]:
    """Read the log records that a rank has written down."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            try:
                yield logging.makeLogRecord(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # it may have died while it wrote
                return
