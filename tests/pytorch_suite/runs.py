"""The runs whose results are committed."""

from __future__ import annotations

from pytorch_suite.settings import Settings

RUNS = {
    "backend-2": Settings("backend", 2),
    "backend-3": Settings("backend", 3),
    "backend-4": Settings("backend", 4),
    "as-gloo-3": Settings("as-gloo", 3),
    "as-gloo-4": Settings("as-gloo", 4),
    "as-gloo-4-shim": Settings("as-gloo", 4, shim=True),
    "package-3": Settings("package", 3),
    "package-4-shim": Settings("package", 4, shim=True),
}
