"""Measure training steps with DistributedDataParallel, Phalanx's and torch's, in one run.

    python -m benchmarks.training --docs docs        # everything
    python -m benchmarks.training --quick            # a look

How a number comes about:

- Two ranks, processes with one thread each, are in a Phalanx world and in a Gloo world at once.
  Every way to train has its own copy of the model and its own optimizer (AdamW), and sees the same
  batches. "Alone" trains the plain module on both ranks at the same time, without communication.
- Before it is measured, each way is checked: its first gradients must be the averages of the
  ranks' own.
- Ways take turns, a few steps in a row each, in rounds that begin with another one each time, so
  that a slow moment of the machine hits all of them alike. The time of a row is that of the slower
  rank. Times are medians over the rounds; so are ratios to the step alone, taken within each round.
- Memory is measured in new processes, one way each: by how much the resident set of a rank rose
  at most over what it was before there was a model, and by how much its share of the machine's
  memory (PSS, which counts a page that two ranks use half in each) had risen after the last step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.launch.processes import run_processes

from . import training_report
from .collectives import command_line, machine
from .models import WORKLOADS, Workload

RANKS = 2
POOL = 4  # batches that a rank goes round in
WARM_UP = 3  # steps: buckets are built anew after the first
TIMEOUT = timedelta(seconds=120)

Wrap = Callable[[nn.Module], nn.Module]


def _torch_ddp(**options: Any) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module, **options)

    return wrap


def _phalanx_ddp(**options: Any) -> Wrap:
    return lambda module: phalanx.DistributedDataParallel(module, **options)


@dataclass(frozen=True)
class Way:
    """One way to train: its name in tables, and what it wraps a module in."""

    title: str
    wrap: Wrap
    communicates: bool = True


WAYS = {
    "alone": Way("alone", lambda module: module, communicates=False),
    "gloo": Way("torch's DDP on Gloo", _torch_ddp()),
    "gloo-view": Way("torch's, bucket views", _torch_ddp(gradient_as_bucket_view=True)),
    "phalanx": Way("Phalanx's DDP", _phalanx_ddp()),
    "phalanx-view": Way("Phalanx's, bucket views", _phalanx_ddp(gradient_as_bucket_view=True)),
}


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    models: list[str]
    ways: list[str]
    rounds: int
    seconds: float  # of each way's row in a round
    memory_steps: int


FULL = Plan(["gpt-5m", "gpt-20m", "mlp", "many"], list(WAYS), 15, 1.5, 6)
QUICK = replace(FULL, rounds=4, seconds=0.5, memory_steps=4)


class Training:
    """A model that is trained in one way on one rank."""

    def __init__(self, workload: Workload, way: Way) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.module = workload.build()
        self.model = way.wrap(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        random = torch.Generator().manual_seed(1 + phalanx.get_rank())
        self.batches = cycle([workload.batch(random) for _ in range(POOL)])

    def compute_gradients(self) -> None:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.workload.loss(self.model(inputs), targets).backward()

    def step(self) -> None:
        self.compute_gradients()
        self.optimizer.step()

    def time(self, steps: int) -> float:
        """Return the seconds per step of a row that all ranks begin together."""
        phalanx.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps


def check(name: str, training: Training) -> None:
    """Compare the first gradients with the average of what the ranks compute alone."""
    plain = Training(training.workload, WAYS["alone"])
    plain.compute_gradients()
    training.compute_gradients()
    for (parameter, own), (_, given) in zip(
        plain.module.named_parameters(), training.module.named_parameters(), strict=True
    ):
        assert own.grad is not None
        phalanx.all_reduce(own.grad, op=phalanx.ReduceOp.AVG)
        torch.testing.assert_close(
            given.grad, own.grad, msg=lambda text, at=parameter: f"{name}, gradient of {at}: {text}"
        )


def join_gloo(directory: str) -> None:
    """Be in a world of torch.distributed, too."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/gloo",
        rank=phalanx.get_rank(),
        world_size=phalanx.get_world_size(),
        timeout=TIMEOUT,
    )


def leave_gloo() -> None:
    import torch.distributed as dist

    phalanx.barrier()
    dist.destroy_process_group()


def time_steps(directory: str, model: str, ways: list[str], rounds: int, seconds: float) -> dict:
    """Be one rank; return the seconds per step of each way in each round, here."""
    torch.set_num_threads(1)
    join_gloo(directory)
    trainings = {name: Training(WORKLOADS[model], WAYS[name]) for name in ways}
    for name, training in trainings.items():
        if WAYS[name].communicates:
            check(name, training)
    for training in trainings.values():
        training.time(WARM_UP)
    estimate = torch.tensor([max(training.time(1) for training in trainings.values())])
    phalanx.all_reduce(estimate, op=phalanx.ReduceOp.MAX)
    steps = max(1, round(seconds / estimate.item()))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        for name in ways[first:] + ways[:first]:
            times[name].append(trainings[name].time(steps))
    leave_gloo()
    return {"steps": steps, "times": times}


def measure_memory(directory: str, model: str, way: str, steps: int) -> dict[str, int]:
    """Be one rank of a world that does nothing else; return the bytes that training took here."""
    torch.set_num_threads(1)
    join_gloo(directory)
    for _ in range(2):  # what is only loaded or allocated with the first model is not this one's
        Training(WORKLOADS["tiny"], WAYS[way]).step()
    gc.collect()
    phalanx.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before_peak, before_share = memory("status", "VmHWM"), memory("smaps_rollup", "Pss")
    training = Training(WORKLOADS[model], WAYS[way])
    for _ in range(steps):
        training.step()
    phalanx.barrier()
    found = {
        "peak": memory("status", "VmHWM") - before_peak,
        "share": memory("smaps_rollup", "Pss") - before_share,
    }
    leave_gloo()
    return found


def memory(file: str, field: str) -> int:
    """Return what the system says of this process, in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/{file} has no field {field!r}")


def run(plan: Plan) -> list[dict]:
    """Measure everything, saying so as it goes."""
    results = []
    for model in plan.models:
        build = WORKLOADS[model].build()
        sizes = [parameter.numel() for parameter in build.parameters()]
        ranks = launch(time_steps, model, plan.ways, plan.rounds, plan.seconds)
        for way in plan.ways:
            times = [max(both) for both in zip(*(r["times"][way] for r in ranks), strict=True)]
            used = launch(measure_memory, model, way, plan.memory_steps)
            result = {
                "model": model,
                "parameters": sum(sizes),
                "tensors": len(sizes),
                "way": way,
                "steps": ranks[0]["steps"],
                "times": times,
                "peak": max(each["peak"] for each in used),
                "share": max(each["share"] for each in used),
            }
            results.append(result)
        add_ratios(results)
        for result in results[-len(plan.ways) :]:
            print(training_report.progress(result), flush=True)
    return results


def launch(fn: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        return run_processes(fn, RANKS, directory, *args)


def add_ratios(results: list[dict]) -> None:
    """Put medians beside the times, and the ratio to the same step alone where that was taken."""
    alone = {one["model"]: one["times"] for one in results if one["way"] == "alone"}
    for one in results:
        one["seconds"] = statistics.median(one["times"])
        if base := alone.get(one["model"]):
            pairs = zip(one["times"], base, strict=True)
            one["ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    asked = {name: getattr(options, name) for name in ("models", "ways", "rounds", "seconds")}
    plan = replace(
        QUICK if options.quick else FULL,
        **{name: value for name, value in asked.items() if value is not None},
    )
    data = {
        "command": command_line(sys.argv[1:] if arguments is None else arguments, "training"),
        "machine": machine(),
        "ranks": RANKS,
        "rounds": plan.rounds,
        "titles": {
            **{name: WORKLOADS[name].title for name in plan.models},
            **{name: WAYS[name].title for name in plan.ways},
        },
    }
    began = time.monotonic()
    data["results"] = run(plan)
    data["seconds"] = round(time.monotonic() - began, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    training_report.show(data)
    print(f"wrote {options.out}")
    if options.docs:
        training_report.write(data, options.docs)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=summary)

    def listed(known: dict[str, Any], what: str) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            names = [word for word in text.split(",") if word]
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f"unknown {what} {name!r} (known: {', '.join(known)})"
                    )
            return names

        return read

    add = parser.add_argument
    add("--quick", action="store_true", help="few and short rounds: a look")
    add("--models", type=listed(WORKLOADS, "model"), metavar="NAMES", help="only these models")
    add("--ways", type=listed(WAYS, "way"), metavar="NAMES", help="only these ways to train")
    add("--rounds", type=int, metavar="N", help="how often the ways take turns")
    add("--seconds", type=float, metavar="S", help="length of one way's row of steps in a round")
    add("--out", type=Path, default=Path("out/training.json"), help="every number, as JSON")
    add("--docs", type=Path, help="also write training-benchmarks.md and its plot there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
