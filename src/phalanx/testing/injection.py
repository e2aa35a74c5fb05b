"""Faults on purpose: ranks that die, hang, raise, or come late."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from phalanx import logs
from phalanx.debug import layers
from phalanx.debug.layers import Layer, LayeredWork
from phalanx.errors import DistError
from phalanx.groups import ProcessGroup
from phalanx.launch import outcomes, threads
from phalanx.launch.outcomes import Failure, Killed
from phalanx.testing.operations import Operation, Place, identify
from phalanx.types import Timeout
from phalanx.work import Work
from phalanx.world import World, here

_log = logs.area("testing")

_SLICE = 0.05  # seconds of sleep between looks
_STRAGGLE = 0.05  # seconds that a straggler is late, if nothing is said
_JITTER = 0.002  # seconds that operations are late at most when they are reordered
_POLLS = 3  # how often a reordered work that is done may say that it is not

_entered: WeakKeyDictionary[World, Counter[str]] = WeakKeyDictionary()

_KINDS = ("kill", "drop", "raises", "straggler", "reorder")
_DEFAULTS = {"reorder": False, "strict": True}  # of the others: None

Ranks = int | Sequence[int]


class Injected(RuntimeError):
    """What `faults(raises=rank)` raises unless it is given an error."""


class _Dropped(BaseException):
    """Takes a dropped rank to the end of its block."""


def faults(
    *,
    kill: Ranks | None = None,
    drop: Ranks | None = None,
    raises: Ranks | None = None,
    error: BaseException | type[BaseException] | None = None,
    straggler: Ranks | None = None,
    delay: float | None = None,
    rank: int | None = None,
    ranks: Sequence[int] | None = None,
    reorder: bool = False,
    seed: int | None = None,
    at: str | None = None,
    strict: bool = True,
) -> Faults:
    """Have something go wrong in a `with` block, which every rank enters.

    One kind of fault per block; nest blocks for several. Ranks are those of the world.

    - `kill=2`: rank 2 ends before the operation, a process by SIGKILL, a thread as if it had.
      Its launcher does not count that as a failure; the others raise PeerFailed.
    - `drop=2`: rank 2 hangs from there on; the others wait for it until they time out. It goes on
      behind the block when they have left it.
    - `raises=2`: rank 2 raises `error`, or `Injected`.
    - `delay=0.1`: these `ranks` (`rank`, or all) come that many seconds late to each operation.
    - `straggler=2`: the same, for one rank.
    - `reorder=True`: all ranks come to each operation after random times of at most `delay`
      (2 ms) seconds, and works seem to complete late. The same `seed` gives the same times; one
      that was not given is drawn, and told in the failure.

    `at` says where: "all_reduce#17" is the 17th of that rank in the block, "all_reduce" the first
    (for delays every one), "#17" any operation, and "all_reduce#17@name" one of a group. A fault
    that has not come to pass when the block ends is an AssertionError, unless `strict` is False.
    """
    return Faults({k: v for k, v in locals().items() if v is not _DEFAULTS.get(k)})


class Faults:
    """A block in which something goes wrong; made by `faults`."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        kinds: list[str] = [kind for kind in _KINDS if kind in given]
        if not kinds and "delay" in given:
            kinds = ["delay"]
        if len(kinds) != 1:
            raise ValueError(
                "faults needs one of kill, drop, raises, delay, straggler and reorder, got "
                f"{' and '.join(kinds) or 'none'}: nest blocks for several"
            )
        self.kind = kinds[0]
        self._place = Place.parse(given.get("at"))
        self._check()
        self._is_entered = False
        self._lock = threading.Lock()
        self._matches = 0
        self._has_happened = self._is_told = False
        self._whole: Any = None
        self._is_dead = False

    def _check(self) -> None:
        allowed = {
            "raises": {"error"},
            "straggler": {"delay"},
            "delay": {"rank", "ranks"},
            "reorder": {"delay", "seed"},
        }.get(self.kind, set())
        allowed |= {self.kind, "strict"} | ({"at"} if self.kind != "reorder" else set())
        if extra := sorted(set(self._given) - allowed):
            raise ValueError(f"faults({self.kind}=...) has no use for {', '.join(extra)}")
        delay = self._given.get("delay", 0)
        is_number = isinstance(delay, int | float) and not isinstance(delay, bool)
        if not is_number or not math.isfinite(delay) or delay < 0:
            raise ValueError(f"delay must be seconds, at least 0, got {delay!r}")
        error = self._given.get("error", Injected)
        kind = error if isinstance(error, type) else type(error)
        if not issubclass(kind, BaseException):
            raise ValueError(f"error must be an exception or a type of one, got {error!r}")
        if type(seed := self._given.get("seed", 0)) is not int:
            raise ValueError(f"seed must be an integer, got {seed!r}")
        if (reorder := self._given.get("reorder", True)) is not True:
            raise ValueError(f"reorder must be True or False, got {reorder!r}")

    def __repr__(self) -> str:
        words = ", ".join(f"{key}={value!r}" for key, value in self._given.items())
        return f"faults({words})"

    def __enter__(self) -> Faults:
        if self._is_entered:
            raise ValueError(f"{self!r} was entered before: every rank makes its own, each time")
        self._is_entered = True
        self._world = world = here()
        self._number = _entered.setdefault(world, Counter())["blocks"]
        self._ranks = self._concerned(world.size)
        self._is_mine = world.rank in self._ranks
        if self.kind == "reorder" and "seed" not in self._given:
            self._given["seed"] = self._agreed_seed()
        self._random = random.Random(f"{self._given.get('seed')}/{world.rank}")
        _entered[world]["blocks"] += 1
        if self._is_mine:
            self._make: layers.Make = lambda group: _Faulty(group, self)
            layers.add(world, self._make)
        if self.kind == "reorder":
            outcomes.remark(world, f"under {self!r}")
        return self

    def _concerned(self, size: int) -> set[int]:
        """Return the ranks that the fault happens on; ValueError if one does not exist."""
        given = self._given.get(self.kind)
        if self.kind == "reorder":
            return set(range(size))
        if self.kind == "delay":
            if "rank" in self._given and "ranks" in self._given:
                raise ValueError("faults takes rank or ranks, not both")
            given = self._given.get("rank", self._given.get("ranks", range(size)))
        ranks: list[Any] = list(given) if isinstance(given, Iterable) else [given]
        for rank in ranks:
            if type(rank) is not int or not 0 <= rank < size:
                raise ValueError(f"{self!r}: there is no rank {rank!r} in a world of {size}")
        if not ranks:
            raise ValueError(f"{self!r} concerns no rank")
        return set(ranks)

    def _agreed_seed(self) -> int:
        """Return the seed that the first rank to come here has drawn."""
        drawn = str(random.SystemRandom().randrange(10**6))
        return int(self._world.store.compare_set(self._key("seed"), "", drawn))

    def _key(self, word: str) -> str:
        return f"faults/{self._number}/{word}"

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        __tracebackhide__ = True
        if self._is_dead:  # it communicates no more, whatever is in its way out
            return False
        if self._is_mine:
            layers.remove(self._world, self._make, _Faulty)
        if isinstance(error, _Dropped):
            return True
        if self.kind == "drop" and self._world.store is not None:
            self._world.store.set(self._key(f"left/{self._world.rank}"), "")
        missing = self._is_mine and not self._has_happened and self.kind != "reorder"
        if error is not None:
            in_vain = self.kind != "reorder" and not self._has_happened_anywhere()
            outcomes.label(error, f"under {self!r}{', which had not come to pass' * in_vain}")
        elif missing and self._given.get("strict", True):
            raise AssertionError(
                f"{self!r} did not come to pass: rank {self._world.rank} made {self._count()} in "
                "the block; correct `at`, or pass strict=False if it need not happen"
            )
        return False

    def _has_happened_anywhere(self) -> bool:
        if self._has_happened or self._world.store is None:
            return True
        with suppress(DistError):
            return bool(self._world.store.check([self._key("happened")]))
        return True  # the store went with its owner

    def _count(self) -> str:
        name, group = self._place.name, self._place.group
        what = f"{name} call" if name else "operation"
        where = f" on group {group!r}" if group else ""
        return f"{self._matches or 'no'} {what}{'s' * (self._matches != 1)}{where}"

    def before(self, operation: Operation, group: ProcessGroup) -> None:
        """Do to an operation of this rank what the block is for, before it begins."""
        if self._is_dead:
            raise Killed("this rank was killed")
        with self._lock:
            hit = self._is_hit(operation, {group.group_name, group.group_desc})
        what = f"{operation.title} on group {group.group_name!r} at {operation.site}"
        if self.kind == "reorder":
            _sleep(self._random.uniform(0, self._given.get("delay", _JITTER)))
            return
        if not hit:
            return
        self._tell()
        if self.kind in ("delay", "straggler"):
            _sleep(self._given.get("delay", _STRAGGLE))
        elif self.kind == "raises":
            raise self._error(what)
        elif self.kind == "drop":
            self._hang()
        else:
            self._kill(what)

    def _is_hit(self, operation: Operation, group_names: set[str]) -> bool:
        if self.kind == "drop" and self._has_happened:
            return True
        if not self._place.covers(operation, group_names):
            return False
        if operation.whole is not None and not self._place.counts_parts(operation):
            if operation.whole is self._whole:
                return self.kind in ("delay", "straggler") and self._has_happened
            self._whole = operation.whole
        self._matches += 1
        number = self._place.number
        if self.kind in ("delay", "straggler"):
            hit = number is None or number == self._matches
        else:
            hit = self._matches == (number or 1)
        self._has_happened |= hit
        return hit

    def _tell(self) -> None:
        """Let the other ranks know that it has come to pass, the first time."""
        if not self._is_told and self._world.store is not None:
            self._is_told = True
            self._world.store.set(self._key("happened"), "")

    def _error(self, what: str) -> BaseException:
        error = self._given.get("error")
        if isinstance(error, BaseException):
            return error
        return (error or Injected)(f"{self!r} before {what}")

    def _kill(self, what: str) -> None:
        killed = Killed(f"was killed by {self!r} before {what}")
        _log.info("rank %d %s", self._world.rank, killed)
        self._is_dead = True
        self._world.fail(str(killed))  # the system would only tell of the signal
        if not self._world.threads:
            outcomes.last_word(Failure(self._world.rank, killed))
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank := threads.current_rank()) is not None:
            rank.killed = killed
        raise killed

    def _hang(self) -> None:
        """Take part in nothing until all others have left the block, or ended."""
        world = self._world
        while not all(self._is_gone(peer) for peer in set(range(world.size)) - self._ranks):
            time.sleep(_SLICE)
        raise _Dropped(f"rank {world.rank} was dropped by {self!r}")

    def _is_gone(self, peer: int) -> bool:
        roster = self._world.shared.get("roster")
        if roster is not None and roster.obituary(peer, ask_system=True):
            return True
        with suppress(DistError):
            return bool(self._world.store.check([self._key(f"left/{peer}")]))
        return True  # the store went with its owner

    def after(self, result: Any) -> Any:
        """Return what the caller of an operation is given."""
        if self.kind != "reorder" or not isinstance(result, Work):
            return result
        late = self._random.uniform(0, self._given.get("delay", _JITTER))
        return _LateWork(result, late, self._random.randrange(_POLLS + 1))


class _Faulty(Layer):
    """Does what a block is for to the operations of one group."""

    def __init__(self, group: ProcessGroup, block: Faults) -> None:
        super().__init__(group)
        self._block = block

    def call(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._block.before(identify(name, args, sys._getframe(1)), self.group)
        return self._block.after(operation(*args, **kwargs))


class _LateWork(LayeredWork):
    """A work that seems to complete later than it does."""

    def __init__(self, work: Work, late: float, polls: int) -> None:
        super().__init__(work)
        self._late = late
        self._polls = polls

    def wait(self, timeout: Timeout | None = None) -> bool:
        _sleep(self._late)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        if self._polls > 0:
            self._polls -= 1
            return False
        return super().is_completed()


def _sleep(seconds: float) -> None:
    """Sleep, in slices: a rank thread that is given up is interrupted between them."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE))
