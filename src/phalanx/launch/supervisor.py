"""The launcher's side of a job: it passes on what ranks print, and decides when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phalanx.launch.descendants import kill_below
from phalanx.launch.keeper import ENDING, STACKS, Order
from phalanx.launch.output import Screen, Speaker, traceback_in
from phalanx.launch.start import STREAMS, Started
from phalanx.process import signal_name

# Once a rank has failed, the others may end by themselves, and say what they saw of it, for so
# many seconds; then they are asked to (SIGTERM), and some seconds later they are killed.
ALONE, ASKED = 3.0, 5.0
# Ranks that have run out of time may take so long to show where they stand.
SHOWN = 2.0
# A keeper that is told to kill its ranks may take so long.
OBEYED = 2.0
# An unfinished line is shown if it stays so that long.
MOMENT = 0.05
# After Ctrl-C or SIGTERM, ranks may take so long to put their things in order.
FAREWELL = 10.0

# How often to see whether an output that nobody reads has room again.
PAUSE = 0.05


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    status: int  # as of waitpid
    when: float
    record: dict[str, Any]  # what it reported of an exception
    last_words: str  # its traceback, or the end of what it wrote to stderr

    @property
    def code(self) -> int:
        """The exit code as a shell tells it; 1 after an exception, whatever ended it then."""
        if self.record:
            return 128 + signal.SIGINT if self.record["interrupted"] else 1
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code

    @property
    def signal(self) -> int:
        """The signal that ended it, or 0."""
        by_signal = os.WIFSIGNALED(self.status) and not self.record
        return os.WTERMSIG(self.status) if by_signal else 0

    @property
    def is_echo(self) -> bool:
        """Whether it only reports that another rank failed."""
        return bool(self.record.get("echo"))


@dataclass
class Outcome:
    """What became of one attempt to run a job."""

    ends: list[End] = field(default_factory=list)
    unasked: set[int] = field(default_factory=set)  # ranks that ended, or failed, untold
    interrupted: int = 0  # the signal by which the user ended the job
    timed_out: list[int] = field(default_factory=list)  # ranks that still ran at the deadline
    left: list[str] = field(default_factory=list)  # processes that ranks had left behind
    keeper: int = 0  # exit status of the keeper if it did not live to see its ranks end
    unable: str = ""  # why the keeper could not start the ranks
    unread: OSError | None = None  # why the output could not be written

    @property
    def first(self) -> End | None:
        """The rank that failed first; one that only heard of another's failure did not."""
        failed = [end for end in self.ends if end.status]
        own = [end for end in failed if end.rank in self.unasked]
        if not own and not self.interrupted and not self.timed_out:
            own = failed

        def order(end: End) -> tuple[bool, float]:
            # A death by signal is noticed a little later than what it does to other ranks.
            return end.is_echo, end.when - (1.0 if end.signal else 0.0)

        return min(own, key=order, default=None)


class Signals:
    """The signals that end a launcher, to be read from a pipe while this is entered.

    Each is two bytes: its number, and whether a terminal has sent it, which sends it to the ranks
    as well. Those that are ignored, as by nohup, stay so.
    """

    def __init__(self) -> None:
        self.ignored = [int(n) for n in ENDING if signal.getsignal(n) == signal.SIG_IGN]
        self._taken = set(ENDING) - set(self.ignored)
        self.pipe, self._end = os.pipe()

    def __enter__(self) -> Signals:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        threading.Thread(target=self._take, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def _take(self) -> None:
        while True:
            told = signal.sigwaitinfo(self._taken)
            os.write(self._end, bytes([told.si_signo, told.si_code > 0]))


class Supervisor:
    """Runs one attempt; `run` returns when nothing of it is left."""

    def __init__(
        self,
        started: Started,
        order: Order,
        screen: Screen,
        logs: Path | None,
        signals: Signals,
        say: Callable[[str], None],
        deadline: float | None,
        overdue: Callable[[list[int]], None],
    ) -> None:
        self._screen, self._signals, self._say = screen, signals, say
        self._deadline, self._overdue = deadline, overdue
        self._size = len(order.environments)
        self._selector = selectors.DefaultSelector()  # of all that is read
        self._urgent = selectors.DefaultSelector()  # of what is read also while nobody reads us
        self._keeper, self._spared = started.process, started.spared
        self._speakers: dict[tuple[int, str], Speaker] = {}
        self._records = [b""] * self._size
        self._ended: dict[int, tuple[int, float]] = {}  # status and time of ranks
        self._pids: list[int] = []
        self._open = 0  # pipes
        self._over = 0.0  # when the last rank had ended
        self._told = False  # whether ranks have been told to end
        self._steps: list[tuple[float, Callable[[], None]]] = []  # what to do, and when
        self._outcome = Outcome()
        for rank, readers in enumerate(started.readers):
            self._listen(rank, readers, logs)
        connection = Connection(started.link.detach())
        self._connection: Connection | None = connection
        order = replace(order, pipes=started.writers, ignored=signals.ignored)
        with contextlib.suppress(BrokenPipeError):  # then it is found to have ended
            connection.send_bytes(json.dumps(asdict(order)).encode())
        for selector in (self._selector, self._urgent):
            selector.register(signals.pipe, selectors.EVENT_READ, self._interrupt)
            selector.register(connection, selectors.EVENT_READ, self._hear)

    def run(self) -> Outcome:
        """Wait for all ranks to end, and see to it that they do."""
        try:
            while self._connection is not None or (self._open and not self._is_given_up()):
                self._step()
        finally:
            kill_below(os.getpid(), spared=self._spared)
            self._keeper.wait()
            self._selector.close()
            self._urgent.close()
        self._outcome.ends = [self._end(rank) for rank in sorted(self._ended)]
        for speaker in self._speakers.values():
            speaker.end()
        return self._outcome

    def _is_given_up(self) -> bool:
        """Whether all is over but for output that nobody reads."""
        return self._screen.is_full and time.monotonic() > self._over + ASKED

    def _listen(self, rank: int, readers: list[int], logs: Path | None) -> None:
        """Pass on what a rank writes to its pipes."""
        directory = logs / str(rank) if logs else None
        if directory:
            directory.mkdir(parents=True)
        streams = {"stdout": self._screen.output, "stderr": self._screen.errors}
        for name, reader in zip(STREAMS, readers, strict=True):
            take: Callable[[bytes], None] = partial(self._record, rank)
            if name in streams:
                log = directory / f"{name}.log" if directory else None
                speaker = Speaker(rank, self._screen, streams[name], log)
                self._speakers[rank, name] = speaker
                take = speaker.write
            self._selector.register(reader, selectors.EVENT_READ, partial(self._read, reader, take))
            self._open += 1

    def _step(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._time_out()
        if self._screen.problem and not self._outcome.unread:
            self._outcome.unread = self._screen.problem
            self._end_after(0.0, self._ask)
        while self._steps and self._steps[0][0] <= now:
            self._steps.pop(0)[1]()
        times = [time for time, _ in self._steps[:1]]
        times += [] if self._deadline is None else [self._deadline]
        stalled = self._screen.is_full
        times += [now + PAUSE] if stalled else [now + MOMENT] if self._screen.is_due else []
        selector = self._urgent if stalled else self._selector
        ready = selector.select(min(times) - now if times else None)
        for key, _ in ready:
            key.data()
        if not ready and not stalled and self._screen.is_due:
            self._screen.show()

    def _read(self, reader: int, take: Callable[[bytes], None]) -> None:
        data = os.read(reader, 1 << 16)
        if data:
            take(data)
            return
        self._selector.unregister(reader)
        os.close(reader)
        self._open -= 1

    def _record(self, rank: int, data: bytes) -> None:
        """Take a part of what a rank reports of the exception that ends its program.

        That counts as its failure: the process may have threads, or exit handlers, that take long.
        """
        self._records[rank] += data
        record = self._reported(rank)
        if record and not record["interrupted"]:
            self._failed(rank)

    def _reported(self, rank: int) -> dict[str, Any]:
        """Return what a rank has reported; nothing if it did not come to the end of it."""
        text, end, _ = self._records[rank].partition(b"\n")
        return dict(json.loads(text)) if end else {}

    def _failed(self, rank: int) -> None:
        if not self._told:
            self._outcome.unasked.add(rank)
            if not self._steps:
                self._end_after(ALONE, self._end_others)

    def _end_after(self, patience: float, ask: Callable[[], None]) -> None:
        """Ask ranks to end after some seconds, in a way that fits, and kill them if they do not."""
        first = time.monotonic() + patience
        self._steps = [(first, ask), (first + ASKED, self._kill)]

    def _end_others(self) -> None:
        self._say("a rank has failed: ending those that still run")
        self._ask()

    def _end_overdue(self) -> None:
        running = [rank for rank in self._outcome.timed_out if rank not in self._ended]
        self._overdue([self._pids[rank] for rank in running] if self._pids else [])
        self._ask()

    def _ask(self) -> None:
        self._tell(signal.SIGTERM)

    def _kill(self) -> None:
        self._tell(signal.SIGKILL)
        self._steps = [(time.monotonic() + OBEYED, self._kill_all)]

    def _kill_all(self) -> None:
        """End the keeper as well, which has not done as it was told: a debugger may hold it."""
        kill_below(os.getpid(), spared=self._spared)

    def _hear(self) -> None:
        """Take the keeper's next message, or notice its end."""
        assert self._connection is not None
        try:
            event = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            for selector in (self._selector, self._urgent):
                selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
            self._over = time.monotonic()
            if len(self._ended) < self._size:
                self._outcome.keeper = self._keeper.wait() or 1
            kill_below(os.getpid(), spared=self._spared)
            return
        if "pids" in event:
            self._pids = event["pids"]
        elif "unpinned" in event:
            self._say(event["unpinned"])
        elif "unable" in event:
            self._outcome.unable = event["unable"]
        elif "left" in event:
            self._outcome.left = event["left"]
        else:
            self._rank_ended(event["rank"], event["status"], event["when"])

    def _rank_ended(self, rank: int, status: int, when: float) -> None:
        self._ended[rank] = status, when
        if status:
            self._failed(rank)

    def _interrupt(self) -> None:
        number, from_terminal = os.read(self._signals.pipe, 2)
        if self._outcome.interrupted:
            self._steps = []
            self._kill()
            return
        self._outcome.interrupted = number
        if not self._pids:  # nothing of the user's runs yet
            kill_below(os.getpid(), spared=self._spared)
            return
        name = signal_name(number)
        self._say(f"{name}: ranks have {FAREWELL:g} s to end; once more kills them at once")
        self._told = True
        if not from_terminal:
            self._tell(number)
        self._steps = [(time.monotonic() + FAREWELL, self._kill)]

    def _time_out(self) -> None:
        running = [rank for rank in range(self._size) if rank not in self._ended]
        self._outcome.timed_out = running
        self._tell(STACKS)
        self._end_after(SHOWN, self._end_overdue)

    def _tell(self, number: int) -> None:
        self._told = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # then it is found to have ended
                os.kill(self._keeper.pid, signal.SIGCONT)  # stopped, it would not notice
                self._connection.send_bytes(json.dumps({"signal": number}).encode())

    def _end(self, rank: int) -> End:
        status, when = self._ended[rank]
        record = self._reported(rank)
        errors = self._speakers[rank, "stderr"]
        words = record.get("traceback") or traceback_in(errors.last)
        if record:  # what Python would have written there
            errors.note(words.encode(errors="backslashreplace"))
        return End(rank, status, record.get("when", when), record, words.rstrip())
