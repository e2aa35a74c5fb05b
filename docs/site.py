"""What `mkdocs` needs to know: which files outside of docs/ are pages of the site, and where.

Pages link to these files as one would in the repository (``../examples/train_gpt.py``), so that
links work in both places.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
BROKEN = "examples/broken/"
# Files of the repository, and the pages that show them.
PAGES = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "licence.md",
    f"{BROKEN}README.md": "examples/broken.md",
} | {
    script.relative_to(ROOT).as_posix(): script.relative_to(ROOT).with_suffix(".md").as_posix()
    for script in sorted((ROOT / "examples").rglob("*"))
    if script.suffix in (".py", ".ipynb") and script.parent != ROOT / BROKEN
}
ORIGINS = {page: file for file, page in PAGES.items()}
_LINK = re.compile(r"\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=_content(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside of docs/ lead to their pages."""
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")

    def lead(found: re.Match[str]) -> str:
        target = normpath(join(dirname(origin), found["target"]))
        anchor = found["anchor"] or ""
        if target in PAGES:
            place = PAGES[target]
        elif target.startswith(BROKEN):
            script = Path(target)
            place, anchor = PAGES[f"{BROKEN}README.md"], f"#{script.stem}{script.suffix[1:]}"
        elif target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            return found[0]
        return f"]({relpath(place, dirname(here) or '.')}{anchor})"

    return _LINK.sub(lead, markdown)


def _content(file: str) -> str:
    text = (ROOT / file).read_text()
    if file == f"{BROKEN}README.md":
        scripts = sorted((ROOT / BROKEN).glob("*.py"))
        return "\n".join([text, *map(_failure, scripts)])
    if file.endswith(".py"):
        return f"# {Path(file).name}\n\n{_fenced(text, 'python')}"
    if file.endswith(".ipynb"):
        return "\n\n".join(map(_cell, json.loads(text)["cells"]))
    return text if file.endswith(".md") else f"# Licence\n\n{_fenced(text, 'text')}"


def _failure(script: Path) -> str:
    name = script.stem
    said = script.with_suffix(".txt").read_text()
    return (
        f"## {name}.py {{ #{name}py }}\n\n{_fenced(script.read_text(), 'python')}\n"
        f'<span id="{name}txt"></span>It says:\n\n{_fenced(said, "text")}\n'
    )


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else _fenced(text, "python")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
