"""Let somebody at a terminal choose one of several jobs."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.text import Text

from phalanx.debug import ps
from phalanx.debug.outside import Job, look
from phalanx.debug.screen import Screen


def choose(console: Console, jobs: list[Job], interval: float) -> Job | None:
    """Return the job that is chosen, None if none is; the list is kept up to date."""
    chosen = jobs[0].id
    due = time.monotonic() + interval
    with Screen(console) as screen:
        while jobs:
            ids = [job.id for job in jobs]
            at = ids.index(chosen) if chosen in ids else 0
            chosen = ids[at]
            head = Text(f"{len(jobs)} jobs are running: watch which one?\n", "bold")
            keys = Text("\n↑↓ select   enter watch   q quit", "dim")
            screen.draw(Group(head, ps.shown(jobs, console.width, chosen), keys))
            key = screen.key(max(due - time.monotonic(), 0))
            if key in ("q", "quit", "escape"):
                return None
            if key in ("enter", "w"):
                return jobs[at]
            if key in ("down", "j", "up", "k"):
                step = 1 if key in ("down", "j") else -1
                chosen = ids[min(max(at + step, 0), len(ids) - 1)]
            if time.monotonic() >= due:
                jobs, due = look().jobs, time.monotonic() + interval
    return None
