"""What always-on diagnosis costs an all_reduce of 8 bytes on two ranks.

    python -m benchmarks.diagnosis [--calls 2000] [--rounds 60] [--json out/diagnosis.json]

In every round the ranks make the same calls four times: as they are; without comparing the
operations of the ranks (mismatch detection); without recording them (flight recorder and call
sites); and as they are once more, which shows the noise. Costs are medians over the rounds of the
ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import phalanx as dist
from phalanx.launch.processes import run_processes

# What is left out: comparing, recording.
VARIANTS = {
    "as it is": (True, True),
    "not compared": (False, True),
    "not recorded": (True, False),
    "once more": (True, True),
}


def measure(calls: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per call of every variant in every round."""
    torch.set_num_threads(1)
    group = dist.group.WORLD.backend.engine
    tensor = torch.ones(2)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds + 1):
        names = list(VARIANTS)
        names = names[turn % 4 :] + names[: turn % 4]  # none is always the first
        for name in names:
            dist.barrier()
            group.measure(*VARIANTS[name])
            start = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor)
            passed = (time.perf_counter() - start) / calls
            group.measure(True, True)
            dist.barrier()
            tensor.fill_(1)
            if turn:  # the first is for warming up
                seconds[name].append(passed)
    return seconds


def cost(full: list[float], without: list[float]) -> float:
    """Return the share of a call's time that is saved by leaving something out."""
    return statistics.median(1 - less / all for all, less in zip(full, without, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = run_processes(measure, 2, options.calls, options.rounds)[0]
    full = seconds["as it is"]
    costs = {name: cost(full, seconds[name]) for name in VARIANTS if name != "as it is"}
    print(f"all_reduce of 8 bytes on two ranks, {options.rounds} rounds of {options.calls} calls")
    print(f"  comparing what the ranks do    {costs['not compared']:+.1%} of a call")
    print(f"  recording it, with call sites  {costs['not recorded']:+.1%} of a call")
    print(f"  noise (the same again)         {costs['once more']:+.1%}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"costs": costs, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
