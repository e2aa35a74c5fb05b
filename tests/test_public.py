"""The shape of the package: names, layers, what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# From the bottom up. A module imports from its own layer and those below it.
LAYERS = [
    {
        "errors",
        "logs",
        "options",
        "types",
        "work",
        "_native",
        "bystanders",
        "extras",
        "forks",
        "leftovers",
        "patches",
        "process",
    },
    {"heap", "profiling", "stores", "meeting", "rendezvous"},
    {"backends"},
    {"group_calls", "groups", "world", "subgroups", "mesh", "checks", "sparse"},
    {"collectives", "p2p", "objects", "coalescing", "functional"},
    {"algorithms", "data", "optim", "parallel"},
]
# These may use all of the above, and none uses them.
BESIDE = {"__main__", "bench", "cli", "commands", "completion", "debug", "demo", "dispatch"}
BESIDE |= {"doctor", "launch", "machine", "plan", "random", "testing", "torch_backend", "trace"}


def test_all_is_sorted_and_complete():
    public = sorted(name for name in dir(phalanx) if not name.startswith("_"))
    modules = {path.stem for path in ROOT.iterdir()}
    own = [name for name in public if name in phalanx.__all__ or name not in modules]
    helpers = {"Any", "TYPE_CHECKING", "annotations", "importlib"}
    assert sorted(phalanx.__all__) == [name for name in own if name not in helpers]
    assert phalanx.__all__ == sorted(phalanx.__all__, key=_ruff_order)


def _ruff_order(name):
    return (not name.isupper(), not name[0].isupper(), name)


@pytest.mark.parametrize("name", phalanx.__all__)
def test_every_public_name_is_there(name):
    assert getattr(phalanx, name) is not None


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = phalanx.no_such_thing


def imports(path):
    """Yield the phalanx modules that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "phalanx":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phalanx."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (n.name.split(".")[1] for n in node.names if n.name.startswith("phalanx."))


def test_imports_point_down():
    depth = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").parts[0]
        if module in BESIDE or module == "__init__":
            continue
        assert module in depth, f"{module} has no layer yet: add it to LAYERS"
        for other in imports(path):
            assert other not in BESIDE, f"{module} imports {other}, which stands beside the layers"
            assert depth[other] <= depth[module], f"{module} imports {other}, which is above it"


def test_torch_distributed_is_not_used():
    for path in ROOT.rglob("*.py"):
        if path.parent.name in ("torch_backend", "torch_threads"):  # which serve and test it
            continue
        if path.parts[-2:] == ("bench", "torch_peer.py"):  # which measures it
            continue
        if path.parts[-2:] == ("engines", "torch_engine.py"):  # which runs on it
            continue
        if path.parts[-2:] == ("stores", "over_torch.py"):  # which reads the store of its agents
            continue
        source = path.read_text()
        assert "import torch.distributed" not in source, path
        assert "from torch.distributed" not in source, path


def test_import_is_cheap():
    """What is rarely needed is not imported with the package."""
    code = "import sys, phalanx; print(*sorted(m for m in sys.modules if m.startswith('phalanx.')))"
    listing = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for rare in ("mesh", "functional", "testing", "launch", "heap", "debug", "backends.local"):
        assert f"phalanx.{rare}" not in listing.stdout.split()
