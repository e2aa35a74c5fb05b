"""The native core, as the rest of the package sees it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

class Store:
    """Operations on keys; each takes how many seconds it may wait last."""

    def set(self, key: str, value: str | bytes, timeout: float, /) -> None: ...
    def multi_set(
        self, keys: Sequence[str], values: Sequence[str | bytes], timeout: float, /
    ) -> None: ...
    def get(self, key: str, timeout: float, /) -> bytes: ...
    def multi_get(self, keys: Sequence[str], timeout: float, /) -> list[bytes]: ...
    def add(self, key: str, amount: int, timeout: float, /) -> int: ...
    def append(self, key: str, value: str | bytes, timeout: float, /) -> None: ...
    def check(self, keys: Sequence[str], timeout: float, /) -> bool: ...
    def wait(self, keys: Sequence[str], timeout: float, /) -> None: ...
    def compare_set(
        self, key: str, expected: str | bytes, desired: str | bytes, timeout: float, /
    ) -> bytes: ...
    def delete_key(self, key: str, timeout: float, /) -> bool: ...
    def num_keys(self, timeout: float, /) -> int: ...
    def list_keys(self, timeout: float, /) -> list[str]: ...
    def queue_push(self, key: str, value: str | bytes, timeout: float, /) -> None: ...
    def queue_pop(self, key: str, block: bool, timeout: float, /) -> bytes: ...
    def queue_len(self, key: str, timeout: float, /) -> int: ...
    def barrier(self, key: str, world_size: int, timeout: float, /) -> None: ...

class Table(Store):
    def __init__(self) -> None: ...

class FileLog(Store):
    def __init__(self, path: str, users: int, /) -> None: ...
    def close(self) -> None: ...

class StoreClient(Store):
    def __init__(self, host: str, port: int, secret: str, timeout: float, /) -> None: ...

class Heart:
    """Raises a count in a store from time to time."""

    def __init__(self, store: Store, key: str, interval: float) -> None: ...
    def stop(self) -> None: ...
    def silence(self) -> float:
        """Return the seconds since the store last answered."""
    def refused(self) -> bool:
        """Say whether the store could not be reached at all, rather than being slow to answer."""

class StoreServer:
    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        listen_fd: int = -1,
        handshake: float = 10.0,
        frame: float = 60.0,
        connections: int = 65536,
        strangers: int = 64,
        courtesy: float = 0.25,
    ) -> None: ...
    @property
    def port(self) -> int: ...

def sha256(message: bytes, /) -> bytes: ...
def hmac_sha256(key: bytes, message: bytes, /) -> bytes: ...

# The engine.

def configure(
    tensor: type[Tensor], uint8: torch.dtype, int8: torch.dtype, packages: list[str]
) -> None:
    """Tell the core torch's tensor type, its dtypes of a byte, and where no user's code is."""

def set_debug_level(level: int) -> None:
    """Set the debug level of this process."""

def debug_level() -> int:
    """Return the debug level set last."""

def set_shapes_observer(observer: Callable[[int, str, str], None]) -> None:
    """Set the function that is told, above level OFF, that ranks agree but for their shapes.

    It is called with the global rank that tells, the user's line, and what each rank brings.
    """

def batch(part: int, parts: int) -> None:
    """Say which of a batch this thread's next call is."""

def part_of(digest: int, what: str = "", number: int = 0, site: str = "") -> None:
    """Say what this thread's calls are part of, until told otherwise (0).

    Ranks must agree on the digest; reports name the rest.
    """

def set_bystanders(count: Callable[[], int]) -> None:
    """Set the function that counts the threads that never act for a rank."""

def dtype_code(tensor: object) -> int:
    """Return the code of a tensor's element type, or -1 if it cannot be exchanged as it is."""

def common_dtype_code(tensors: list[Any]) -> int:
    """Return the code that all of these tensors have, or -1."""

def copy_all(dsts: Sequence[Tensor], srcs: Sequence[Tensor], measure: bool) -> list[float]:
    """Copy each source to its destination, of the same dtype and shape and not overlapping it.

    With ``measure``, return the sum of squares of each source, in double; else nothing. Nothing is
    copied if a pair does not fit.
    """

def overlapping_calls(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[int]:
    """Return which calls of a batch have a tensor that shares memory with one of another call.

    Memory is what lies between a tensor's first and last element.
    """

def instructions() -> str:
    """Name the vector instructions that reductions use here: "avx512", "avx2" or "baseline"."""

def allocate(bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate zeroed bytes in this process' shared heap."""

def in_heap(data: int, bytes: int) -> bool:
    """Say whether this memory is in this process' shared heap."""

def heap_used() -> int:
    """Return how many bytes are allocated in this process' shared heap."""

def look_into(path: str) -> dict[str, Any]:
    """Read what the ranks of a process show in its heap, a file in /proc."""

def rank_list(ranks: Sequence[int]) -> str:
    """Name these ranks, which are in rising order: "ranks 0-2, 5"."""

class Roster:
    """Who is in a world: one record per rank in shared memory."""

    @staticmethod
    def create(size: int, threads: bool, near: int = 0) -> Roster: ...
    @staticmethod
    def open(ticket: str) -> Roster: ...
    def place(self, rank: int, host: str, pid: int) -> None:
        """Say that a rank is on another host; before others open the roster."""
    @property
    def ticket(self) -> str: ...
    @property
    def threads(self) -> bool: ...
    def join(self, rank: int, timeout: float, pids: Sequence[int] = ()) -> None:
        """Join, and wait for the others; `pids` tells their processes by rank, 0 if unknown."""
    def count_threads(self, rank: int, by: int) -> None:
        """Say that one thread more or less acts for a rank."""
    def leave(self, rank: int) -> None: ...
    def fail(self, rank: int, why: str) -> None: ...
    def obituary(self, rank: int, ask_system: bool) -> str: ...
    def note(self, rank: int, text: str) -> None:
        """Leave a text for all ranks, of which the last 8 KiB are kept."""
    def notes(self) -> list[str]:
        """Return the notes of all ranks."""

def blocked_waits(roster: Roster) -> list[tuple[int, int, bytes]]:
    """Return (rank, since, facts) of the waits of ranks of which all threads wait."""

def check_facts(facts: bytes) -> None: ...
def deadlock_among(
    size: int, waits: list[tuple[int, bytes]], ended: Sequence[int]
) -> tuple[list[int], str]:
    """Return the ranks, if any, that wait for each other for ever, and the report of it."""

def sentence(roster: Roster, ranks: Sequence[int], report: str) -> None:
    """Have those of these ranks that wait here raise Deadlock."""

class Waiting:
    """A wait for other ranks that is made in Python."""

    def __init__(
        self,
        roster: Roster,
        rank: int,
        group: str,
        what: str,
        needs: Sequence[int],
        timeout: float,
        kind: str = "making",
        any: bool = False,
    ) -> None: ...
    def close(self) -> None:
        """Wait no longer."""
    def check(self) -> None:
        """Say that it goes on; raise Deadlock if it is part of one.

        Whoever waits looks for the end of the wait between two checks.
        """

def trace_start(directory: str) -> None:
    """Record all operations of this process' ranks in files of this directory."""

def trace_stop() -> list[str]:
    """Record no more; return what was lost, in words."""

def trace_is_on() -> bool:
    """Say whether operations are recorded."""

def trace_range(roster: Roster, rank: int, name: str) -> TraceRange:
    """Begin a named stretch of a rank."""

def trace_words() -> dict[str, list[str]]:
    """Return the names of the numbers in a trace, by field."""

class TraceRange:
    """A stretch of a rank's program that goes on."""

    def end(self) -> None: ...

class Pending:
    """An asynchronous operation."""

    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None: ...
    def check(self) -> None:
        """Raise what made it fail, if it has failed."""
    def source(self) -> int: ...

_Parts = Tensor | Sequence[Tensor]

class Group:
    """One rank's end of a group. Timeouts are seconds; a negative one means the group's."""

    timeout: float

    def __init__(
        self,
        roster: Roster,
        members: Sequence[int],
        rank: int,
        name: str,
        timeout: float,
        ticket: str,
    ) -> None: ...
    @property
    def ticket(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    def attend(self, creator: bool) -> None: ...
    def describe(self, rank: int) -> str:
        """Say how a rank of the group has ended, or what it does."""
    def measure(self, compares: bool, records: bool) -> None:
        """Do without checks and records, to measure what they cost."""
    def history(self) -> list[dict[str, Any]]:
        """Return this rank's last operations on the group, oldest first."""
    def abort(self, why: str, error: str = "PeerFailed") -> None:
        """Have all who wait, and who come later, raise an error of this class."""
    def alarm(self) -> None: ...
    def close(self) -> None: ...
    def barrier(self, timeout: float, asynchronous: bool, /) -> Pending | None: ...
    def all_reduce(
        self, tensor: Tensor, op: int, factor: float, timeout: float, asynchronous: bool, /
    ) -> Pending | None: ...
    def all_reduce_measured(
        self,
        tensor: Tensor,
        op: int,
        factor: float,
        timeout: float,
        asynchronous: bool,
        squares: Tensor,
        /,
    ) -> Pending | None:
        """Do an all_reduce that leaves the sum of squares of its result in ``squares``."""
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: int,
        factor: float,
        timeout: float,
        asynchronous: bool,
        /,
    ) -> Pending | None: ...
    def broadcast(
        self, tensor: Tensor, root: int, timeout: float, asynchronous: bool, /
    ) -> Pending | None: ...
    def all_gather(
        self, outputs: _Parts, input: Tensor, timeout: float, asynchronous: bool, /
    ) -> Pending | None: ...
    def gather(
        self,
        outputs: _Parts | None,
        input: Tensor,
        root: int,
        timeout: float,
        asynchronous: bool,
        /,
    ) -> Pending | None: ...
    def scatter(
        self,
        output: Tensor,
        inputs: _Parts | None,
        root: int,
        timeout: float,
        asynchronous: bool,
        /,
    ) -> Pending | None: ...
    def reduce_scatter(
        self,
        output: Tensor,
        inputs: _Parts,
        op: int,
        factor: float,
        timeout: float,
        asynchronous: bool,
        /,
    ) -> Pending | None: ...
    def all_to_all(
        self, outputs: _Parts, inputs: _Parts, like: Tensor, timeout: float, asynchronous: bool, /
    ) -> Pending | None: ...
    def copy_in_turn(self, to: Tensor, source: Tensor, asynchronous: bool, /) -> Pending | None: ...
    def send(
        self, tensor: Tensor, to: int, tag: int, timeout: float, asynchronous: bool, /
    ) -> Pending | None: ...
    def recv(
        self, tensor: Tensor, source: int, tag: int, timeout: float, asynchronous: bool, /
    ) -> Any: ...
