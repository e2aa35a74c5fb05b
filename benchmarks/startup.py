"""How long a launcher takes from the command to the end of the first all_reduce.

    python -m benchmarks.startup [--rounds 7] [--ranks 2,4] [--json out/startup.json]

The same script on Gloo under torchrun and under ``phalanx run``, one that says "phalanx" instead of
"gloo" to torch, and one on Phalanx itself. All take turns; the median over the rounds counts.
Beside it: how long ``phalanx --help`` takes, and Python alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch
if sys.argv[1] == "phalanx itself":
    import phalanx as dist
    dist.init_process_group()
else:
    import torch.distributed as dist
    dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "0":
    print("first", time.time(), flush=True)
dist.destroy_process_group()
"""

OURS = [sys.executable, "-m", "phalanx"]
# Of each way the launcher, and what the script is told.
WAYS = {
    "torchrun, gloo": ("torchrun", "gloo"),
    "phalanx run, gloo": ("phalanx", "gloo"),
    "phalanx run, torch's backend phalanx": ("phalanx", "phalanx"),
    "phalanx run, phalanx itself": ("phalanx", "phalanx itself"),
}


def launch(way: str, ranks: int, script: Path) -> float:
    """Return the seconds until rank 0 has its first sum."""
    launcher, word = WAYS[way]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    else:
        command = [*OURS, "run", "-q"]
    command += ["--nproc-per-node", str(ranks), str(script), word]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout.split("first")[1].split()[0]) - start


def lasts(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", default="2,4", help="numbers with commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "first.py")
        script.write_text(SCRIPT)
        for turn in range(options.rounds + 1):
            for ranks in options.ranks.split(","):
                for way in WAYS:
                    passed = launch(way, int(ranks), script)
                    if turn:  # the first fills the page cache
                        seconds.setdefault(f"{ranks} ranks, {way}", []).append(passed)
            for name, command in {
                "phalanx --help": [*OURS, "--help"],
                "python alone": [sys.executable, "-c", "pass"],
            }.items():
                seconds.setdefault(name, []).append(lasts(command))
    print(f"to the end of the first all_reduce, {options.rounds} rounds, load {os.getloadavg()[0]}")
    for name, times in seconds.items():
        base = seconds.get(f"{name.split(' ranks')[0]} ranks, torchrun, gloo", times)
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=False))
        print(f"  {name:50} {statistics.median(times):6.3f} s  {ratio:5.2f} of torchrun's")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
