"""What Slurm's variables say of where the ranks of a step are."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Below the ports that systems give to whoever asks for any, and above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ITEMS = re.compile(r",(?![^\[]*\])")


def first_host(environment: Mapping[str, str]) -> str:
    """Return the name of the host that rank 0 runs on; "" if it is not told."""
    for variable in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if listed := environment.get(variable):
            return expand(listed)[0]
    return ""


def port(environment: Mapping[str, str]) -> int:
    """Return a port that all ranks of a step know, and hardly another step on the host has."""
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return _FIRST_PORT + (31 * _number(job) + _number(step)) % _NUM_PORTS


def _number(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or 0)


def expand(names: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it: ``gpu[01-03,7],login1``."""
    return [name for item in _ITEMS.split(names) if item for name in _expand(item)]


def _expand(item: str) -> list[str]:
    found = _BRACKETS.search(item)
    if found is None:
        if "[" in item or "]" in item:
            raise ValueError(f"a list of hosts has a bracket without its other: '{item}'")
        return [item]
    head, tail = item[: found.start()], _expand(item[found.end() :] or "")
    return [head + number + rest for number in _numbers(found[1], item) for rest in tail]


def _numbers(ranges: str, item: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"a list of hosts has '{part}' for a range of numbers: '{item}'")
        last = last if dash else first
        if int(first) > int(last):
            raise ValueError(f"a list of hosts has a range that runs backwards: '{item}'")
        # Numbers keep the width of the first: 08, 09, 10.
        numbers += [str(each).zfill(len(first)) for each in range(int(first), int(last) + 1)]
    return numbers
