"""A run of ``phalanx bench``: measure, show, keep."""

from __future__ import annotations

import json
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.bench import facts, plan, plots
from phalanx.bench.display import Display, Output, columns
from phalanx.bench.measurement import Result, Teams, measure
from phalanx.bench.operations import Operation
from phalanx.bench.peers import Peer
from phalanx.bench.ranks import place_ranks
from phalanx.bench.results import Results
from phalanx.launch.placement import usable_cores
from phalanx.machine import Machine


class Session:
    """One run: what is measured, shown and kept."""

    def __init__(
        self,
        arguments: Namespace,
        sections: list[plan.Section],
        peers: list[Peer],
        notes: list[str],
    ) -> None:
        self.arguments, self.sections, self.peers, self.notes = arguments, sections, peers, notes
        self.machine = facts.describe()
        self.rows: list[Result] = []
        self.errors: dict[tuple[str, str], list[str]] = {}  # where, by title of the peer and error
        self.interrupted = False

    def carry_out(self) -> int:
        """Measure, and return the exit code: 1 if Phalanx failed, 130 if interrupted."""
        began = time.monotonic()
        console = Output(stderr=self.arguments.json == "-", highlight=False, emoji=False)
        num_rows = sum(len(section.sizes) for section in self.sections)
        ours, *others = self.peers
        table = columns(ours, others)
        display = Display(console, table, self.arguments.ranks_as, num_rows)
        self._introduce(display)
        try:
            with _one_interrupt(), display:
                self._measure(display)
        except KeyboardInterrupt:
            self.interrupted = True
            display.say(f"\ninterrupted: {display.shown} of {num_rows} rows were measured", "bold")
        for (title, error), where in self.errors.items():
            tables = list(dict.fromkeys(where))
            further = f" (and {len(tables) - 1} further tables)" if len(tables) > 1 else ""
            display.say(f"\n{title} failed: {tables[0]}{further}: {error}", "red")
        self._keep(display, time.monotonic() - began)
        if self.interrupted:
            return 130
        return int(any(row["error"] and row["peer"] == ours.name for row in self.rows))

    def _introduce(self, display: Display) -> None:
        """Say what is measured where, and what will make the numbers worse."""
        here, arguments = self.machine, self.arguments
        display.say(
            f"{here['processor']}, {here['cores']} cores, {here['memory_gib']} GiB, "
            f"{here['system']}, Python {here['python']}, torch {here['torch']}",
            "dim",
        )
        versions = ", ".join(f"{peer.title} ({peer.version})" for peer in self.peers)
        checked = "results checked" if arguments.check else "results not checked"
        display.say(f"{versions}; {checked}; bandwidths in GB/s", "dim")
        for count in arguments.ranks:
            pinned = place_ranks(count).why if arguments.pin else "not pinned"
            display.say(f"{count} {arguments.ranks_as}, {pinned}", "dim")
        cores = usable_cores(Machine())
        crowded = [str(count) for count in arguments.ranks if count > cores]
        if crowded:
            self.notes.append(
                f"{', '.join(crowded)} ranks share {cores} cores: "
                "times tell of the system's scheduler as well"
            )
        if here["load_before"] >= facts.BUSY:
            advice = "" if arguments.pin or crowded else "; --pin keeps ranks from sharing a core"
            self.notes.append(
                f"the machine is busy (load {here['load_before']}): "
                f"times will be longer and vary{advice}"
            )
        for note in self.notes:
            display.say(f"note: {note}", "yellow")

    def _measure(self, display: Display) -> None:
        arguments = self.arguments
        rounds = min(arguments.rounds, arguments.iterations or arguments.rounds)
        effort = plan.Effort(arguments.seconds, rounds, arguments.iterations, arguments.warmup)
        for ranks in arguments.ranks:
            with Teams(self.peers, ranks, pinned=arguments.pin) as teams:
                for section in (one for one in self.sections if one.ranks == ranks):
                    display.begin(section)
                    for cell in section.cells():
                        tell = partial(display.tell, cell.num_bytes)
                        found = measure(teams, cell, effort, tell)
                        display.add(self._complete(section, found))

    def _complete(self, section: plan.Section, found: list[Result]) -> dict[str, Result]:
        """Add bandwidths and ratios to the results of a cell; return them by peer."""
        titles = {peer.name: peer.title for peer in self.peers}
        ours = found[0]
        for result in found:
            result |= bandwidths(result, section.operation)
            if result is not ours and not ours["error"] and not result["error"]:
                result["ratio"] = result["p50"] / ours["p50"]
            if result["error"]:
                where = self.errors.setdefault((titles[result["peer"]], result["error"]), [])
                where.append(section.title(self.arguments.ranks_as))
        self.rows += found
        return {result["peer"]: result for result in found}

    def _keep(self, display: Display, seconds: float) -> None:
        arguments = self.arguments
        names = {
            peer.name: {"title": peer.title, "kind": peer.kind, "version": peer.version}
            for peer in self.peers
        }
        data = {
            "machine": self.machine,
            "pinned": arguments.pin,
            "asynchronous": arguments.asynchronous,
            "checked": arguments.check,
            "seconds": round(seconds, 1),
            "interrupted": self.interrupted,
            "notes": self.notes,
            "peers": names,
            "results": self.rows,
        }
        if arguments.json == "-":
            print(json.dumps(data, indent=1))
        elif arguments.json:
            Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n")
            display.say(f"\nwrote {arguments.json}", "dim")
        if arguments.plot and any(not row["error"] for row in self.rows):
            self._draw(names)
            display.say(f"\nwrote {arguments.plot}", "dim")

    def _draw(self, names: dict[str, dict[str, str]]) -> None:
        kind = self.arguments.ranks_as
        ours, *others = (peer.name for peer in self.peers)
        panels = []
        for section in self.sections:
            rows = [row for row in self.rows if _belongs(row, section)]
            if any(not row["error"] for row in rows):
                operation = section.operation
                panels.append(
                    plots.Section(
                        section.title(kind),
                        Results({"results": rows, "peers": names}),
                        (kind, section.ranks, operation.name),
                        operation.moves(section.ranks),
                        ours,
                        others[0] if others else None,
                    )
                )
        here = self.machine
        caption = f"phalanx bench: {here['processor']}, {here['cores']} cores"
        plots.draw(self.arguments.plot, panels, f"{caption}, torch {here['torch']}")


def _belongs(row: dict[str, Any], section: plan.Section) -> bool:
    return (
        row["ranks"] == section.ranks
        and row["operation"] == section.operation.name
        and row["dtype"] == section.conditions.dtype
        and row["reduce_op"] in (None, section.conditions.reduce_op)
    )


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Have the first Ctrl-C end what is done meanwhile, and no other disturb how it ends."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def bandwidths(result: Result, operation: Operation) -> dict[str, float]:
    """Return nccl-tests' bandwidths in GB/s: bytes per second, and what the bus carries for it."""
    if result["error"] or not operation.sized:
        return {}
    algbw = result["bytes"] / result["p50"] / 1e9
    return {"algbw": algbw, "busbw": algbw * operation.moves(result["ranks"])}
