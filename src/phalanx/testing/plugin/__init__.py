"""The pytest plugin: `@pytest.mark.world(4)` runs the body of a test on four ranks.

Fixtures are set up once, in the main thread, and what they return is shared by the ranks. Only the
body runs on each, with a `rank` and a `world` of its own. What fails first is reported, once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from phalanx.testing.plugin import debugger, mark, reports
from phalanx.testing.plugin.arguments import RANK, WORLD, given_to, is_asked_for

if TYPE_CHECKING:
    from phalanx.testing.handle import WorldHandle


@pytest.fixture(scope="session")
def rank() -> int:
    """The number of the rank that runs the body of a test marked with `world`."""
    return RANK  # type: ignore[return-value]


@pytest.fixture(scope="session")
def world() -> WorldHandle:
    """What the rank that runs the body of a test marked with `world` knows of its world."""
    return WORLD  # type: ignore[return-value]


@pytest.fixture(name=mark.SIZE)
def _world_size(request: pytest.FixtureRequest) -> Any:
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("phalanx", "tests on several ranks").addoption(
        "--world-seed",
        type=int,
        metavar="N",
        help="run tests marked with world(..., interleavings=...) under the schedule of this seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", mark.HELP)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    node = metafunc.definition
    if mark.marker(node) is None:
        return
    sizes = mark.sizes(node)
    if sizes is not None:
        metafunc.fixturenames.append(mark.SIZE)
        metafunc.parametrize(mark.SIZE, sizes, indirect=True, ids=[f"world{n}" for n in sizes])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if mark.marker(item) is None:
        return
    if type(item).runtest is not pytest.Function.runtest:
        pytest.fail(
            f"{item.nodeid} is marked with world, but is not a plain test function: methods of "
            "unittest.TestCase and items of other plugins cannot run on ranks. Write it as a "
            "function, or call phalanx.testing.run_ranks in it",
            pytrace=False,
        )
    mark.check_body(item, cast(pytest.Function, item).function)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    __tracebackhide__ = True
    asked = mark.of(pyfuncitem)
    if asked is None:
        if name := is_asked_for(pyfuncitem):
            mark.require(pyfuncitem, name)
        return None
    runner = importlib.import_module(f"phalanx.testing.plugin.in_{asked.ranks}")
    runner.run(pyfuncitem, asked, given_to(pyfuncitem))
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    is_marked = item.get_closest_marker("world") is not None
    if call.excinfo and not is_marked:
        reports.hint(call.excinfo.value, None)
    outcome: Any = yield
    if call.when == "call" and call.excinfo and is_marked:
        reports.shape(outcome.get_result(), call.excinfo)


def pytest_enter_pdb(config: pytest.Config, pdb: Any) -> None:
    debugger.entered(pdb)


def pytest_leave_pdb(config: pytest.Config, pdb: Any) -> None:
    debugger.left()
