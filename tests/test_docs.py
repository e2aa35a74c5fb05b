"""What the documents say is true: snippets run, links lead somewhere, commands and names exist."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import phalanx
from phalanx.commands import COMMANDS, describe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PLUGIN = "phalanx.testing.plugin"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")],
    key=lambda page: page.as_posix(),
)
_RUNS = re.compile(r"<!-- runs -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FAILS = re.compile(
    r"<!-- fails -->\n```python\n(.*?)^```.*?^```text\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_FENCE = re.compile(r"^(`{3,}).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)(?!`)")
_COMMAND = re.compile(r"^(?:\$ )?(phalanx [a-z]+(?![\w:]).*)$", re.MULTILINE)
_INLINE = re.compile(r"`(phalanx [a-z]+(?![\w:])[^`]*)`")
_ENTRY = re.compile(r"^::: (phalanx\.\S+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def snippets(page: Path) -> list[str]:
    return _RUNS.findall(page.read_text())


RUNNABLE = [page for page in PAGES if snippets(page)]


# Their snippets have marks and fixtures: pytest runs them.
FOR_PYTEST = [page for page in RUNNABLE if "pytest.mark" in "".join(snippets(page))]


# An editable installation is imported before pytest can rewrite its one module.
EDITABLE = ("-W", "ignore:Module already imported so cannot be rewritten; _editable")


def run_pytest(folder: Path, name: str, source: str) -> tuple[int, str]:
    """Run a file of tests as a user would and return the exit code and what was printed."""
    (folder / name).write_text(source)
    installed = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *EDITABLE),
            *([] if installed else ["-p", PLUGIN]),
            name,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("page", FOR_PYTEST, ids=name_of)
def test_tests_of_a_page_pass(page: Path, tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "test_page.py", "\n".join(snippets(page)))
    assert code == 0, output


FAILING = [
    pytest.param(source, said, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, (source, said) in enumerate(_FAILS.findall(page.read_text()), 1)
]


@pytest.mark.parametrize(("source", "said"), FAILING)
def test_a_failing_test_says_what_the_page_says(source: str, said: str, tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "test_metrics.py", source)
    assert code == 1, output
    lines = output.splitlines()
    for line in said.splitlines():
        start = line.removesuffix("...")
        is_there = line in lines if start == line else any(each.startswith(start) for each in lines)
        assert is_there, f"{line!r} is not in\n{output}"


@pytest.mark.parametrize("page", [page for page in RUNNABLE if page not in FOR_PYTEST], ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page, one after the other, are a module, which processes can import as well."""
    name = f"snippets_of_{page.stem.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("\n".join(snippets(page)))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    try:
        for test in [value for key, value in vars(module).items() if key.startswith("test_")]:
            test()
    finally:
        del sys.modules[name]


def test_the_main_pages_have_snippets_that_run() -> None:
    names = {name_of(page) for page in RUNNABLE}
    assert names >= {"docs/backend.md", "docs/index.md", "docs/quickstart.md", "docs/testing.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        path = target.partition("#")[0]
        if path and "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / path).exists(), f"{target} does not exist"


def command_lines(page: Path) -> Iterator[str]:
    text = page.read_text()
    for block in _FENCE.finditer(text):
        yield from _COMMAND.findall(block[0])
    for line in _INLINE.findall(prose(page)):
        # Some show how a command is called, and are no call.
        yield " ".join(line.split()[:2]) if re.search(r"\[|\.\.\.", line) else line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(page):
        _, name, *words = shlex.split(line.partition(" | ")[0], comments=True)
        assert name in COMMANDS, f"there is no phalanx {name}"
        parser = ArgumentParser(f"phalanx {name}")
        describe(parser, importlib.import_module(COMMANDS[name].module))
        if name == "run":
            words.append("train.py")  # some show options alone; after a program it is an argument
        try:
            if words:
                parser.parse_args(words)
        except SystemExit as ended:
            if ended.code != 0:
                pytest.fail(f"{line}: {capsys.readouterr().err}")


def test_every_command_is_described() -> None:
    text = (DOCS / "cli.md").read_text()
    assert set(re.findall(r"^## phalanx (\w+)$", text, re.MULTILINE)) == set(COMMANDS)


def resolve(path: str) -> Any:
    """Return what a dotted path means, importing modules on the way."""
    found: Any = phalanx
    for i, part in enumerate(parts := path.split(".")[1:], 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(["phalanx", *parts[:i]]))
        found = getattr(found, part)
    return found


ENTRIES = [
    entry
    for page in sorted((DOCS / "api").glob("*.md"))
    for entry in _ENTRY.findall(page.read_text())
]


def test_the_reference_has_something_to_show() -> None:
    for entry in ENTRIES:
        value = resolve(entry)
        shown = {entry: value}
        if inspect.isclass(value):
            shown |= {
                f"{entry}.{name}": getattr(value, name)
                for name, member in vars(value).items()
                if not name.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, classmethod | property))
            }
        for name, one in shown.items():
            if callable(one) or isinstance(one, property):
                first = (inspect.getdoc(one) or "").partition("\n")[0]
                assert first.endswith((".", ":")), f"{name} is not explained: {first!r}"


def test_the_reference_has_every_public_name() -> None:
    assert len(ENTRIES) == len(set(ENTRIES)), "a name has two entries"
    described = {resolve(entry) for entry in ENTRIES}
    modules = {"algorithms", "data", "debug", "launch", "optim", "parallel", "stores", "testing"}
    modules |= {"trace"}
    for name in set(phalanx.__all__) - modules:
        value = getattr(phalanx, name)
        assert f"phalanx.{name}" in ENTRIES or value in described, f"{name} is not in docs/api"
    for module in ("data", "debug", "optim", "stores", "testing"):
        for name in getattr(phalanx, module).__all__:
            paths = {f"phalanx.{module}.{name}", f"phalanx.{name}"}
            assert paths & set(ENTRIES), f"{module}.{name} is not in docs/api"


on_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the tables are about torch 2.13"
)


def names_under(title: str) -> set[str]:
    """Return the names in the first column of the table under a title of from-torch.md."""
    text = (DOCS / "from-torch.md").read_text()
    section = text.partition(title)[2].partition("\n## ")[0].partition("What is not here")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@on_torch_2_13
def test_the_table_of_names_is_true() -> None:
    here, missing = names_under("## Name by name"), names_under("What is not here:")
    new = names_under("## What is new")
    for name in here:
        assert hasattr(torch.distributed, name), f"torch.distributed has no {name}"
        assert name in phalanx.__all__, f"phalanx has no {name}"
    for name in missing:
        assert hasattr(torch.distributed, name), f"torch.distributed has no {name}"
        assert not hasattr(phalanx, name), f"phalanx has {name}"
    for name in new:
        assert name in phalanx.__all__, f"phalanx has no {name}"
    for name in set(phalanx.__all__) - here - new:
        theirs = getattr(torch.distributed, name, None)
        assert theirs is None or inspect.ismodule(theirs), f"{name} is not in the table"


@on_torch_2_13
def test_the_table_of_names_is_complete() -> None:
    theirs = set(torch.distributed.distributed_c10d.__all__)
    assert theirs - names_under("## Name by name") - names_under("What is not here:") == set()


@on_torch_2_13
def test_same_arguments() -> None:
    """Functions that are called the same take the same, in the same order."""
    for name in names_under("## Name by name"):
        ours, theirs = getattr(phalanx, name), getattr(torch.distributed, name)
        if not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        expected = [key for key in inspect.signature(theirs).parameters if not key.startswith("_")]
        taken = list(inspect.signature(ours).parameters)
        assert taken[: len(expected)] == expected, name
        assert set(taken[len(expected) :]) <= {"weights_only"}, name
