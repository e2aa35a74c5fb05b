"""`scripts/mutants` makes changes, notices what tests say of them, and takes them back."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from mutations import generator
from mutations.table import CHANGES, TESTS
from mutations.trial import ROOT, Change, Copy, Outcome


def test_a_change_is_made_where_it_is_meant() -> None:
    change = Change("a.py", "1", "2", ())
    assert change.made_in("x = 1\n") == "x = 2\n"
    assert replace(change, line=2, column=4).made_in("y = 11\nx = 1\n") == "y = 11\nx = 2\n"
    for text in ("x = 3\n", "x = 1 + 1\n"):
        with pytest.raises(ValueError, match="times"):
            change.made_in(text)
    with pytest.raises(ValueError, match="py:1 has no"):
        replace(change, line=1, column=2).made_in("x = 1\n")


def test_the_changes_of_the_table_fit_the_code() -> None:
    for change in CHANGES:
        change.made_in((ROOT / change.path).read_text())
        assert change.tests
        for test in change.tests:
            native = test.removeprefix("native:")
            path = f"native/tests/{native}.cpp" if native != test else test.partition("::")[0]
            assert (ROOT / path).exists(), test
    assert generator.tests_exist(TESTS) == []


def test_generated_changes_are_python_and_come_again_with_their_seed() -> None:
    files = generator.files(TESTS)
    assert "src/phalanx/torch_backend/group.py" in files
    files = {path: tests for path, tests in files.items() if path.startswith("src/phalanx/back")}
    first, again = generator.sample(files, 7, 30), generator.sample(files, 7, 30)
    assert first == again
    assert first != generator.sample(files, 8, 30)
    for change in first:
        before = (ROOT / change.path).read_text()
        after = change.made_in(before)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), change.title


def test_a_change_is_noticed_survives_or_is_broken_and_nothing_stays() -> None:
    path = "src/phalanx/types.py"
    tests = ("tests/test_types.py",)
    noticed = Change(path, "class Deadline", "class Dateline", tests)
    survives = Change(path, "class Deadline", "class  Deadline", tests)
    with Copy() as copy:
        file = copy.folder / path
        before = file.read_bytes()
        outcomes = []
        for change in (noticed, survives, replace(noticed, old="nowhere")):
            outcomes.append(copy.attempt(change))
            assert file.read_bytes() == before
        assert outcomes == [Outcome.NOTICED, Outcome.SURVIVED, Outcome.BROKEN], copy.said
        copy.seconds = 0.1
        assert copy.attempt(survives) is Outcome.HUNG
        assert "hung for 0.1 s" in copy.said
    assert not copy.folder.exists()
    assert (ROOT / path).read_bytes() == before
