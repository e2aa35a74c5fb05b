"""Threads that wait for what can only be waited for by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from phalanx import bystanders


class Helpers:
    """Runs each task at once, on an idle thread or a new one. They never act for a rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(bystanders.mark(thread))
                thread.start()
            self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # a thread that is idle keeps nothing alive
            with self._lock:
                self._idle += 1

    def close(self, seconds: float) -> None:
        """End the threads; those that do not in this time are left to themselves."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
