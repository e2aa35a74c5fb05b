"""Measure training steps with DistributedDataParallel, Phalanx's and torch's, in one run.

    python -m benchmarks.training --docs docs        # everything
    python -m benchmarks.training --quick            # a look

How a number comes about:

- Two ranks, processes with one thread each, are in a Phalanx world and in a Gloo world at once,
  and in a group of torch.distributed on Phalanx where a way needs it. Every way to train has its
  own copy of the model and its own optimizer (AdamW), and sees the same batches. "Alone" trains
  the plain module on both ranks at the same time, without communication.
- Before it is measured, each way is checked: its first gradients must be the averages of the
  ranks' own.
- Ways take turns, a few steps in a row each, in rounds that begin with another one each time, so
  that a slow moment of the machine hits all of them alike. The time of a row is that of the slower
  rank. Times are medians over the rounds; so are ratios to the step alone, taken within each round.
- Memory is measured in new processes, one way each: by how much the resident set of a rank rose
  at most over what it was before there was a model, and by how much its share of the machine's
  memory (PSS, which counts a page that two ranks use half in each) had risen after the last step.
- A way that fails is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx

from . import command, training_report
from .command import given, known, listed
from .models import WORKLOADS, Workload
from .training_report import REPORT
from .turns import RANKS, Stage, compare, group, launch, slowest_rank

POOL = 4  # batches that a rank goes round in
WARM_UP = 3  # steps: buckets are built anew after the first

Wrap = Callable[[nn.Module], nn.Module]


def _torch_ddp(backend: str, **options: Any) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module, process_group=group(backend), **options)

    return wrap


def _torch_fsdp(backend: str) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        from .torch_models import shard

        return shard(module, group(backend))

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
    "gloo": Way("torch's DDP on Gloo", _torch_ddp("gloo")),
    "gloo-view": Way("torch's, bucket views", _torch_ddp("gloo", gradient_as_bucket_view=True)),
    "torch-phalanx": Way("torch's DDP on Phalanx", _torch_ddp("phalanx")),
    "phalanx": Way("Phalanx's DDP", _phalanx_ddp()),
    "phalanx-view": Way("Phalanx's, bucket views", _phalanx_ddp(gradient_as_bucket_view=True)),
    "fsdp-gloo": Way("torch's FSDP2 on Gloo", _torch_fsdp("gloo")),
    "fsdp-phalanx": Way("torch's FSDP2 on Phalanx", _torch_fsdp("phalanx")),
}
REPLICATED = [name for name in WAYS if not name.startswith("fsdp")]


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    models: list[str]
    ways: list[str]
    rounds: int
    seconds: float  # of each way's row in a round
    memory_steps: int


FULL = Plan(["gpt-5m", "gpt-20m", "mlp", "many"], REPLICATED, 15, 1.5, 6)
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
    for (parameter, own), (_, averaged) in zip(
        plain.module.named_parameters(), training.module.named_parameters(), strict=True
    ):
        assert own.grad is not None
        phalanx.all_reduce(own.grad, op=phalanx.ReduceOp.AVG)
        torch.testing.assert_close(
            whole(averaged.grad),
            own.grad,
            msg=lambda text, at=parameter: f"{name}, gradient of {at}: {text}",
        )


def whole(tensor: Any) -> Tensor | None:
    """Return a tensor as it would be without sharding; all ranks ask together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def time_steps(stage: Stage, ways: list[str], model: str, rounds: int, seconds: float) -> dict:
    """Be one rank; return the seconds per step of each way in each round, here."""
    trainings = {}
    for name in ways:
        stage.enter(name)
        trainings[name] = training = Training(WORKLOADS[model], WAYS[name])
        if WAYS[name].communicates:
            check(name, training)
        training.time(WARM_UP)
    rows = {name: training.time for name, training in trainings.items()}
    steps = stage.repeats({name: partial(row, 1) for name, row in rows.items()}, seconds)
    times = stage.take_turns({name: partial(row, steps) for name, row in rows.items()}, rounds)
    return {"steps": steps, "times": times}


def measure_memory(stage: Stage, ways: list[str], model: str, steps: int) -> dict[str, int]:
    """Be one rank of a world with a single way; return the bytes that training took here."""
    (way,) = ways
    stage.enter(way)
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
    return {
        "peak": memory("status", "VmHWM") - before_peak,
        "share": memory("smaps_rollup", "Pss") - before_share,
    }


def memory(file: str, field: str) -> int:
    """Return what the system says of this process, in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/{file} has no field {field!r}")


def run(plan: Plan) -> dict[str, list[dict]]:
    """Measure everything, saying so as it goes."""
    results: list[dict] = []
    failures: list[dict] = []
    for model in plan.models:
        outcome = launch(time_steps, plan.ways, model, plan.rounds, plan.seconds)
        errors = dict(outcome.errors)
        found = []
        for way, times in slowest_rank([rank["times"] for rank in outcome.ranks]).items():
            used = launch(measure_memory, [way], model, plan.memory_steps)
            errors |= used.errors
            if not used.errors:
                steps = {"steps": outcome.ranks[0]["steps"], "times": times}
                most = {name: max(each[name] for each in used.ranks) for name in used.ranks[0]}
                found.append({"model": model, **describe(model), "way": way, **steps, **most})
        add_ratios(found)
        for result in found:
            print(training_report.progress(result), flush=True)
        results += found
        failures += [{"model": model, "way": way, "error": errors[way]} for way in errors]
    return {"results": results, "failures": failures}


def describe(model: str) -> dict[str, int]:
    sizes = [parameter.numel() for parameter in WORKLOADS[model].build().parameters()]
    return {"parameters": sum(sizes), "tensors": len(sizes)}


def add_ratios(results: list[dict]) -> None:
    """Put medians beside the times of a model, and the ratio to the step alone if it was taken."""
    alone = [one["times"] for one in results if one["way"] == "alone"]
    for one in results:
        one["seconds"] = statistics.median(one["times"])
        if alone:
            one["ratio"] = compare(one["times"], alone[0]).median


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    asked = given(options, "models", "ways", "rounds", "seconds")
    plan = replace(QUICK if options.quick else FULL, **asked)
    titles = {name: WORKLOADS[name].title for name in plan.models}
    titles |= {name: WAYS[name].title for name in plan.ways}
    about = {"ranks": RANKS, "rounds": plan.rounds, "titles": titles}
    command.carry_out(REPORT, options, arguments, about, lambda: run(plan))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser(REPORT, __doc__)
    models, ways = listed(known(WORKLOADS, "model")), listed(known(WAYS, "way"))
    add = parser.add_argument
    add("--models", type=models, metavar="NAMES", help="only these models")
    add("--ways", type=ways, metavar="NAMES", help="only these ways to train")
    add("--seconds", type=float, metavar="S", help="length of one way's row of steps in a round")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
