"""What the system says of processes."""

from __future__ import annotations

import os
import signal

_TICKS = os.sysconf("SC_CLK_TCK")


class Stat:
    """What /proc says of a process or thread; its fields are counted as in proc(5)."""

    def __init__(self, directory: str) -> None:
        try:
            with open(f"{directory}/stat", errors="replace") as file:
                text = file.read()
        except OSError:
            text = ""
        # The command's name stands in parentheses and may hold anything.
        start, _, rest = text.rpartition(")")
        self.name = start.partition("(")[2]
        self._fields = rest.split()
        self.state = self._fields[0] if self._fields else ""
        self.alive = self.state not in ("", "Z", "X")
        self.stopped = self.state in ("T", "t")  # by a signal, or by a debugger

    def number(self, field: int) -> int:
        return int(self._fields[field - 3]) if self._fields else 0

    @property
    def parent(self) -> int:
        return self.number(4)

    @property
    def start_time(self) -> int:
        return self.number(22)

    @property
    def cpu_seconds(self) -> float:
        return (self.number(14) + self.number(15)) / _TICKS


def signal_name(number: int) -> str:
    """Name a signal; those that have no name are told by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
