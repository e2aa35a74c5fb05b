"""Does a backend keep the contract of `GroupBackend`? Every operation against plain torch.

``check_backend(make)`` checks all rules on ranks that are threads. To check ranks of any other
kind, have each of them call ``check_group(backend)`` and ``check_endings(make_group)``. Failures
are AssertionErrors that name the rule, the rank and the case.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from phalanx.backends.base import GroupBackend
from phalanx.testing.backend_kit import collectives, endings, messages, works
from phalanx.testing.backend_kit.inputs import Rule
from phalanx.testing.rules import broken, law, stack_of

__all__ = ["check_backend", "check_endings", "check_group"]

Make = Callable[[int, int, dict[str, Any]], GroupBackend]

RULES: list[Rule] = [*collectives.RULES, *works.RULES, *messages.RULES]

_GRACE = 5.0  # seconds for ranks to end in once another has failed


def check_backend(make: Make, sizes: Sequence[int] = (1, 2, 3, 4), *, timeout: float = 120) -> None:
    """Check groups of these sizes, whose ranks are threads.

    ``make(rank, size, shared)`` returns one rank's backend; ``shared`` is a dict that the ranks of
    one group have in common. Thread-safe as dicts are: ``setdefault`` is how ranks meet. A group
    that has not kept all rules after ``timeout`` seconds is taken to hang.
    """
    if not sizes:
        raise ValueError("check_backend needs sizes of groups to check, got none")
    for size in sizes:
        _Team(make, size).check(check_group, timeout)
        for rule in endings.RULES if size > 1 else ():
            _Team(make, size).check(partial(_check, rule), timeout)


def check_group(backend: GroupBackend) -> None:
    """Check all operations; every rank of the group must call this."""
    for rule in RULES:
        _check(rule, backend)


def check_endings(make_group: Callable[[], GroupBackend]) -> None:
    """Check how groups end: by timeouts, closing, aborts and failures; all ranks must call this.

    ``make_group()`` returns this rank's backend of a new group of at least two ranks. After the
    last rule rank 0 counts as failed.
    """
    for rule in endings.RULES:
        backend = make_group()
        try:
            _check(rule, backend)
        finally:
            backend.close()


def _check(rule: Rule, backend: GroupBackend) -> None:
    try:
        rule(backend)
    except (Exception, SystemExit) as error:
        raise broken(rule, error, f"rank {backend.rank} of {backend.size}") from error


class _Team:
    """The ranks of one group, each a thread."""

    def __init__(self, make: Make, size: int) -> None:
        self._make = make
        self._shared: dict[str, Any] = {}
        self._backends: list[GroupBackend] = []
        self._errors: list[BaseException] = []
        self._size = size

    def check(self, rule: Rule, timeout: float) -> None:
        """Have each rank call ``rule(backend)`` and raise what the first of them raised."""
        threads = [
            threading.Thread(target=self._run, args=(rank, rule), name=f"rank{rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + timeout
        while not self._errors and any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.05)
            if time.monotonic() > limit:
                self._errors.append(_hanging(threads, timeout))
        if self._errors:
            self._end(threads)
            raise self._errors[0]

    def _run(self, rank: int, rule: Rule) -> None:
        try:
            backend = self._make(rank, self._size, self._shared)
            if not isinstance(backend, GroupBackend):
                raise TypeError(f"make must return a GroupBackend, got {backend!r}")
            self._backends.append(backend)
            assert (backend.rank, backend.size) == (rank, self._size), (
                f"the backend of rank {rank} of {self._size} says that it is rank {backend.rank} "
                f"of {backend.size}"
            )
            try:
                rule(backend)
            finally:
                backend.close()
                backend.close()  # twice is fine
        except BaseException as error:
            self._errors.append(error)

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        """Wake the ranks that wait for one that has failed."""
        for backend in self._backends:
            with suppress(Exception):
                backend.abort("another rank has broken a rule")
        limit = time.monotonic() + _GRACE
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))


def _hanging(threads: Sequence[threading.Thread], timeout: float) -> AssertionError:
    lines = [f"the group has not kept all rules after {timeout:g} s; its ranks stand at"]
    for thread in threads:
        if thread.is_alive():
            lines.append(f"  {thread.name}{_rule_of(thread)}\n{stack_of(thread)}")
    return AssertionError("\n".join(lines))


def _rule_of(thread: threading.Thread) -> str:
    """Say which rule a rank checks."""
    for frame, _ in traceback.walk_stack(sys._current_frames().get(thread.ident or 0)):
        if frame.f_code is _check.__code__:
            rule = frame.f_locals["rule"]
            return f", in the rule {rule.__name__}: {law(rule)}"
    return ""
