"""Run a program on the calling rank, and look at every buffer that it was given."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import phalanx as dist
from trials.effects import Effect, an_object, values
from trials.oracle import Place
from trials.programs import COLLECTIVES, MESSAGES, Program, Step


class InjectedError(Exception):
    """What a rank raises that is made to fail."""


@dataclass
class Report:
    """How one rank's run ended, as it saw it."""

    place: int = -1  # of the step it came to
    outcome: str = "running"
    text: str = ""
    problems: list[str] = field(default_factory=list)  # buffers that are not as they must be


class Interpreter:
    """One rank, running its part of a program."""

    def __init__(self, program: Program, partners: dict[Place, dict[int, int]], file: Path) -> None:
        self.program = program
        self.partners = partners
        self.file = file
        self.rank = dist.get_rank()
        self.report = Report()
        self.works: dict[int, Effect] = {}
        self.helpers: list[threading.Thread] = []
        self.frosts: list[subprocess.Popen[bytes]] = []
        self.over = threading.Event()
        self.groups: list[Any] = [None]
        for ranks in program.groups[1:]:
            self.groups.append(dist.new_group(ranks, timeout=program.timeout))
        dist.barrier()

    def run(self) -> None:
        """Do all steps; leave a report, also when one of them raises."""
        effects: list[Effect] = []
        try:
            for place, step in enumerate(self.program.steps[self.rank]):
                self.report.place = place
                if step.kind == "leave":
                    break
                effects = [Effect(self.program, (self.rank, place))]
                self._do(step, effects[0])
            self._end("finished")
        except BaseException as error:
            for effect in [*effects, *self.works.values()]:
                self._check_untouched(effect)
            self._end(type(error).__name__, str(error))
            raise

    def _end(self, outcome: str, text: str = "") -> None:
        self.over.set()
        for helper in self.helpers:
            helper.join()
        for frost in self.frosts:
            frost.wait()
        self.report.outcome, self.report.text = outcome, text
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(pickle.dumps(self.report))
        fresh.rename(self.file)

    def _check_untouched(self, effect: Effect) -> None:
        """After an error: an operation that cannot have come about has written nothing."""
        if effect.place not in self.partners and not effect.is_untouched():
            self.report.problems.append(f"{effect.step} failed but wrote to its output")

    def _check(self, effect: Effect) -> None:
        if effect.step.kind in ("send", "isend"):
            return
        partners = self.partners.get(effect.place)
        if partners is None:
            self.report.problems.append(f"{effect.step} succeeded, which it cannot")
        elif not effect.is_right(partners):
            self.report.problems.append(f"{effect.step} with {partners} has a wrong result")

    def _do(self, step: Step, effect: Effect) -> None:
        if step.kind in COLLECTIVES or step.kind in MESSAGES:
            effect.work = self._call(step, effect)
            if effect.work is None:
                self._check(effect)
            else:
                self.works[step.key] = effect
        elif step.kind != "wait":
            getattr(self, f"_{step.kind}")(step)
        elif step.key in self.works:
            self.works[step.key].work.wait()
            self._check(self.works.pop(step.key))

    def _sleep(self, step: Step) -> None:
        time.sleep(step.seconds)

    _stall = _sleep

    def _spin(self, step: Step) -> None:
        until = time.monotonic() + step.seconds
        while time.monotonic() < until:
            pass

    def _helper(self, step: Step) -> None:
        tensor, group = values(step, self.rank, step.key), self.groups[step.group]

        def act() -> None:
            time.sleep(step.seconds)
            with contextlib.suppress(dist.PeerFailed):  # the group may be broken meanwhile
                dist.send(tensor, step.peer, group, step.tag)

        self._start(threading.Thread(target=act))

    def _watcher(self, step: Step) -> None:
        self._start(threading.Thread(target=self.over.wait))

    def _start(self, helper: threading.Thread) -> None:
        helper.start()
        self.helpers.append(helper)

    def _raise(self, step: Step) -> None:
        raise InjectedError(f"rank {self.rank} was told to fail")

    def _exit(self, step: Step) -> None:
        sys.exit(3)

    def _os_exit(self, step: Step) -> None:
        self._end("os_exit")
        os._exit(5)

    def _kill(self, step: Step) -> None:
        self._end("kill")
        os.kill(os.getpid(), signal.SIGKILL)

    def _freeze(self, step: Step) -> None:
        """Have this process stopped in a moment, whatever it does then, and let go on later."""
        stop, go = f"kill -STOP {os.getpid()}", f"kill -CONT {os.getpid()}"
        script = f"sleep 0.01; {stop}; sleep {step.seconds}; {go}"
        self.frosts.append(subprocess.Popen(["sh", "-c", script]))

    def _kill_later(self, step: Step) -> None:
        killer = threading.Timer(step.seconds, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def _call(self, step: Step, effect: Effect) -> Any:
        """Make the call; each kind of operation has a line of its own."""
        rank, group, root = self.rank, self.groups[step.group], step.root
        out, own, at_root = effect.outputs, values(step, rank, step.key), rank == root
        op = getattr(dist.ReduceOp, step.reduce)
        cut = step.kind.startswith(("scatter", "reduce_scatter", "all_to_all"))
        numbers = range(len(effect.group) if cut else 0)
        parts = [values(step, rank, step.key, part) for part in numbers]
        common = {"group": group, "async_op": step.later}
        match step.kind:
            case "barrier":
                return dist.barrier(**common)
            case "broadcast":
                return dist.broadcast(out[0], root, **common)
            case "all_reduce":
                return dist.all_reduce(out[0], op, **common)
            case "all_reduce_coalesced":
                return dist.all_reduce_coalesced(out, op, **common)
            case "reduce":
                return dist.reduce(out[0], root, op, **common)
            case "all_gather":
                return dist.all_gather(out, own, **common)
            case "all_gather_single":
                return dist.all_gather_single(effect.in_one(), own, **common)
            case "gather":
                return dist.gather(own, out if at_root else None, root, **common)
            case "scatter":
                return dist.scatter(out[0], parts if at_root else None, root, **common)
            case "reduce_scatter":
                return dist.reduce_scatter(out[0], parts, op, **common)
            case "reduce_scatter_single":
                return dist.reduce_scatter_single(out[0], torch.stack(parts), op, **common)
            case "all_to_all":
                return dist.all_to_all(out, parts, **common)
            case "all_to_all_single":
                return dist.all_to_all_single(effect.in_one(), torch.stack(parts), **common)
            case "all_gather_object":
                return dist.all_gather_object(out[0], an_object(rank, step.key), group)
            case "broadcast_object_list":
                return dist.broadcast_object_list(out[0], root, group)
            case "gather_object":
                room = out[0] if at_root else None
                return dist.gather_object(an_object(rank, step.key), room, root, group)
            case "scatter_object_list":
                given = [an_object(rank, step.key, part) for part in numbers]
                return dist.scatter_object_list(out[0], given if at_root else None, root, group)
            case "send":
                return dist.send(own, step.peer, group, step.tag)
            case "isend":
                return dist.isend(own, step.peer, group, step.tag)
            case "irecv":
                return dist.irecv(out[0], step.peer, group, step.tag)
        source = dist.recv(out[0], step.peer, group, step.tag)
        if source not in self.partners.get(effect.place, [source]):
            self.report.problems.append(f"{step} says that it came from rank {source}")
        return None


def run_program(program: Program, partners: dict[Place, dict[int, int]], directory: str) -> None:
    """Run a program on the calling rank; its report is left in `directory`."""
    torch.set_num_threads(1)
    report = Path(directory, f"rank{dist.get_rank()}")
    Interpreter(program, partners, report).run()
