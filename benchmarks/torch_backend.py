"""Measure torch.distributed on Phalanx beside torch.distributed on Gloo, in one run.

    python -m benchmarks.torch_backend --docs docs        # everything
    python -m benchmarks.torch_backend --quick            # a look

Parts:

- calls: `torch.distributed`'s functions on a group of either backend, torch's functional
  all_reduce, and the same calls of Phalanx itself, which show what the way through torch costs.
- decode: a LLaMA-like model writes a text, one token at a time, split over the ranks by torch's
  tensor parallelism. Its logits must be those of the model that is not split.
- fsdp, ddp: training steps with torch's `fully_shard` and with its DistributedDataParallel. The
  first gradients must be the averages of the ranks' own.

How a number comes about: two ranks, processes with one thread each, are in both groups at once.
Ways take turns, a row each, in rounds that begin with another one each time. The slower rank
counts. A ratio is taken within each round; given are the median over the rounds and the middle half
of them. A way that fails is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import phalanx
from phalanx.bench.cells import Cell
from phalanx.bench.libraries import Call, Library, TorchLike
from phalanx.bench.measurement import warm_up
from phalanx.bench.operations import OPERATIONS
from phalanx.bench.results import parse_bytes

from . import command, torch_models, torch_report, training
from .command import given, known, listed
from .models import WORKLOADS
from .torch_report import REPORT
from .turns import RANKS, Row, Stage, group, launch, slowest_rank

LAYERS = 6
CHECKED_TOKENS = 16

SIZES = {
    "all_reduce": "8,1K,64K,1M,16M",
    "functional_all_reduce": "8,64K",
    "broadcast": "8,64K,1M",
    "all_gather_single": "8,64K,1M",
    "reduce_scatter_single": "8,64K,1M",
    "all_to_all_single": "8,64K,1M",
    "barrier": "0",
    "send_recv": "8,64K,1M",
}
CALLS = {
    **OPERATIONS,
    "functional_all_reduce": replace(OPERATIONS["all_reduce"], name="functional_all_reduce"),
}


class OnGroup:
    """torch.distributed's functions, all of them on one group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(dist, name), group=self.group)


class ThroughTorch(TorchLike):
    """torch.distributed on a group of one of its backends."""

    def __init__(self, backend: str, rank: int, size: int) -> None:
        super().__init__(OnGroup(group(backend)), rank, size)

    def functional_all_reduce(self, source: torch.Tensor, target: torch.Tensor) -> Call:
        start = partial(functional.all_reduce, source, "sum", self.dist.group)
        return lambda: functional.wait_tensor(start())


LIBRARIES: dict[str, Callable[[int, int], Library]] = {
    "gloo": partial(ThroughTorch, "gloo"),
    "phalanx": partial(ThroughTorch, "phalanx"),
    "itself": partial(TorchLike, phalanx),
}


def time_calls(
    stage: Stage, ways: list[str], name: str, sizes: list[int], rounds: int, seconds: float
) -> dict[int, dict[str, list[float]]]:
    """Be one rank; return the seconds of a call, by size, way and round."""
    libraries = {}
    for way in ways:
        stage.enter(way)
        libraries[way] = LIBRARIES[way](stage.rank, stage.size)
    gc.disable()
    found = {}
    for num_bytes in sizes:
        rows = {}
        for way, library in libraries.items():
            stage.enter(way)
            rows[way] = prepare_call(stage, library, name, num_bytes, seconds)
        found[num_bytes] = stage.take_turns(rows, rounds)
    return found


def prepare_call(stage: Stage, library: Library, name: str, num_bytes: int, seconds: float) -> Row:
    """Check the result of a call and warm up; return what times a row that fills `seconds`."""
    cell = Cell(library, CALLS[name], num_bytes)
    messages = library.messages(name, num_bytes)
    batches, calls = warm_up(
        lambda count: stage.slowest(cell.time(stage.line, 1, count).mean()), num_bytes, seconds
    )

    def row() -> float:
        times = cell.time(stage.line, batches, calls)
        return float(np.median(times.mean(axis=1))) / messages

    return row


def time_decoding(
    stage: Stage, ways: list[str], width: int, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Be one rank; return the seconds per token of each way in each round, here."""
    text = torch.randint(
        torch_models.VOCABULARY, (CHECKED_TOKENS,), generator=torch.Generator().manual_seed(1)
    )
    logits = {"whole": torch_models.read(build_decoder("whole", width), text)}
    models = {}
    for way in ways:
        stage.enter(way)
        models[way] = build_decoder(way, width)
        logits[way] = torch_models.read(models[way], text)
        for other, wanted in logits.items():
            torch.testing.assert_close(
                logits[way],
                wanted,
                msg=lambda text, way=way, other=other: f"logits, {way} beside {other}: {text}",
            )

    def row(model: torch_models.Decoder, count: int) -> float:
        phalanx.barrier()
        start = time.perf_counter()
        torch_models.decode(model, count)
        return (time.perf_counter() - start) / count

    trial = {way: partial(row, model, CHECKED_TOKENS) for way, model in models.items()}
    count = stage.repeats(trial, seconds)
    rows = {way: partial(row, model, count) for way, model in models.items()}
    return stage.take_turns(rows, rounds)


def build_decoder(way: str, width: int) -> torch_models.Decoder:
    torch.manual_seed(0)
    model = torch_models.Decoder(width, LAYERS)
    return model if way == "whole" else torch_models.parallelise(model, group(way))


@dataclass(frozen=True)
class Plan:
    """What is measured; `seconds` are the length of one way's row in a round, by part."""

    parts: list[str]
    operations: list[str]
    widths: list[int]
    models: list[str]
    rounds: int
    seconds: dict[str, float]


ROWS = {"calls": 0.1, "decode": 1.0, "fsdp": 1.5, "ddp": 1.5}
FULL = Plan(list(ROWS), list(SIZES), [256, 512, 1024], training.FULL.models, 15, ROWS)
QUICK = replace(FULL, rounds=4, seconds={part: length / 3 for part, length in ROWS.items()})

# What each way of training is called here.
STEPS = {
    "fsdp": {"alone": "alone", "fsdp-gloo": "gloo", "fsdp-phalanx": "phalanx"},
    "ddp": {"alone": "alone", "gloo": "gloo", "torch-phalanx": "phalanx"},
}


def run_calls(plan: Plan) -> Iterator[list[dict]]:
    for name in plan.operations:
        sizes = [parse_bytes(word) for word in SIZES[name].split(",")]
        ways = [way for way in LIBRARIES if way != "itself" or name in OPERATIONS]
        outcome = launch(time_calls, ways, name, sizes, plan.rounds, plan.seconds["calls"])
        for num_bytes in sizes:
            times = slowest_rank([rank[num_bytes] for rank in outcome.ranks])
            yield rows("calls", name, num_bytes, times, outcome.errors)


def run_decoding(plan: Plan) -> Iterator[list[dict]]:
    for width in plan.widths:
        ways = ["whole", "gloo", "phalanx"]
        outcome = launch(time_decoding, ways, width, plan.rounds, plan.seconds["decode"])
        yield rows("decode", f"width {width}", 0, slowest_rank(outcome.ranks), outcome.errors)


def run_steps(plan: Plan, part: str) -> Iterator[list[dict]]:
    names = STEPS[part]
    for model in plan.models:
        outcome = launch(training.time_steps, list(names), model, plan.rounds, plan.seconds[part])
        times = slowest_rank([rank["times"] for rank in outcome.ranks])
        yield rows(
            part,
            WORKLOADS[model].title,
            0,
            {names[way]: row for way, row in times.items()},
            {names[way]: error for way, error in outcome.errors.items()},
        )


def rows(
    part: str, what: str, num_bytes: int, times: dict[str, list[float]], errors: dict[str, str]
) -> list[dict]:
    """Return a result per way of one cell."""
    cell = {"part": part, "what": what, "bytes": num_bytes}
    return [
        *[{**cell, "way": way, "times": row, "error": None} for way, row in times.items()],
        *[{**cell, "way": way, "times": [], "error": why} for way, why in errors.items()],
    ]


PARTS: dict[str, Callable[[Plan], Iterator[list[dict]]]] = {
    "calls": run_calls,
    "decode": run_decoding,
    "fsdp": partial(run_steps, part="fsdp"),
    "ddp": partial(run_steps, part="ddp"),
}


def run(plan: Plan) -> dict[str, list[dict]]:
    """Measure everything, saying so as it goes."""
    results = []
    for part in plan.parts:
        for found in PARTS[part](plan):
            print(torch_report.progress(found), flush=True)
            results += found
    return {"results": results}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    plan = replace(
        QUICK if options.quick else FULL,
        **given(options, "parts", "operations", "widths", "models", "rounds"),
    )
    if options.seconds is not None:
        plan = replace(plan, seconds=dict.fromkeys(ROWS, options.seconds))
    about = {"ranks": RANKS, "rounds": plan.rounds, "layers": LAYERS}
    command.carry_out(REPORT, options, arguments, about, lambda: run(plan))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser(REPORT, __doc__)
    add = parser.add_argument
    for name, names, what in (
        ("--parts", PARTS, "part"),
        ("--operations", SIZES, "operation"),
        ("--models", WORKLOADS, "model"),
    ):
        read = listed(known(names, what))
        add(name, type=read, metavar="NAMES", help=f"only these, of {', '.join(names)}")
    add("--widths", type=listed(int), metavar="NUMBERS", help="only decoders of these widths")
    add("--seconds", type=float, metavar="S", help="length of one way's row in a round")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
