"""Measure how long operations take, alone or beside Gloo and MPI.

Sizes count the larger buffer of a rank. The time of a call is that of its slowest rank; given are
the median (of the best round), the shortest, and the 99th percentile. algbw is size / time; busbw
is what memory or wires must carry for it, as in nccl-tests. With --against, implementations take
turns in the same run, and a ratio above 1 says that Phalanx is faster.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection
from pathlib import Path

from phalanx.bench import plan
from phalanx.bench.operations import DTYPES, OPERATIONS, REDUCE_OPS
from phalanx.bench.peers import PEERS, Peer
from phalanx.bench.results import parse_bytes, parse_sizes, size_range
from phalanx.commands import CommandError
from phalanx.launch.placement import usable_cores
from phalanx.machine import Machine

EXAMPLES = [
    ("phalanx bench", "all_reduce of two processes, 8 B to 64 MiB"),
    ("phalanx bench all_gather,barrier -n 2,4", "two operations, each on two and on four ranks"),
    ("phalanx bench all --sizes 8,64K,1M", "every operation at three sizes"),
    ("phalanx bench --against gloo,mpi", "how many times faster than these, in one run"),
    ("phalanx bench -b 1M -e 256M -f 4 --shared", "large tensors of the shared heap"),
    ("phalanx bench --dtype bfloat16 --reduce-op max", "other elements, another reduction"),
    ("phalanx bench --plot out.png --json out.json", "a picture and every number"),
]

SMALLEST, LARGEST, FACTOR = 8, 64 << 20, 2
MOST_RANKS = 256
ALL_PEERS = list(dict.fromkeys(name for known in PEERS.values() for name in known))
PICTURES = (".png", ".svg", ".pdf")
ALIASES = {"half": "float16", "float": "float32", "double": "float64", "prod": "product"}


def configure(parser: ArgumentParser) -> None:
    _configure_what(parser.add_argument_group("what is measured").add_argument)
    _configure_how(parser.add_argument_group("how it is measured").add_argument)
    add = parser.add_argument_group("what is kept").add_argument
    add("--plot", type=Path, metavar="FILE", help="draw time and bandwidth: a .png, .svg or .pdf")
    told = "write every number (default to stdout)"
    add("--json", nargs="?", const="-", metavar="FILE", help=told)


def _configure_what(add: Callable[..., Action]) -> None:
    operations = _names(OPERATIONS, "operation")
    told = "names with commas, or all (default all_reduce)"
    first = add("operations", nargs="*", type=operations, metavar="OPERATION", help=told)
    told = "the same, as an option"
    _complete(first, [*OPERATIONS, "all"])
    _complete(add("--op", type=operations, default=[], metavar="NAMES", help=told), OPERATIONS)
    add("--list", action="store_true", help="list operations, types and whom to compare with")
    told = "8,64K,1M; or 8:64M, doubled each time; or 8:64M:4, times 4"
    add("--sizes", type=_size_list, metavar="SIZES", help=told)
    add("-b", "--min", type=_bytes, metavar="SIZE", help="smallest size (default 8)")
    add("-e", "--max", type=_bytes, metavar="SIZE", help="largest size (default 64M)")
    add("-f", "--factor", type=_positive, metavar="N", help="from a size to the next (default 2)")
    told = "how many: 4, or 2,4, or auto for all cores (default 2)"
    add("-n", "--ranks", type=_ranks, default=[2], metavar="N", help=told)
    told = "what ranks are (default processes)"
    add("--ranks-as", choices=list(PEERS), default="processes", help=told)
    for flag, names, what, usual in (
        ("--dtype", DTYPES, "dtype", "float32"),
        ("--reduce-op", REDUCE_OPS, "reduction", "sum"),
    ):
        told = f"names with commas, or all (default {usual})"
        read = _names(names, what)
        _complete(add(flag, type=read, default=[usual], metavar="NAMES", help=told), names)
    add("--shared", action="store_true", help="use tensors of the shared heap")
    add("--async", action="store_true", dest="asynchronous", help="use async_op=True, then wait")


def _configure_how(add: Callable[..., Action]) -> None:
    told = "whom to compare with, with commas: gloo, mpi, ... (see --list)"
    action = add("--against", type=_peer_names, default=[], metavar="NAMES", help=told)
    _complete(action, ALL_PEERS)
    told = "for each size of each implementation (default 0.3)"
    add("--seconds", type=_seconds, default=0.3, metavar="S", help=told)
    add("--iterations", type=_positive, metavar="N", help="so many calls instead of so long")
    add("--warmup", type=_count, metavar="N", help="calls before those that count")
    told = "how often turns go round (default 3)"
    add("--rounds", type=_positive, default=3, metavar="N", help=told)
    add("--pin", action="store_true", help="give each rank cores of its own")
    told = "compare the first result of each size with the right one (default on)"
    add("--check", action=BooleanOptionalAction, default=True, help=told)
    told = "the Python environment whose mpi4py and mpirun are used (default: this one)"
    add("--mpi", type=Path, metavar="PREFIX", help=told)


def _complete(action: Action, names: Collection[str]) -> None:
    """Let a shell complete names, also after a comma."""

    def complete(prefix: str, **_: object) -> list[str]:
        before, comma, _last = prefix.rpartition(",")
        return [before + comma + name for name in names]

    action.completer = complete  # type: ignore[attr-defined]


def run(arguments: Namespace) -> int:
    if arguments.list:
        _list()
        return 0
    sections, notes = _plan(arguments)
    peers = _peers(arguments)
    _check_outputs(arguments)
    _check_memory(sections, len(peers))
    from phalanx.bench.session import Session

    return Session(arguments, sections, peers, notes).carry_out()


def _plan(arguments: Namespace) -> plan.Plan:
    asked = [*(name for names in arguments.operations for name in names), *arguments.op]
    found = plan.make(
        [OPERATIONS[name] for name in dict.fromkeys(asked or ["all_reduce"])],
        _sizes(arguments),
        arguments.ranks,
        arguments.dtype,
        arguments.reduce_op,
        asynchronous=arguments.asynchronous,
        checked=arguments.check,
    )
    if not found.sections:
        raise CommandError("nothing to measure: " + "; ".join(found.notes))
    return found


def _sizes(arguments: Namespace) -> list[int]:
    smallest, largest, factor = arguments.min, arguments.max, arguments.factor
    try:
        if arguments.sizes is None:
            smallest = SMALLEST if smallest is None else smallest
            return size_range(smallest, largest or max(LARGEST, smallest), factor or FACTOR)
        if smallest is not None or largest is not None:
            raise ValueError("--sizes says it all: leave out --min and --max")
        return parse_sizes(arguments.sizes, factor or FACTOR)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _peers(arguments: Namespace) -> list[Peer]:
    """Return whom to measure, Phalanx first."""
    kind = arguments.ranks_as
    ours = "phalanx-shared" if arguments.shared else "phalanx"
    known = {name: find for name, find in PEERS[kind].items() if name != ours}
    for name in arguments.against:
        if name not in known:
            raise CommandError(
                f"cannot measure {kind} against {name!r} (known: {', '.join(known)})"
            )
    prefix = arguments.mpi or Path(sys.prefix)
    peers = [PEERS[kind][name](prefix) for name in dict.fromkeys([ours, *arguments.against])]
    for peer in peers:
        if peer.missing:
            raise CommandError(f"cannot measure against {peer.title}: {peer.missing}")
    return peers


def _check_outputs(arguments: Namespace) -> None:
    """Find out before a long run that its numbers cannot be kept."""
    if arguments.json in OPERATIONS or arguments.json == "all":
        raise CommandError(
            f"--json takes a file, not an operation: name {arguments.json} before it, "
            f"or write --json - {arguments.json}"
        )
    if arguments.plot:
        from phalanx.extras import need

        if arguments.plot.suffix.lower() not in PICTURES:
            raise CommandError(
                f"cannot draw into {str(arguments.plot)!r}: end it with .png, .svg or .pdf"
            )
        need("matplotlib.figure", "bench", "a plot")
    for path in (arguments.plot, arguments.json):
        if path not in (None, "-"):
            _check_writable(Path(path))


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise CommandError(f"there is no directory {str(path.parent)!r} for {str(path)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"cannot write to {str(path)!r}")


def _check_memory(sections: list[plan.Section], num_peers: int) -> None:
    """Refuse what would drive the machine out of memory."""
    # Two buffers for each rank of each implementation, and as much again for a moment's check.
    needed = 3 * num_peers * max(one.ranks * size for one in sections for size in one.sizes)
    available = Machine().memory_limit() or sys.maxsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    if needed > available:
        raise CommandError(
            f"these sizes and ranks need about {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available: lower --max or --ranks"
        )


def _list() -> None:
    width = max(map(len, OPERATIONS))
    print("operations:")
    for name, operation in OPERATIONS.items():
        print(f"  {name:<{width}}  {operation.about}")
    print("dtypes:     " + ", ".join(DTYPES))
    print("reductions: " + ", ".join(REDUCE_OPS))
    for kind, peers in PEERS.items():
        print(f"against:    {', '.join(peers)} (ranks as {kind})")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _names(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Return a reader of names with commas between them, or "all"."""

    def read(text: str) -> list[str]:
        if text == "all":
            return list(known)
        names = [ALIASES.get(word, word) for word in _words(text)]
        for name in names:
            if name not in known:
                raise ArgumentTypeError(
                    f"unknown {what} {name!r} (known: {', '.join(known)}, and all)"
                )
        return names

    return read


def _peer_names(text: str) -> list[str]:
    names = _words(text)
    for name in names:
        if name not in ALL_PEERS:
            raise ArgumentTypeError(
                f"unknown implementation {name!r} (known: {', '.join(ALL_PEERS)})"
            )
    return names


def _size_list(text: str) -> str:
    """Check sizes; what they are depends on --factor as well."""
    try:
        parse_sizes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _ranks(text: str) -> list[int]:
    counts = []
    for word in _words(text):
        count = usable_cores(Machine()) if word == "auto" else _positive(word)
        if count > MOST_RANKS:
            raise ArgumentTypeError(f"at most {MOST_RANKS} ranks, got {count}")
        counts.append(count)
    return list(dict.fromkeys(counts))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number from 1 on, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise ArgumentTypeError(f"a whole number from 0 on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 600:
        raise ArgumentTypeError(f"between 0.001 and 600 seconds, got {text!r}")
    return seconds
