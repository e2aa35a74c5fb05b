"""Past one machine: the control plane by measurement, and a cost model, fitted and checked.

    python -m benchmarks.scale --docs docs        # about 10 minutes on 2 cores
    python -m benchmarks.scale --quick            # a look, two minutes

Fits the model of `phalanx plan` to all_reduce between hosts that are namespaces of this machine,
compares what it says of other hosts, links and sizes, and of training steps, with their times here,
and extrapolates to 10,000 ranks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.bench.plots import finish, grid
from phalanx.bench.results import readable_bytes, readable_seconds
from phalanx.plan import fitting
from phalanx.plan.fitting import Sample
from phalanx.plan.model import ALGORITHMS, Engine, Layout, Link, Machine, Model, best
from phalanx.plan.plots import over_bytes, over_hosts
from phalanx.testing.hosts import Hosts

from . import command, control_plane
from .command import given, listed
from .documents import Pictures, Report, Table, markdown, opening, show_tables

WIDTH, DEPTH, BATCH = 1024, 4, 32  # of the model whose training steps are measured
NETWORKS = {"10 Gbit/s, 50 µs": Link(10e9 / 8, 50e-6), "100 Gbit/s, 5 µs": Link(100e9 / 8, 5e-6)}
RANKS_PER_HOST = 8
HOSTS = (2, 8, 32, 128, 512, 1250)
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)


@dataclass(frozen=True)
class Plan:
    """What the model is checked against, and how many ranks meet."""

    layouts: list[str]
    rates: list[str]
    budget: float  # seconds per size
    control_plane: control_plane.Plan


FULL = Plan(["2x2", "3x1", "4x1", "4x2"], ["1gbit", "10gbit"], 1.0, control_plane.FULL)
QUICK = Plan(["2x2"], ["1gbit"], 0.2, control_plane.QUICK)


def layout_of(text: str) -> Layout:
    """Read "2x4": hosts, and ranks on each."""
    hosts, ranks = text.split("x")
    return Layout(int(hosts), int(ranks))


def train(steps: int) -> tuple[float, float]:
    """Be a rank that trains; return its seconds per step without and with the others."""
    import phalanx as dist
    from phalanx.parallel.ddp import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    batch = torch.ones(BATCH, WIDTH)

    def step() -> float:
        start = time.perf_counter()
        model(batch).sum().backward()
        return time.perf_counter() - start

    def median() -> float:
        step()
        dist.barrier()
        return statistics.median(step() for _ in range(steps))

    together = median()
    with model.no_sync():
        alone = median()
    dist.destroy_process_group()
    return alone, together


def run(plan: Plan) -> dict[str, Any]:
    """Measure everything, saying so as it goes."""

    def say(text: str) -> None:
        print(text, flush=True)

    machine, fitted = fitting.measure_machine(2, say, plan.budget)
    checks: list[Sample] = []
    training = []
    for rate in plan.rates:
        for text in plan.layouts:
            layout = layout_of(text)
            for library in ("phalanx", "gloo"):
                say(f"{library}: {text} ranks, {rate}")
                checks += fitting.measure(library, layout, rate, budget=plan.budget)
            with Hosts(layout.hosts, ranks=layout.ranks_per_host) as hosts:
                hosts.shape(rate=rate)
                times = hosts.launch(train, 10, timeout=300)
            alone, together = (max(each) for each in zip(*times, strict=True))
            training.append({"layout": text, "rate": rate, "alone": alone, "together": together})
    return {
        "fit": asdict(machine),
        "fitted": [asdict(sample) for sample in fitted],
        "checks": [asdict(sample) for sample in checks],
        "training": training,
        "control_plane": control_plane.run(plan.control_plane),
    }


def machine_of(data: dict[str, Any]) -> Machine:
    found = dict(data["fit"])
    return Machine(Engine(**found.pop("flat")), Engine(**found.pop("between")), **found)


def checked(data: dict[str, Any]) -> list[tuple[Sample, float]]:
    """Return what was measured beside what the model says of it."""
    machine = machine_of(data)
    samples = [Sample(**sample) for sample in data["checks"]]
    return [(sample, fitting.predict(machine, sample)) for sample in samples]


def fit_table(data: dict[str, Any]) -> Table:
    machine = machine_of(data)
    rows = [
        ["Gloo's ring, per step", readable_seconds(machine.flat.message), _rate(machine.flat.byte)],
        [
            "Phalanx between hosts, per message",
            readable_seconds(machine.between.message),
            _rate(machine.between.byte),
        ],
        ["Phalanx on one host", readable_seconds(machine.local), _rate(machine.local_byte)],
        ["adding", "", _rate(machine.add_byte)],
    ]
    return "What was fitted", ["", "each", "bytes"], rows


def _rate(per_byte: float) -> str:
    return f"{1e-9 / per_byte:.2f} GB/s" if per_byte else "free"


def check_table(data: dict[str, Any], library: str) -> Table:
    rows = []
    for sample, predicted in checked(data):
        if sample.library != library:
            continue
        rows.append(
            [
                f"{sample.hosts} x {sample.ranks_per_host}, {sample.rate}",
                readable_bytes(sample.num_bytes),
                readable_seconds(sample.seconds),
                readable_seconds(predicted),
                f"{predicted / sample.seconds - 1:+.0%}",
            ]
        )
    title = "Phalanx" if library == "phalanx" else "flat Gloo"
    return f"all_reduce, {title}", ["hosts, link", "size", "measured", "model", "error"], rows


def training_table(data: dict[str, Any]) -> Table:
    machine, rows = machine_of(data), []
    num_bytes = 4 * DEPTH * WIDTH * WIDTH
    for one in data["training"]:
        layout = layout_of(one["layout"])
        wire = float(one["rate"].removesuffix("gbit")) * 1e9 / 8
        cores = data["machine"]["cores"]
        model = Model(machine.shared(layout.size, cores), Link(wire, 0.0), layout)
        predicted = model.training_step(num_bytes, one["alone"], model.phalanx)
        rows.append(
            [
                f"{layout.hosts} x {layout.ranks_per_host}, {one['rate']}",
                *[readable_seconds(each) for each in (one["alone"], one["together"], predicted)],
                f"{predicted / one['together'] - 1:+.0%}",
            ]
        )
    title = f"Steps of DDP with {readable_bytes(num_bytes)} of gradients"
    return title, ["hosts, link", "without the network", "measured", "model", "error"], rows


def winner_table(data: dict[str, Any], network: str) -> Table:
    rows = []
    for hosts in HOSTS:
        model = Model(machine_of(data), NETWORKS[network], Layout(hosts, RANKS_PER_HOST))
        cells = []
        for size in SIZES:
            name = best(model, size)
            ratio = model.phalanx(size) / ALGORITHMS[name](model, size)
            cells.append(f"{name}, {readable_seconds(ALGORITHMS[name](model, size))}")
            cells[-1] += f" ({ratio:.1f}x)" if ratio >= 1.05 else ""
        rows.append([f"{hosts} ({hosts * RANKS_PER_HOST:,})", *cells])
    heading = ["hosts (ranks)", *[readable_bytes(size) for size in SIZES]]
    return f"Fastest all_reduce, {network}", heading, rows


def error_line(data: dict[str, Any]) -> str:
    """Say how far off the model is."""
    parts = []
    for library, title in (("phalanx", "Phalanx"), ("gloo", "flat Gloo")):
        errors = [
            abs(predicted / sample.seconds - 1)
            for sample, predicted in checked(data)
            if sample.library == library
        ]
        parts.append(f"{title}: {statistics.median(errors):.0%}, at worst {max(errors):.0%}")
    return "Error of the model, median over all that was checked: " + "; ".join(parts) + "."


def show(data: dict[str, Any]) -> None:
    """Print everything, with rich where it is installed."""
    tables = [*control_plane.tables(data["control_plane"]), fit_table(data)]
    tables += [check_table(data, "phalanx"), check_table(data, "gloo"), training_table(data)]
    show_tables([*tables, *[winner_table(data, network) for network in NETWORKS]])
    print(error_line(data))


def draw(data: dict[str, Any], directory: Path) -> Pictures:
    """Draw the extrapolation, a row per network."""
    figure, axes = grid(4, most_columns=2, panel=(4.4, 3.0))
    for row, (network, link) in enumerate(NETWORKS.items()):
        model = Model(machine_of(data), link, Layout(HOSTS[-1], RANKS_PER_HOST))
        over_bytes(axes[2 * row], model)
        over_hosts(axes[2 * row + 1], model, 64 << 20)
        for axis in axes[2 * row : 2 * row + 2]:
            axis.set_title(f"{axis.get_title()}; {network}", fontsize=8)
    finish(figure, axes, "time of all_reduce (s)").savefig(directory / "scale.png", dpi=110)
    return [("all_reduce on up to 10,000 ranks, by the model", "scale.png")]


def document(data: dict[str, Any], pictures: Pictures) -> str:
    """Return docs/scale.md."""
    clients, ranks = control_plane.tables(data["control_plane"])
    parts = [
        *opening("Past one machine", "scale", data),
        CONTROL,
        f"### {clients[0]}",
        markdown(clients),
        CLIENTS,
        f"### {ranks[0]}",
        markdown(ranks),
        RANKS,
        MODEL,
        markdown(fit_table(data)),
        CHECK,
        error_line(data),
    ]
    for table in (
        check_table(data, "phalanx"),
        check_table(data, "gloo"),
        training_table(data),
    ):
        parts += [f"### {table[0]}", markdown(table)]
    parts.append(EXTRAPOLATION)
    parts += [f"![{caption}]({name})" for caption, name in pictures]
    for network in NETWORKS:
        table = winner_table(data, network)
        parts += [f"### {table[0]}", markdown(table)]
    return "\n\n".join(parts) + "\n"


CONTROL = """\
What happens when there are more ranks and hosts than one machine has: what brings them together is
measured here, with as many ranks as fit; what moves their data is predicted, by a model that is
checked where it can be. `phalanx plan` gives the model's answers for your hosts and network.

## Bringing ranks together

By default rank 0 runs a store ([`TCPStore`](api/stores.md)), which every rank has a connection to.
Where there is a Redis or Valkey server already, `init_method="redis://host:6379/0?job=NAME"` uses
that instead, with the extra `phalanx[redis]`; `rediss://` is TLS, and a password goes where URLs
have it. Ranks are then told by the URL, the arguments or the launcher who they are. Jobs with
different names do not meet; without `?job=`, launchers' names for them count. What a world leaves
in the server is removed by its last rank; after a crash the server forgets it in a week."""

CLIENTS = """\
Memory is the server's, each connection's buffers in the kernel aside. A barrier of all is one
request of each client and its answer. A process may have as many connections as descriptors: the
server raises its soft limit up to the hard one by itself (`ulimit -Hn`), and says to the client
that no longer fits, and to nobody else, that there are none left."""

RANKS = """\
These ranks are threads, 128 to a process, and have no data to send. All else is real: connections,
boards of hosts, wardens. *Check in* is the meeting of all ranks; *the world* is the first group,
which tells all ranks of all hosts who is where and makes their boards; *new_group* is another group
of everybody. Two cores do the work of all ranks here, where each has its own on real hosts: what
grows is what to look at. A host's death is known everywhere within the same few seconds, as it is
told by one host to a log that the others read. Memory is shared by the ranks of a host, and grows
with the world: a record for each rank. Deadlocks are looked for in worlds of up to 1,024 ranks."""

MODEL = """\
## The model

The time of a message is a constant, its bytes, and what is added up of them
([Hockney 1994](https://doi.org/10.1016/S0167-8191(06)80021-9), [Thakur, Rabenseifner and Gropp
2005](https://doi.org/10.1177/1094342005051521)). With `a` for a message (an engine's constant and
the link's latency), `b` for a byte on a host's link, `e` for a byte that an engine copies, `g` for
one that is added, `l` and `m` for a collective within a host and each of its bytes, H hosts of M
ranks (P in all) need for S bytes:

| | |
|---|---|
| flat ring (Gloo) | `2(P-1)(a + max(b, e)S/P) + (P-1)g S/P` |
| one rank per host (Phalanx up to 32 KiB) | `2l + mS + log2(H)(a + (b + e + g)S)` |
| a slice per rank (Phalanx beyond) | `2l + mS`, and between hosts, with s = S/M |
| 2 hosts | `a + bMs + (e + g)s` for each MiB of s, while the next one is reduced |
| more, if that is less | `log2(H)(a + (bM + e + g)s)` |
| more | `2(H-1)(a + (bM + e)s/H) + (H-1)g s/H` |

Not in it: congestion beyond the hosts' own links, stragglers, lost packets. The constants come from
two hosts with a rank each, and from one host with two; each line is a least-squares fit of relative
errors over six sizes, 4 B to 8 MiB. `phalanx plan --measure FILE` does that on your machine."""

CHECK = """\
## Checked

Hosts that are namespaces of this machine ([how](hosts.md)), with links of a given rate: none of
these layouts and links was part of the fit. All ranks share this machine's cores, so the model is
given each constant as many times as there are ranks to a core. An error of +50% says that the model
predicts half as much again as was measured."""

EXTRAPOLATION = f"""\
## Extrapolated

{RANKS_PER_HOST} ranks on each host, with cores of their own, and the constants of this machine. In
tables: the fastest algorithm and its time, and how many times longer the one takes that Phalanx
chooses, where that is another."""


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(REPORT, __doc__)
    add = parser.add_argument
    add("--layouts", type=listed(str), metavar="HxM", help="to check: 2x2,4x1")
    add("--rates", type=listed(str), metavar="RATES", help="of links: 1gbit,10gbit")
    add("--budget", type=float, metavar="SECONDS", help="time per size")
    add("--clients", type=listed(int), metavar="N", help="of a store: 256,1024")
    add("--ranks", type=listed(int), metavar="N", help="that meet: 64,256")
    options = parser.parse_args(arguments)
    if reason := Hosts.unavailable():
        raise SystemExit(reason)
    plan = replace(QUICK if options.quick else FULL, **given(options, "layouts", "rates", "budget"))
    meet = replace(plan.control_plane, **given(options, "clients", "ranks"))
    plan = replace(plan, control_plane=meet)
    command.carry_out(REPORT, options, arguments, {}, lambda: run(plan))
    return 0


REPORT = Report("scale", "scale.md", show, draw, document)

if __name__ == "__main__":
    raise SystemExit(main())
