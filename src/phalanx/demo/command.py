"""Take a tour in a minute: ranks, an all_reduce, bugs that are caught, speed, a training run.

All that is shown is run: the code as it stands in its file, and what it really returns or raises.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx import leftovers

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.demo.stage import Stage
    from phalanx.demo.training import Learnt

EXAMPLES = [
    ("phalanx demo", "waits for a key between chapters"),
    ("phalanx demo --no-pause", "goes on by itself"),
    ("phalanx demo --fast", "without pauses, and with a short race and training"),
]

# The programs are copied out of the package: errors name lines of users' files, not of ours.
_MODULE = "phalanx_tour"
_STEPS, _FEWER_STEPS = 600, 400
_SIZES = {"4 B": 4, "64 KiB": 64 << 10, "4 MiB": 4 << 20}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--no-pause", action="store_true", help="do not wait for keys")
    parser.add_argument("--fast", action="store_true", help="do not wait, and do less")


def run(arguments: Namespace) -> int:
    from phalanx.debug import looks
    from phalanx.demo.stage import Quit, Stage

    stage = Stage(looks.terminal(), pauses=not (arguments.no_pause or arguments.fast))
    with tempfile.TemporaryDirectory(prefix=leftovers.prefix()) as folder, looks.tidy():
        _prepare_processes()
        _greet(stage)
        with stage.busy("importing torch ..."):
            tour = _programs(Path(folder))
        try:
            _ranks(stage, tour)
            _bugs(stage, tour)
            _race(stage, folder, 0.02 if arguments.fast else 0.1)
            _training(stage, tour, Path(folder), _FEWER_STEPS if arguments.fast else _STEPS)
            _end(stage)
        except Quit:
            pass
        finally:
            sys.path.remove(folder)
    return 0


def _prepare_processes() -> None:
    """Start what ranks are forked from, so that it has imported torch when they are needed.

    It takes no notice of Ctrl-C: this process does, and ranks end with it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["phalanx.demo.training"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _programs(folder: Path) -> Any:
    """Put the programs of the tour into a file of their own and import it."""
    path = folder / f"{_MODULE}.py"
    shutil.copyfile(Path(__file__).with_name("programs.py"), path)
    sys.path.insert(0, str(folder))  # processes that are started get this path as well
    sys.modules.pop(_MODULE, None)
    importlib.invalidate_caches()
    return importlib.import_module(_MODULE)


def _greet(stage: Stage) -> None:
    """Begin the first chapter, while there is nothing to run yet."""
    stage.chapter("Ranks, and an all_reduce")
    stage.say(
        "A distributed program is one function that several ranks run at once. They can be "
        "processes, or threads of one process, as here: good for a first try, and for tests."
    )


def _ranks(stage: Stage, tour: Any) -> None:
    import phalanx

    stage.code(tour.greet)
    stage.command("dist.run_threads(greet, 4)")
    stage.show("\n".join(phalanx.run_threads(tour.greet, 4)))


def _bugs(stage: Stage, tour: Any) -> None:
    stage.chapter("Bugs that say what they are")
    stage.say(
        "Rank 0 makes a call that the others do not make. Elsewhere such a job hangs, or dies of a "
        "lost connection."
    )
    stage.code(tour.forgetful)
    stage.command("dist.run_threads(forgetful, 3)")
    _fail(stage, tour.forgetful, 3)
    stage.say(
        "And here all ranks wait for each other, for ever. No timeout has to pass: they can see "
        "in shared memory who waits for whom."
    )
    stage.code(tour.impatient)
    stage.command("dist.run_threads(impatient, 3)")
    _fail(stage, tour.impatient, 3)


def _fail(stage: Stage, program: Any, size: int) -> None:
    """Run a program that is wrong, and show what one of its ranks gets."""
    import phalanx

    start = time.monotonic()
    outcomes: list[Any] = phalanx.run_threads(program, size, return_exceptions=True)
    took = f"{(time.monotonic() - start) * 1e3:.0f} ms"
    kinds = {type(outcome).__name__ for outcome in outcomes}
    title = f"{' and '.join(sorted(kinds))} on all {size} ranks, after {took}"
    stage.error(title, str(outcomes[-1]))


def _race(stage: Stage, folder: str, seconds: float) -> None:
    from phalanx.demo import gloo
    from phalanx.errors import DistError
    from phalanx.launch.processes import run_processes

    stage.chapter("Speed")
    if not gloo.available():
        stage.say("This torch has no Gloo to race against.")
        return
    stage.say(
        "Two ranks as processes reduce a tensor, on Phalanx and on torch.distributed's Gloo in "
        "turns. (phalanx bench measures more, and better.)"
    )
    try:
        with stage.busy("racing ..."):
            times = run_processes(gloo.race, 2, folder, list(_SIZES.values()), seconds, deadline=60)
    except (DistError, RuntimeError) as error:
        stage.error("The race could not be held", str(error))
        return
    rows = []
    for size, ranks in zip(_SIZES, zip(*times, strict=True), strict=True):
        ours, theirs = (max(taken) for taken in zip(*ranks, strict=True))
        rows.append([size, _time(ours), _time(theirs), f"{theirs / ours:.1f}x"])
    stage.table(["all_reduce of", "Phalanx", "Gloo", "faster by"], rows, best=3)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _training(stage: Stage, tour: Any, folder: Path, steps: int) -> None:
    from phalanx.demo.training import be_a_rank
    from phalanx.launch.processes import run_processes

    stage.chapter("Training")
    stage.say(
        "Two processes learn to tell two spirals apart. DistributedDataParallel keeps their "
        "weights the same: each sees half of the points, and gradients are averaged."
    )
    stage.code(tour.train)
    stage.command(f"train({steps}) on two processes")
    log = folder / "losses"
    arguments = (be_a_rank, 2, tour.train, tour.spirals, steps, str(log))
    if stage.console is None:
        learnt = run_processes(*arguments, deadline=120)
    else:
        from rich.live import Live

        with Live(
            console=stage.console,
            get_renderable=lambda: _progress(log, steps, stage.width),
            refresh_per_second=12,
        ):
            learnt = run_processes(*arguments, deadline=120)
    _learnt(stage, learnt)


def _progress(log: Path, steps: int, width: int) -> RenderableType:
    """Return what there is to see of the training by now."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from phalanx.demo.training import read, sparkline

    losses = read(log)
    bar = Table.grid(padding=(0, 2, 0, 0))
    loss = f"loss {losses[-1]:.4f}" if losses else "starting the ranks ..."
    bar.add_row(ProgressBar(steps, len(losses), 40), f"step {len(losses)} of {steps}", loss)
    return Group(bar, Text(sparkline(losses, min(width, 80)), "cyan"))


def _learnt(stage: Stage, learnt: list[Learnt]) -> None:
    from phalanx.demo.training import sparkline

    first, second = learnt
    if stage.console is None:
        stage.show(
            f"loss {first.losses[0]:.4f} {sparkline(first.losses, 60)} {first.losses[-1]:.4f}"
        )
    stage.show(_picture(first.picture, stage.console is not None))
    same = "bit for bit the same" if first.weights == second.weights else "DIFFERENT"
    stage.show(
        f"{first.right:.0%} of the points are on the right side; the weights of both ranks are "
        f"{same}: {first.weights} and {second.weights}."
    )


def _picture(points: list[list[bool]], coloured: bool) -> Any:
    """Draw which spiral each place belongs to; a character shows two places above each other."""
    from rich.text import Text

    if not coloured:
        return "\n".join("".join("#" if point else "." for point in row) for row in points[::2])
    colours = {True: "blue", False: "yellow"}
    text = Text()
    for upper, lower in zip(points[::2], points[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", f"{colours[above]} on {colours[below]}")
        text.append("\n")
    text.right_crop(1)
    return text


def _end(stage: Stage) -> None:
    stage.chapter("From here")
    stage.choices(
        {
            "phalanx run -n 2 train.py": "run a program of yours on two ranks",
            "phalanx top": "watch what every rank does",
            "phalanx why": "find out why nothing moves",
            "phalanx doctor": "see what would slow a job down on this machine",
            "phalanx bench": "measure every operation here",
        }
    )
