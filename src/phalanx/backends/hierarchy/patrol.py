"""The one thread of a rank that asks the store, which may be gone and then takes long to say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from phalanx import bystanders, logs
from phalanx.backends.hierarchy.heart import StoreError

_log = logs.area("hosts")

_SLICE = 0.05  # seconds between two looks at whether there is hope

T = TypeVar("T")


class Patrol:
    """Makes rounds at an interval, and runs the errands of other threads in between.

    Who sends for something waits as long as the store can be hoped for, and not for the store.
    """

    def __init__(
        self, go_round: Callable[[], None], interval: float, is_hopeless: Callable[[], bool]
    ) -> None:
        self._go_round = go_round
        self._interval = interval
        self._is_hopeless = is_hopeless
        self._told: set[str] = set()  # what has gone wrong on a round
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=self._walk, name="phalanx-warden", daemon=True)
        self._thread = bystanders.mark(thread)

    def start(self) -> None:
        """Begin, once what the rounds need is there."""
        self._thread.start()

    def _walk(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            try:
                errand = self._errands.get(timeout=max(due - time.monotonic(), 0))
            except Empty:
                self._watch_round()
                due = time.monotonic() + self._interval
                continue
            if errand is None:
                return
            errand()

    def _watch_round(self) -> None:
        """Go round; what goes wrong there is told, once, and does not end the rounds."""
        try:
            self._go_round()
        except Exception as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("a look at the other hosts failed, and is made again", exc_info=True)

    def do(self, errand: Callable[[], T]) -> T | None:
        """Return what an errand brings; None if the store cannot be asked.

        What else goes wrong is raised here, whichever thread has run it.
        """
        answers: list[T] = []
        faults: list[Exception] = []

        def run() -> None:
            if not self._is_hopeless():
                try:
                    answers.append(errand())
                except StoreError:
                    pass
                except Exception as error:
                    faults.append(error)

        if self._thread is threading.current_thread():
            run()
        else:
            self._wait_for(run)
        if faults:
            raise faults[0]
        return answers[0] if answers else None

    def _wait_for(self, run: Callable[[], None]) -> None:
        done = threading.Event()

        def run_and_tell() -> None:
            try:
                run()
            finally:
                done.set()

        if self._is_hopeless():
            return
        self._errands.put(run_and_tell)
        while not done.wait(_SLICE) and self._thread.is_alive() and not self._is_hopeless():
            pass

    def close(self) -> None:
        """Run what was sent for, and end; a thread that is held up by the store is left to it."""
        self._errands.put(None)
        while (
            self._thread is not threading.current_thread()
            and self._thread.is_alive()
            and not self._is_hopeless()
        ):
            self._thread.join(_SLICE)
