"""What a check finds, the host it looks at, and how checks are run."""

from __future__ import annotations

import os
import resource
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from phalanx.machine import Machine

Grade = Literal["good", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One fact about a host. A warning or a problem comes with what to do."""

    check: str
    grade: Grade
    fact: str
    advice: str = ""


class Said(NamedTuple):
    """What a check says; its name is added by whoever runs it."""

    grade: Grade
    fact: str
    advice: str = ""


def good(fact: str) -> Said:
    return Said("good", fact)


def warning(fact: str, advice: str) -> Said:
    return Said("warning", fact, advice)


def problem(fact: str, advice: str) -> Said:
    return Said("problem", fact, advice)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _entry_points(group: str) -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=group))


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _connect(address: str) -> None:
    """Open a port on an address, connect to it, and send a byte through; raise OSError if not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(5)
        with socket.create_connection(server.getsockname()[:2], timeout=5) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"?")
                if far.recv(1) != b"?":
                    raise OSError("what was sent did not arrive")


@dataclass(frozen=True)
class Host:
    """What checks may ask; made of other parts, it is any host."""

    root: Path = Path("/")  # of /proc, /sys and the like
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cpus: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    hostname: str = field(default_factory=socket.gethostname)
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)
    resolve: Callable[[str], list[str]] = _resolve
    connect: Callable[[str], None] = _connect
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    version: Callable[[str], str | None] = _version
    entry_points: Callable[[str], list[metadata.EntryPoint]] = _entry_points

    @property
    def machine(self) -> Machine:
        """What the launcher knows of it as well."""
        return Machine(self.root)

    def text(self, path: str) -> str | None:
        """Return what stands in a file, or None where there is no such file."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return the number that stands in a file, or None."""
        text = self.text(path)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def glob(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern.lstrip("/")))


class Check(NamedTuple):
    """A question to a host; it must be answered within `deadline` seconds."""

    name: str
    ask: Callable[[Host], Iterable[Said]]
    deadline: float = 5.0


def examine(host: Host, checks: Iterable[Check]) -> Iterator[Finding]:
    """Make checks one after the other. One that fails or hangs is a finding itself."""
    for check in checks:
        for said in _answers(check, host):
            yield Finding(check.name, *said)


def _answers(check: Check, host: Host) -> list[Said]:
    said: list[Said] = []

    def ask() -> None:
        try:
            said.extend(list(check.ask(host)))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said.append(
                warning(
                    f"this could not be found out: {type(error).__name__}: {error} "
                    f"({Path(place.filename).name}:{place.lineno})",
                    "tell the authors of Phalanx what stands here; the other checks are not "
                    "affected",
                )
            )

    # A thread, since nothing else ends a lookup that hangs: it is left behind.
    thread = threading.Thread(target=ask, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline)
    if thread.is_alive():
        return [
            problem(
                f"no answer within {check.deadline:g} s",
                "a job that asks the same would hang as long; find out what does not answer",
            )
        ]
    return said
