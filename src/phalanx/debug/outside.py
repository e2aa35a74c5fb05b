"""Jobs of this machine seen from outside: nothing is asked of their ranks, nothing is written.

A job is one world. Its ranks show in shared memory what they do and what they wait for; this
module reads that memory, and what the system says of their processes, while they run or hang.
"""

from __future__ import annotations

import os
import pwd
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx import _native
from phalanx.commands import CommandError
from phalanx.debug.text import duration, printable
from phalanx.launch.environment import JOB_VARIABLE
from phalanx.process import Stat

_HEAP = "/memfd:phalanx-heap"
_HELPERS = ("from multiprocessing.", "from phalanx.launch.keeper ")  # in between, on command lines


class JobNotFound(CommandError, LookupError):
    """No job, or more than one, is what was asked for."""


@dataclass(frozen=True)
class Wait:
    """What a thread of a rank waits for; shown once it has waited for about 50 ms."""

    op: str
    what: str  # "recv(float32[4], tag=0) from rank 1"
    group: str
    site: str
    started_ns: int
    needs: list[int]  # world ranks that must act
    any: bool  # one of them is enough
    blocked: bool  # nothing but they can end it, no timeout of the call either
    lane: bool  # an asynchronous operation's thread, not the user's
    own: bool  # for another thread of its own rank
    making: bool  # for the others to make a group


@dataclass(frozen=True)
class Operation:
    """One operation as its rank announced it."""

    kind: str  # "collective" or "message"
    sequence: int
    op: str
    api: str
    dtype: str
    shape: list[int]
    reduce: str | None
    root: int | None
    peer: int | None
    tag: int | None
    bytes: int
    site: str
    state: str  # "waiting", "done", "timed out", ...
    posted_ns: int
    finished_ns: int  # 0: not yet
    text: str  # "all_reduce(float32[4], SUM)"
    account: str  # the same with its number, place, state and age


@dataclass(frozen=True)
class Seat:
    """What one rank has done in one group."""

    present: bool
    left: bool
    clock: int
    collectives: int
    messages: int
    collective: Operation | None  # the last one
    message: Operation | None
    collective_bytes: list[int]  # of the last few, oldest first
    message_bytes: list[int]

    @property
    def last(self) -> Operation | None:
        """The later of the last collective and the last message."""
        made = [operation for operation in (self.collective, self.message) if operation]
        return max(made, key=lambda operation: operation.posted_ns, default=None)


@dataclass(frozen=True)
class Group:
    name: str
    members: list[int]  # world ranks
    seats: list[Seat]
    broken: str  # why it cannot be used any more, if so

    def seat(self, rank: int) -> Seat | None:
        """Return the seat of a world rank."""
        return self.seats[self.members.index(rank)] if rank in self.members else None


@dataclass(frozen=True)
class Rank:
    rank: int
    pid: int
    thread: int
    host: str
    presence: str  # "absent", "joining", "here", "left", "failed"
    signal: int  # that it was dying of
    ended_ns: int
    why: str  # how it failed, by its own word
    waits: list[Wait]
    alive: bool  # its process
    state: str  # of its thread, as the system has it: R, S, D, T, ...; "" when gone
    cpu_seconds: float
    remote: bool = False  # on another host: its process cannot be seen from here

    @property
    def gone(self) -> bool:
        """Its process has ended without a word."""
        return self.presence in ("joining", "here") and not self.alive and not self.remote

    @property
    def ended(self) -> bool:
        """Its thread has returned, without leaving its world; its process lives on."""
        return self.presence in ("joining", "here") and self.alive and not self.state

    @property
    def stopped(self) -> bool:
        return self.alive and self.state in ("T", "t")


@dataclass(frozen=True)
class Job:
    id: str  # 16 hexadecimal digits; eight are shown
    threads: bool
    started_ns: int
    seen_ns: int
    deadlock: str  # who waits for whom for ever, if so
    ranks: list[Rank]
    groups: list[Group]
    launched_as: str = ""  # the name that the launcher has given to it
    is_one_of_several: bool = False  # under that name

    @property
    def name(self) -> str:
        if self.is_one_of_several:
            return f"{self.launched_as}/{self.id[:4]}"
        return self.launched_as or self.id[:8]

    def answers_to(self, name: str) -> bool:
        """Say whether a name, or the beginning of one, means this job."""
        return self.name.startswith(name) or self.id.startswith(name)

    @property
    def age(self) -> float:
        return (self.seen_ns - self.started_ns) * 1e-9

    @property
    def pids(self) -> list[int]:
        return sorted({rank.pid for rank in self.ranks if rank.pid and not rank.remote})

    @property
    def over(self) -> bool:
        return not any(r.alive and r.presence in ("joining", "here") for r in self.ranks)

    @property
    def command(self) -> str:
        """The command line of the first rank, or of what started it by multiprocessing."""
        pid = next((rank.pid for rank in self.ranks if rank.alive), 0)
        lines = [_command(pid), *map(_command, _ancestors(pid))]
        own = (line for line in lines if not any(helper in line for helper in _HELPERS))
        return next(own, lines[0])

    @property
    def title(self) -> str:
        """What it is: "4 ranks, 16 s old: python train.py"."""
        ranks = "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"{ranks}, {duration(self.age)} old: {printable(self.short_command)}"

    @property
    def short_command(self) -> str:
        """The command line without the folder of its program."""
        program, _, rest = self.command.partition(" ")
        return f"{os.path.basename(program)} {rest}".rstrip()

    def last_operation(self, rank: int) -> tuple[Group, Operation] | None:
        """Return what a rank did last in any group."""
        made = [
            (group, seat.last)
            for group in self.groups
            if (seat := group.seat(rank)) is not None and seat.last is not None
        ]
        return max(made, key=lambda pair: pair[1].posted_ns, default=None)


@dataclass
class View:
    """What a look around has shown."""

    jobs: list[Job] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # processes that may not be looked at
    strange: list[str] = field(default_factory=list)  # heaps that could not be read, and why


def look(pids: Iterable[int] | None = None) -> View:
    """Look at the jobs that these processes take part in; at all of this user's by default."""
    view = View()
    heaps: dict[tuple[int, int], dict[str, Any] | None] = {}
    owners: dict[int, int] = {}
    for pid in sorted(set(_own_processes() if pids is None else pids)):
        try:
            for path, file in _heap_files(pid):
                if file not in heaps:
                    heaps[file] = _read(path, view)
                heap = heaps[file]
                if heap is not None and _is_owner(pid, heap):
                    owners[heap["nonce"]] = pid
        except PermissionError:
            view.closed.append(pid)
        except OSError:
            continue  # it ended meanwhile
    found = [heap for heap in heaps.values() if heap is not None]
    boards = [board for heap in found for board in heap["boards"]]
    for heap in found:
        for roster in heap["rosters"]:
            mine = [board for board in boards if board["roster"] == roster["id"]]
            job = _job(roster, mine, owners)
            if not job.over:
                view.jobs.append(job)
    worlds = Counter(job.launched_as for job in view.jobs)
    view.jobs = [
        replace(job, is_one_of_several=job.launched_as != "" and worlds[job.launched_as] > 1)
        for job in sorted(view.jobs, key=lambda job: job.started_ns)
    ]
    return view


def find(wanted: str | None = None) -> Job:
    """Find the one job that an id, its beginning, or a process id means; None: the only one."""
    view = look()
    jobs = view.jobs
    if wanted is not None:
        pid = int(wanted) if wanted.isdigit() else None
        jobs = (
            [job for job in view.jobs if pid in job.pids]
            or [job for job in view.jobs if job.answers_to(wanted.lower())]
            or ([] if pid is None else _jobs_of(pid, view))
        )
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        what = "no job of this user is running on this machine"
        if wanted is not None:
            known = ", ".join(job.name for job in view.jobs) or "none"
            what = f"there is no job '{wanted}'; jobs of this user on this machine: {known}"
        raise JobNotFound(what + _notes(view))
    several = "".join(f"\n  {job.name}  {job.title}" for job in jobs)
    raise JobNotFound(
        f"{len(jobs)} jobs are running, name one of them:{several}"
        if wanted is None
        else f"'{wanted}' may mean any of these jobs:{several}"
    )


def add_job_argument(parser: ArgumentParser) -> None:
    """Let a command take what `find` understands, and a shell complete the names of jobs."""

    def complete(prefix: str, **_: object) -> dict[str, str]:
        return {job.name: job.title for job in look().jobs}

    told = "id of the job, its beginning, or a process id"
    action = parser.add_argument("job", nargs="?", help=told)
    action.completer = complete  # type: ignore[attr-defined]


def look_again(job: Job) -> Job | None:
    """Look at a job once more; None if it has ended."""
    found = [again for again in look(job.pids).jobs if again.id == job.id]
    return found[0] if found else None


def _read(path: str, view: View) -> dict[str, Any] | None:
    try:
        return _native.look_into(path)
    except ValueError:
        return None  # the name is a coincidence
    except RuntimeError as error:  # a DistBackendError: importing that class would import torch
        if os.path.exists(path):
            view.strange.append(str(error))
        return None


def _notes(view: View) -> str:
    return "".join(f"\n{note}" for note in view.strange)


def _jobs_of(pid: int, view: View) -> list[Job]:
    """Return the jobs of a rank's process, or of a process that has started one."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise JobNotFound(f"there is no process {pid} and no job '{pid}'") from None
    own = look([pid])
    if own.closed:
        why = (
            "the system does not allow it"
            if owner == os.geteuid()
            else f"it belongs to user {_user(owner)}, and only the same user can look at a job"
        )
        others = len(set(view.closed) - {pid})
        also = f"; {others} other processes of this user cannot be either" if others else ""
        raise JobNotFound(f"process {pid} cannot be looked at: {why}{also}")
    # One of another user, for root: look at all of its ranks.
    jobs = {job.id: job for job in look(own_pid for job in own.jobs for own_pid in job.pids).jobs}
    jobs.update((job.id, job) for job in view.jobs)
    mine = [job for job in jobs.values() if pid in job.pids]
    return mine or [job for job in jobs.values() if any(pid in _ancestors(p) for p in job.pids)]


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _own_processes() -> Iterator[int]:
    user = os.geteuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                yield int(name)
        except OSError:
            continue


def _heap_files(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the heaps that a process has open, its own and some of its peers', by path and file."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if os.readlink(path).startswith(_HEAP):
                info = os.stat(path)
                yield path, (info.st_dev, info.st_ino)
        except FileNotFoundError:
            continue


def _is_owner(pid: int, heap: dict[str, Any]) -> bool:
    """Say whether a heap is this process' own, not one that it inherited or shares."""
    if Stat(f"/proc/{pid}").start_time != heap["start_time"]:
        return False
    # A process in a container knows itself by another number than we do.
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return line.split()[-1] == str(heap["pid"])
    return str(pid) == str(heap["pid"])


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace").strip()


def _launched_as(pid: int) -> str:
    """Return the name that `phalanx run` gave to the job of a rank, "" if it was not run so."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    found = (each for each in variables if each.startswith(f"{JOB_VARIABLE}=".encode()))
    name = next(found, b"").partition(b"=")[2].partition(b":")[0]
    return printable(name.decode(errors="replace"))


def _ancestors(pid: int) -> Iterator[int]:
    while (pid := Stat(f"/proc/{pid}").parent) > 1:
        yield pid


def _job(roster: dict[str, Any], boards: list[dict[str, Any]], owners: dict[int, int]) -> Job:
    members = enumerate(roster["members"])
    ranks = [_rank(number, member, roster["threads"], owners) for number, member in members]
    return Job(
        id=f"{roster['id']:016x}",
        threads=roster["threads"],
        started_ns=roster["started_ns"],
        seen_ns=time.monotonic_ns(),
        deadlock=roster["deadlock"],
        ranks=ranks,
        groups=[_group(board) for board in boards if _fits(board, len(roster["members"]))],
        launched_as=_launched_as(next((rank.pid for rank in ranks if rank.alive), 0)),
    )


def _fits(board: dict[str, Any], size: int) -> bool:
    return all(rank < size for rank in board["members"])


def _rank(number: int, member: dict[str, Any], threads: bool, owners: dict[int, int]) -> Rank:
    if member["remote"]:
        told = ("pid", "thread", "host", "presence", "signal", "ended_ns", "why", "remote")
        known = {name: member[name] for name in told}
        return Rank(rank=number, waits=[], alive=False, state="", cpu_seconds=0.0, **known)
    pid = owners.get(member["nonce"], member["pid"])
    process = Stat(f"/proc/{pid}")
    alive = process.alive and process.start_time == member["start_time"]
    inside_number = pid == member["pid"]  # thread numbers mean something here
    thread = Stat(f"/proc/{pid}/task/{member['thread']}") if threads and inside_number else process
    state = thread.state if alive else ""
    if state == "S" and not threads and _has_running_thread(pid):
        state = "R"
    return Rank(
        rank=number,
        pid=pid,
        thread=member["thread"],
        host=member["host"],
        presence=member["presence"],
        signal=member["signal"],
        ended_ns=member["ended_ns"],
        why=member["why"],
        waits=[Wait(**wait) for wait in member["waits"]],
        alive=alive,
        state=state,
        cpu_seconds=thread.cpu_seconds,
    )


def _has_running_thread(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(Stat(f"/proc/{pid}/task/{thread}").state == "R" for thread in threads)


def _group(board: dict[str, Any]) -> Group:
    return Group(
        name=board["name"],
        members=board["members"],
        seats=[_seat(seat) for seat in board["seats"]],
        broken=board["broken"],
    )


def _seat(seat: dict[str, Any]) -> Seat:
    last = {
        kind: None if seat[kind] is None else Operation(**seat[kind])
        for kind in ("collective", "message")
    }
    return Seat(**{**seat, **last})
