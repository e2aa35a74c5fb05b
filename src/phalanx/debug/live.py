"""The live table of ``phalanx top``: what it shows, and what its keys do."""

from __future__ import annotations

import threading
import time

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from phalanx.debug import looks, outside, top, verdict, why
from phalanx.debug.outside import Job
from phalanx.debug.screen import Screen
from phalanx.debug.text import amount, printable

_FIRST = 0.3  # seconds to the first rates
_DETAIL = 6  # lines about the selected rank
_COLUMNS = [
    looks.Column("RANK", 10, right=True),
    looks.Column("PID", 2, right=True),
    looks.Column("STATE", 9),
    looks.Column("FOR", 8, right=True),
    looks.Column("GROUP", 4),
    looks.Column("OPERATION", 9, least=26),
    looks.Column("SEQ", 3, right=True),
    looks.Column("WAITS FOR", 7),
    looks.Column("OP/S", 1, right=True),
    looks.Column("BYTES/S", 0, right=True),
    looks.Column("CALL SITE", 6),
]
_HELP = [
    ("↑ ↓  k j", "select a rank; Home, End and the page keys work too"),
    ("enter  w", "say why the job does not move, with stacks"),
    ("s", "sort by rank, longest wait, operations or bytes per second"),
    ("f", "show all ranks, those that wait, or the others"),
    ("p  space", "pause, go on"),
    ("?  h", "this help"),
    ("escape", "back to the table"),
    ("q  Ctrl-C", "quit"),
]


def watch(console: Console, job: Job, interval: float, sort: str, show: str) -> int:
    """Show what a job does until it ends or somebody quits."""
    live = Live(job, sort, show)
    due = time.monotonic() + min(_FIRST, interval)
    with Screen(console) as screen:
        while not live.over:
            screen.draw(live.frame(*console.size))
            # What comes from another thread is shown soon.
            patience = 0.1 if live.busy else due - time.monotonic()
            key = screen.key(max(patience, 0))
            if key == "quit":
                break
            if key is not None:
                live.press(key)
            if time.monotonic() >= due:
                live.look()
                due = time.monotonic() + interval
    if live.ended:
        console.print(f"job {job.name} has ended")
    return 0


class Live:
    """What is shown of a job, and how; a key at a time."""

    def __init__(self, job: Job, sort: str = "rank", show: str = "all") -> None:
        self.job = self.before = job
        self.sort, self.show = sort, show
        self.rank = 0  # the selected one
        self.page = "table"  # or "why", "help"
        self.paused = self.ended = self.over = False
        self._scrolled = 0
        self._reason: why.Reason | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> None:
        """Look at the job again, unless paused."""
        if self.paused:
            return
        again = outside.look_again(self.job)
        if again is None:
            self.ended = self.over = True
        else:
            self.before, self.job = self.job, again

    def rows(self) -> list[top.Row]:
        return top.arranged(top.rows(self.before, self.job), self.sort, self.show)

    def press(self, key: str) -> None:
        """Do what a key asks for."""
        if self.page != "table":
            self._press_on_page(key)
        elif key == "q":
            self.over = True
        elif key in ("p", "space"):
            self.paused = not self.paused
        elif key == "s":
            self.sort = _next(list(top.SORTS), self.sort)
        elif key == "f":
            self.show = _next(list(top.FILTERS), self.show)
        elif key in ("enter", "w"):
            self._ask_why()
        elif key in ("?", "h"):
            self.page, self._scrolled = "help", 0
        else:
            self._select(key)

    def _press_on_page(self, key: str) -> None:
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "page down": 10, "page up": -10}
        if key in steps:
            self._scrolled = max(self._scrolled + steps[key], 0)
        elif key == "w" and self.page == "why" and not self.busy:
            self._ask_why()
        elif key in ("q", "escape", "enter", "backspace", "left", "?", "h"):
            self.page = "table"

    def _select(self, key: str) -> None:
        shown = [row.rank for row in self.rows()]
        if not shown:
            return
        at = shown.index(self.rank) if self.rank in shown else 0
        last = len(shown) - 1
        to = {
            "down": at + 1,
            "j": at + 1,
            "up": at - 1,
            "k": at - 1,
            "page down": at + 10,
            "page up": at - 10,
            "home": 0,
            "g": 0,
            "end": last,
            "G": last,
        }.get(key, at)
        self.rank = shown[min(max(to, 0), last)]

    def _ask_why(self) -> None:
        """Find the reason in a thread of its own: reading stacks takes its time."""
        self.page, self._scrolled, self._reason = "why", 0, None
        self._thread = threading.Thread(target=self._find_reason, daemon=True)
        self._thread.start()

    def _find_reason(self) -> None:
        reason = why.explain(self.before, self.job)
        if reason.cause != "moving":
            why.add_stacks(reason, self.job)
        self._reason = reason

    def frame(self, width: int, height: int) -> RenderableType:
        """Return what is to be on a terminal of this size."""
        if self.page == "table":
            return self._table(width, height)
        return self._page(width, height)

    def _page(self, width: int, height: int) -> RenderableType:
        console = Console(width=max(width - 4, 20), highlight=False)
        if self.page == "help":
            body: RenderableType = _help()
        elif self._reason is None:
            body = Text("looking at the ranks and their stacks ...", "dim")
        else:
            body = why.shown(self._reason, console.width)
        lines = console.render_lines(body, pad=False)
        room = max(height - 4, 1)
        self._scrolled = min(self._scrolled, max(len(lines) - room, 0))
        below = len(lines) - room - self._scrolled
        text = Text("\n").join(
            Text.assemble(*((part.text, part.style or "") for part in line))
            for line in lines[self._scrolled : self._scrolled + room]
        )
        more = f"   ↓ {below} more lines" if below > 0 else ""
        keys = "escape back" + ("   w look again" if self.page == "why" else "") + more
        head = Rule(Text(f" {self._heading()} ", "bold"), style="dim", align="left")
        return _with_keys(Group(head, Padding(text, (1, 2))), Text(keys, "dim"))

    def _heading(self) -> str:
        return "keys" if self.page == "help" else f"why: job {self.job.name}"

    def _table(self, width: int, height: int) -> RenderableType:
        found = self.rows()
        shown = [row.rank for row in found]
        at = shown.index(self.rank) if self.rank in shown else 0
        said = _verdict(self.job).wrap(Console(width=width), width)[: max(height // 6, 1)]
        room = height - len(said) - 5  # two lines above, the heading, one below, the keys
        detailed = bool(found) and room - _DETAIL >= min(len(found), 8)
        room = max(room - (_DETAIL if detailed else 0), 1)
        first = min(max(at - room // 2, 0), max(len(found) - room, 0))
        window = found[first : first + room]
        parts: list[RenderableType] = [
            *_head(self.job, found, self.paused),
            _grid(self.job, window, width, self.rank),
        ]
        if len(found) > len(window):
            parts.append(Text(f"{first + 1} to {first + len(window)} of {len(found)} ranks", "dim"))
        elif not found:
            parts.append(Text(f"none of the ranks is to be shown: {self.show}", "dim"))
        parts += said
        if detailed:
            parts += [Rule(style="dim"), self._detail(shown[at])]
        return _with_keys(Group(*parts), self._keys())

    def _detail(self, number: int) -> RenderableType:
        """Tell more of the selected rank: where it is in each of its groups."""
        rank = self.job.ranks[number]
        state = verdict.condition(self.job, rank)
        head = Text.assemble(
            (f"rank {number}", "bold"), "  ", (state, looks.style(state)), f"  pid {rank.pid}"
        )
        head.append(f"  on {printable(rank.host)}  cpu {rank.cpu_seconds:.1f} s", "dim")
        lines = [head]
        for group in self.job.groups:
            seat = group.seat(number)
            if seat is None or seat.last is None:
                continue
            counts = f"collectives: {seat.collectives}, messages: {seat.messages}; last: "
            said = f"group '{printable(group.name)}': {counts}{printable(seat.last.account)}"
            lines.append(looks.account(said))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines[: _DETAIL - 2])

    def _keys(self) -> Text:
        pairs = [("q", "quit"), ("p", "go on" if self.paused else "pause")]
        pairs += [("s", f"sort: {self.sort}"), ("f", f"show: {self.show}")]
        pairs += [("↑↓", "select"), ("w", "why"), ("?", "help")]
        text = Text(no_wrap=True, overflow="ellipsis")
        for key, does in pairs:
            text.append(f" {key} ", "reverse").append(f" {does}   ")
        return text


def _with_keys(body: RenderableType, keys: Text) -> Layout:
    """Put the keys on the last line."""
    whole = Layout()
    whole.split_column(Layout(body), Layout(keys, size=1))
    return whole


def summary(job: Job, found: list[top.Row], width: int) -> RenderableType:
    """Return the table, with what is to say of the job above and below it."""
    return Group(*_head(job, found), _grid(job, found, width), _verdict(job))


def _head(job: Job, found: list[top.Row], paused: bool = False) -> list[Text]:
    state = verdict.summary(job)
    first = Text.assemble((top.title(job), "bold"), "  ", (f"● {state}", looks.style(state)))
    if paused:
        first.append("  paused", "reverse")
    operations = sum(row.operations_per_second for row in found)
    volume = sum(row.bytes_per_second for row in found)
    second = Text(f"{top.census(job)}  {amount(operations)} op/s  {amount(volume, 'B')}/s  ", "dim")
    second.append(printable(job.short_command))
    for line in (first, second):
        line.no_wrap, line.overflow = True, "ellipsis"
    return [first, second]


def _grid(job: Job, found: list[top.Row], width: int, selected: int | None = None) -> Table:
    blamed = {culprit.rank for culprit in verdict.culprits(job)[:1]}
    texts = [_texts(row, row.rank in blamed, row.rank == selected) for row in found]
    table = looks.grid(_COLUMNS, texts, width)
    for shown, row in zip(table.rows, found, strict=True):
        if row.rank == selected:
            shown.style = "reverse"
    return table


def _texts(row: top.Row, blamed: bool, selected: bool) -> list[Text]:
    texts = [looks.plain(cell) for cell in top.cells(row)]
    if blamed:
        texts[0] = looks.plain(f"▶ {row.rank}")
    if selected:  # one even bar
        return texts
    texts[2].stylize(looks.style(row.state))
    texts[7].stylize("yellow")
    for quiet in (1, 4, 6, 10):
        texts[quiet].stylize("dim")
    if blamed:
        texts[0].stylize("bold red")
        texts[5].stylize("bold")
    return texts


def _verdict(job: Job) -> Text:
    said = printable(top.straggler(job))
    if not job.deadlock and not verdict.culprits(job):
        return Text(said, "dim")
    return looks.account(said)


def _help() -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for key, does in _HELP:
        table.add_row(Text(key, "bold"), does)
    return table


def _next(known: list[str], current: str) -> str:
    return known[(known.index(current) + 1) % len(known)]
