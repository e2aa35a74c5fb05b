"""Try a change: in a copy of the tree, with the tests that should notice it, and take it back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HUNG = "hung for"
SECONDS = 300.0  # that the tests of one change may take before they count as hanging

# Python looks for phalanx in the copy first: what an editable installation adds comes later.
_CUSTOMIZE = """\
import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"
]
"""


class Outcome(Enum):
    """What came of a change."""

    NOTICED = "noticed"
    HUNG = "hung"  # which is noticed as well, unless the machine was only slow
    SURVIVED = "survived"
    BROKEN = "broken"  # it could not be applied or built


@dataclass(frozen=True)
class Change:
    """One text in one file, and what stands there instead; the tests are arguments of pytest.

    A test that begins with "native:" is a program of native/tests. `why` says, for a change that
    the tests need not notice, what makes it one of those.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""
    line: int = 0  # where it begins, if the text may be there several times
    column: int = 0

    @property
    def title(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {old[:60]!r} -> {new[:60]!r}"

    @property
    def is_native(self) -> bool:
        return self.path.startswith("native/")

    def made_in(self, text: str) -> str:
        """Return a file's text with the change; ValueError if it is not there, or twice."""
        if self.line:
            before = text.splitlines(keepends=True)[: self.line - 1]
            at = sum(map(len, before)) + self.column
            if not text.startswith(self.old, at):
                raise ValueError(f"{self.path}:{self.line} has no {self.old!r}")
            return text[:at] + self.new + text[at + len(self.old) :]
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)


@dataclass
class Copy:
    """A copy of the tree, in which changes are tried one at a time. A context manager."""

    seconds: float = SECONDS
    folder: Path = field(default_factory=lambda: _new_folder())
    said: str = ""  # by the tests of the last change
    _is_built: bool = False

    def __enter__(self) -> Copy:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in names.splitlines():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        (self.folder / "src" / "sitecustomize.py").write_text(_CUSTOMIZE)
        self._put_module(_module())
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def _put_module(self, built: Path) -> None:
        target = self.folder / "src" / "phalanx" / built.name
        target.unlink(missing_ok=True)  # a process that has mapped the old one keeps it
        shutil.copy2(built, target)

    def attempt(self, change: Change) -> Outcome:
        """Make a change, run its tests, take it back, and return what came of it."""
        file = self.folder / change.path
        before = file.read_text()
        try:
            file.write_text(change.made_in(before))
            if change.is_native and not self._build():
                return Outcome.BROKEN
            if self.passes(change.tests):
                return Outcome.SURVIVED
            return Outcome.HUNG if self.said.startswith(_HUNG) else Outcome.NOTICED
        except (ValueError, FileNotFoundError) as error:
            self.said = str(error)
            return Outcome.BROKEN
        finally:
            file.write_text(before)
            if change.is_native:
                self._put_module(_module())

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Say whether all these tests pass in time."""
        native = [each.removeprefix("native:") for each in tests if each.startswith("native:")]
        others = [each for each in tests if not each.startswith("native:")]
        if not all(self._run([str(self.folder / "build" / "mutants-tests" / n)]) for n in native):
            return False
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
        return not others or self._run([sys.executable, "-m", "pytest", *options, *others])

    def _run(self, command: list[str]) -> bool:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            str(self.folder / each) for each in ("src", "tests", ".")
        )
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                self.said, _ = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.said = f"{_HUNG} {self.seconds:g} s\n{process.communicate()[0]}"
            return process.returncode == 0

    def _build(self) -> bool:
        """Compile what has changed: the module, and the programs of native/tests."""
        build = self.folder / "build"
        kinds = {"mutants": ["OFF"], "mutants-tests": ["ON"]}
        for name, (tests,) in kinds.items():
            configure = ["cmake", "-S", ".", "-B", str(build / name), "-G", "Ninja"]
            configure += [
                f"-DPHALANX_NATIVE_TESTS={tests}",
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            for command in (
                [] if (build / name / "build.ninja").exists() else configure,
                ["cmake", "--build", str(build / name)],
            ):
                done = command and subprocess.run(
                    command, cwd=self.folder, capture_output=True, text=True
                )
                if done and done.returncode:
                    self.said = done.stdout[-2000:] + done.stderr[-2000:]
                    return False
        (module,) = (build / "mutants").glob("_native*.so")
        self._put_module(module)
        return True


def _new_folder() -> Path:
    """Make a folder for a copy, inside of the tree, so that ccache knows its files."""
    (ROOT / "build").mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="mutants-", dir=ROOT / "build"))


def _module() -> Path:
    """Return the compiled module that the interpreter would import."""
    import phalanx._native

    return Path(phalanx._native.__file__)
